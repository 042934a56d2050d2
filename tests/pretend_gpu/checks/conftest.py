"""These tests need the pretended GPU, which a process has from its start on or not at all."""

import sys

# Without the plugin nothing here is collected.
collect_ignore_glob = [] if "tests.pretend_gpu.plugin" in sys.modules else ["test_*.py"]
