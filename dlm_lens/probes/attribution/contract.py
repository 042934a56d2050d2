"""`Contract`: what an attribution is an attribution of; every result carries one and prints it."""

from dataclasses import dataclass, fields
from pathlib import Path

from dlm_lens.adapters.model_names import name_of
from dlm_lens.recording.model_identity import weights_digest


@dataclass(frozen=True)
class Contract:
    """What an attribution explains, and what was held fixed while it was measured.

    "The Attribution Contract" (2605.23080) asks of every attribution which output is explained, which features are
    eligible, which generative process is assumed, what is held fixed and which score of the model is attributed.
    The fields `baseline`, `method`, `steps`, `model` and `digest` are ours.

    Args:
        output: what is explained.
        score: the number that is attributed.
        eligible: the nodes or edges that can receive attribution.
        process: how the outputs come about.
        fixed: what is the same in all passes.
        base: the run that is patched.
        baseline: where the values that are put in come from.
        method: how the effect was computed.
        steps: the steps of the run.
        model: name of the model.
        digest: of its weights.
    """

    output: str
    score: str
    eligible: str
    process: str
    fixed: tuple[str, ...]
    base: str
    baseline: str
    method: str
    steps: tuple[int, ...]
    model: str
    digest: str

    def __str__(self) -> str:
        """The fields, one on each line."""
        names = [one.name for one in fields(self)]
        width = max(map(len, names))
        values = {
            name: "; ".join(value) if name == "fixed" else shown_steps(value) if name == "steps" else value
            for name in names
            for value in [getattr(self, name)]
        }
        return "\n".join(f"{name:<{width}}  {value}" for name, value in values.items())

    def differences(self, other: "Contract") -> tuple[str, ...]:
        """The fields in which two contracts differ: results are comparable where only `method` is among them."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) != getattr(other, one.name))


def shown_steps(steps: tuple[int, ...]) -> str:
    """Steps as text: a range where they have no gaps."""
    if len(steps) > 2 and steps == tuple(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def model_fields(model: object) -> dict[str, str]:
    """The fields of a contract that name the model."""
    name = name_of(model)
    return {"model": Path(name).name if Path(name).is_absolute() else name, "digest": weights_digest(model)}
