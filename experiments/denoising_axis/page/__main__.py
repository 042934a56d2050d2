"""`python -m dlm_lens.experiments.denoising_axis.page` writes docs/results_axis.md."""

from dlm_lens.experiments.denoising_axis.page import PAGE, make_page
from dlm_lens.experiments.pages.appendix import write_page

if __name__ == "__main__":
    write_page(PAGE, *make_page())
