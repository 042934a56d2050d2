"""docs/results_axis.md against the committed results."""

from dlm_lens.experiments.denoising_axis.page import PAGE, RESULTS, experiments, make_page


def test_the_page_is_what_the_results_say() -> None:
    held = RESULTS.is_dir() and any(RESULTS.iterdir())
    assert PAGE.is_file() == held, "`python -m dlm_lens.experiments.denoising_axis.page` writes the page"
    if held:
        page, found = make_page()
        assert page == PAGE.read_text(encoding="utf-8")
        # An experiment is declared, with its rules, before it has results.
        assert {one.experiment.name for one in found} == {one.name for one in experiments()}
        assert "items are missing" not in page
