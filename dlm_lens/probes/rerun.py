"""`record_run`: statistics of a run that is over, on the canvases that it saw."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from dlm_lens.attention import exclusive
from dlm_lens.recording import Recorder, Recording
from dlm_lens.recording.recorder import Storage
from dlm_lens.sampling import DenoisingRun, Sampler, StoredRun


@torch.no_grad()
@exclusive
def record_run(
    model: Any,
    run: DenoisingRun,
    reducers: Sequence[Any],
    *,
    layers: Sequence[int] | None = None,
    dtype: Storage = "float32",
    progress: bool = False,
) -> Recording:
    """Record statistics of a finished run: its canvases go through the network again, one forward pass a step.

    What `record` gives with the same reducers, without sampling again; the statistic may depend on what the run
    showed, such as its sinks. A guided run is recorded in its conditional half.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, without hooks (they do not run here).
        reducers: what to record (`dlm_lens.recording`).
        layers: indices of the layers, negative from the end; None for all.
        dtype: how statistics are kept.
        progress: show a progress bar.

    Raises:
        TypeError: the run is no `DenoisingRun`.
        ValueError: a run of another model or sampler, or what `Recorder` refuses.
    """
    stored = StoredRun(model, run)
    recorder = Recorder(model, reducers, layers=layers, dtype=dtype)
    recorder.start(None if stored.causal else _sampler_like(run), stored.content)
    recorder.answer = run.masked[0].to(stored.device)
    try:
        for step in tqdm(range(run.steps), desc="recording", unit="step", disable=not progress):
            plan = stored.plan(step)
            canvas, masked = (each[step].to(stored.device) for each in (run.canvases, run.masked))
            recorder.step(plan, canvas, masked)
            stored.states(step)
            recorder.finish(plan, canvas, None, masked)
    finally:
        recorder.stop()
    return recorder.recording(run)


def _sampler_like(run: DenoisingRun) -> Sampler:
    """What a recorder asks of a sampler: whether the network took padding for content."""
    sampler, settings = Sampler(), run.settings
    guided = bool(settings.get("cfg_scale"))
    sampler.unpadded = guided and bool(settings.get("reference_quirks") and settings.get("unpadded_guidance"))
    return sampler
