"""`Preset`: one number of a table or script, and how it was evaluated."""

from dataclasses import dataclass, field
from typing import Any, Literal

from dlm_lens.evaluation.settings import GenerationSettings, LikelihoodSettings

Kind = Literal["likelihood", "greedy completion", "generation"]


@dataclass(frozen=True)
class Preset:
    """One task of one table, for one family: what the harness is asked and how the model answers.

    Args:
        name: "PAPER/TABLE/MODEL/TASK", or "AUTHORS/SCRIPT/TASK" of a public evaluation script.
        model: the checkpoint that the paper evaluated; any of its family takes the settings.
        task: of lm-evaluation-harness, or shipped here.
        kind: whether the number is a likelihood, a greedy completion or a generation.
        metric: the harness's metric, with its filter.
        num_fewshot: worked examples; None for the task's own.
        chat: whether the prompt is a chat.
        multiturn: whether the worked examples of a chat are turns of it, rather than one text.
        likelihood: settings of likelihoods.
        generation: settings of generation.
        add_bos: whether texts begin with the beginning-of-text token.
        max_length: positions of a canvas; None for the model's.
        source: where the settings stand.
        assumptions: what stands nowhere and was chosen here.
    """

    name: str
    model: str
    task: str
    kind: Kind
    metric: str
    num_fewshot: int | None = None
    chat: bool = False
    multiturn: bool = True
    likelihood: LikelihoodSettings = field(default_factory=LikelihoodSettings)
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    add_bos: bool = False
    max_length: int | None = None
    source: str = ""
    assumptions: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """Arguments of `evaluate`, next to the model: `evaluate(model, **preset.settings())`."""
        return {
            "tasks": self.task,
            "num_fewshot": self.num_fewshot,
            "chat": self.chat,
            "multiturn": self.multiturn,
            "likelihood": self.likelihood,
            "generation": self.generation,
            "add_bos": self.add_bos,
            "max_length": self.max_length,
        }
