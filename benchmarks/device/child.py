"""`python -m benchmarks.device.child MODULE ...`: `python -m MODULE ...` in a process with the pretended GPU."""

import runpy
import sys
from importlib import import_module

if __name__ == "__main__":
    import_module("tests.pretend_gpu.plugin")  # installs the device, before torch is imported

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
