"""`python -m dlm_lens.cli`: the console script, for an environment that has none installed."""

from dlm_lens.cli.app import main

main()
