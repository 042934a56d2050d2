"""`python -m dlm_lens.experiments.one_token.page` writes docs/results_one_token.md."""

from dlm_lens.experiments.one_token.page import main

if __name__ == "__main__":
    main()
