"""A recording that is interrupted, resumed and loaded again, against the one that was not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl

ARRAYS = ("canvases", "open", "unmasked", "revised", "proposals")


def resumed_as_unbroken(
    model: Any, prompts: Any, folder: Path, *, reducers: Sequence[Any] = (), passes: int = 4, **settings: Any
) -> dl.Recording:
    """Stop a recording at a pass, resume and load it, and check it against the unbroken one, which is returned.

    Args:
        model: of a run with more than `passes` steps.
        prompts: of the run.
        folder: where the recording is stored.
        reducers: beside received attention.
        passes: the pass at which it is stopped.
        **settings: of the run.
    """
    reducers = [dl.ReceivedAttention(min_viewers=1), *reducers]
    whole = dl.record(model, prompts, reducers, **settings)
    assert whole.run.steps > passes - 1
    resumed = resumed_recording(model, folder, passes, prompts, reducers, **settings)
    for other in (resumed, dl.Recording.load(folder)):
        for name in ARRAYS:
            assert getattr(other.run, name).equal(getattr(whole.run, name)), name
        assert other.run.spans == whole.run.spans
        assert other.run.row_steps.equal(whole.run.row_steps)
        assert other.expected().equal(whole.expected())
        found, wanted = dl.received_of(other).values, dl.received_of(whole).values
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    return whole


def resumed_recording(model: Any, to: Path, passes: int, prompts: Any, reducers: Any, **settings: Any) -> Any:
    """The recording of a run that is interrupted in a pass of the decoder, counted from 1, and resumed."""
    done: list[int] = []

    def stop(*_: Any) -> None:
        done.append(1)
        if len(done) == passes:
            raise KeyboardInterrupt

    handle = model.model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        dl.record(model, prompts, reducers, to=to, **settings)
    handle.remove()
    return dl.record(model, prompts, reducers, to=to, **settings)
