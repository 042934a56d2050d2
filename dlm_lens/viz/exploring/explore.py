"""`explore`: a widget in a notebook that shows a run, and what becomes of it without a key, a head or a token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlm_lens.attention import HookLike, checked
from dlm_lens.attention.model_access import network_of
from dlm_lens.sampling.settings import check_model
from dlm_lens.sinks import Detector
from dlm_lens.sinks.detectors.base import as_detector
from dlm_lens.viz.reporting.data import START

if TYPE_CHECKING:
    from dlm_lens.viz.exploring.widget import Explorer

NOT_TAKEN = ("attention_mask", "logits", "observers", "on_canvas", "on_logits", "progress", "resume")
"""Arguments of `denoise` that an explorer has no place for, since it repeats the run."""


def explore(
    model: Any,
    prompt: Any,
    *,
    row: int = 0,
    hooks: Sequence[HookLike] = (),
    detector: Detector | str | None = None,
    seed: int | list[int] | None = 0,
    **settings: Any,
) -> "Explorer":
    """Show a run step by step in a notebook, hide keys and heads, edit its canvas, and see what changes.

    The widget shows the canvas, the grid of layers and heads, the sinks, what a head's keys receive, its pattern,
    and the logit lens of a position. Hiding a key or a head, or editing the canvas, repeats the run from the same
    seed beside the first one: the *twin*. Everything that is shown is an attribute of the result, and
    `explorer.code` is the Python that computes it. One prompt is shown at a time, run alone: it does not depend on
    its batch.

    Scores are sent to the page step by step, as it shows them; nothing comes from a network.

    Args:
        model: from `dlm_lens.load`.
        prompt: as for `dlm_lens.denoise`, which then runs; or a `DenoisingRun`, a `Recording` with received
            attention of all queries, or a tuple of a `Received` and its run. A recording of one prompt with every
            layer and head is shown as it is, and repeated before the first change. Other runs are repeated at once.
            Repeated from its prompt, seed and settings, a run must come out the same.
        row: which of several prompts to show first.
        hooks: interventions under which the run is made too; for a run, those that it had.
        detector: the rule with which the widget starts, or its text, such as "above-std:3"; `AboveMean(3.0)` by
            default.
        seed: of a prompt's run; one number, or one per prompt.
        **settings: of `dlm_lens.denoise`, with a prompt: steps, gen_length, block_length, temperature, ...

    Raises:
        ImportError: anywidget is not installed.
        ValueError: a model without a sampler, a prompt, setting, hook or row that cannot be, a rule that reads
            hidden states, a part of the steps of a run, or a run that its prompt, seed and settings do not repeat.
    """
    from dlm_lens.viz.exploring.exploration import Exploration
    from dlm_lens.viz.exploring.widget import Explorer  # needs anywidget

    model = network_of(model)
    check_model(model)
    for name in NOT_TAKEN:
        if name in settings:
            raise ValueError(f"explore takes no {name}, since it repeats the run; call dlm_lens.denoise instead")
    rule = START if detector is None else as_detector(detector)
    if rule.reads_hidden_states:
        raise ValueError(f"{rule!r} reads hidden states, and explore shows received attention; give another rule")
    exploration = Exploration(
        model,
        prompt,
        row=row,
        hooks=checked(hooks),
        rule=rule,
        seed=seed,
        settings=settings,
        progress=lambda done, steps: None,
    )
    return Explorer(exploration)
