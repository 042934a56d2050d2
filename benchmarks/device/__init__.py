"""Every check and benchmark that only a GPU can give, in parts: `python -m benchmarks.device`."""
