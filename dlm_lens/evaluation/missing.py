"""The sentence for those who have not installed lm-evaluation-harness."""

MISSING = "evaluation needs lm-evaluation-harness ({}); install it with: pip install 'dlm-lens[eval]'"
