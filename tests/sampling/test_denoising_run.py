"""`DenoisingRun`: what a run keeps, and where the rest is."""

import pytest

import dlm_lens as dl
from dlm_lens.sampling import StoredRun
from dlm_lens.testing import tiny


def test_logits_are_not_kept_and_the_error_says_where_they_are() -> None:
    model, seen = tiny("llada"), {}
    run = dl.denoise(
        model, "w3 w4 w5", steps=2, gen_length=4, on_logits=lambda step, _, logits: seen.update({step: logits})
    )
    with pytest.raises(AttributeError, match=r"no logits: denoise\(.*, on_logits=f\) .*StoredRun computes them"):
        _ = run.logits
    assert not hasattr(run, "logits")
    stored = StoredRun(model, run)
    with stored.at(1):
        stored.forward(1)
        again = stored.logits(stored.states(1))
    assert (again - seen[1][run.open[1]]).abs().max() < 1e-5
