"""`python -m dlm_lens.experiments.attention_sinks.page` writes docs/results.md."""

from dlm_lens.experiments.attention_sinks.page import PAGE, make_page
from dlm_lens.experiments.pages.appendix import write_page

if __name__ == "__main__":
    write_page(PAGE, *make_page())
