"""`Miniature`: one network of the miniature, trained once and kept."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from dlm_lens.experiments.one_token.language import toy, training_text
from dlm_lens.experiments.one_token.variants import VARIANTS

SCRATCH = "scratch"


@dataclass(frozen=True)
class Miniature:
    """What determines a trained network.

    Runs with one seed begin with the same weights, as far as they share them, and see the same batches and masks.

    Args:
        variant: of `VARIANTS`.
        seed: of weights, order of the data and masks.
        start: "scratch", or an AR model to convert, such as "toy-ar".
        steps: of the optimiser.
        batch_size: sequences per step.
        corpus: sequences of the training text.
        optimizer: "muon" or "adamw".

    Raises:
        ValueError: an unknown variant, or a count below 1.
    """

    variant: str
    seed: int
    start: str = SCRATCH
    steps: int = 300
    batch_size: int = 32
    corpus: int = 20_000
    optimizer: str = "muon"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"{self.variant!r} is no variant; choose from {', '.join(VARIANTS)}")
        for name in ("steps", "batch_size", "corpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def of(cls, item: Mapping[str, Any], settings: Mapping[str, Any]) -> "Miniature":
        """From an item with variant and seed and the settings of an experiment."""
        shared = {name: settings[name] for name in ("start", "steps", "batch_size", "corpus", "optimizer")}
        return cls(item["variant"], item["seed"], **shared)

    @property
    def name(self) -> str:
        """Of its directory; other settings have another."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        start = Path(self.start).name
        return f"{start}-{self.variant}-{self.steps}steps-seed{self.seed}-{digest}"

    def settings(self, output: Path) -> Any:
        """As the trainer wants them: those of `experiments/toy` with another batch, in bf16, not compiled."""
        from dlm_lens.training.settings import ModelSettings

        train = toy("train")
        whole = train.Settings(
            "toy", self.optimizer, self.seed, self.steps, self.batch_size, self.corpus, compiled=False
        ).full(output)
        shift = self.start != SCRATCH
        return replace(
            whole,
            model=ModelSettings(start=self.start if shift else "", **VARIANTS[self.variant].options()),
            objective=replace(whole.objective, logit_shift=shift),
            save_steps=100,
            save_minutes=1.0,
        )


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold a directory against other processes, which wait; a killed process leaves no lock behind."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        _lock(file)
        yield


def _lock(file: TextIO) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    fcntl.flock(file, fcntl.LOCK_EX)


def trained(run: Miniature, directory: Path) -> Path:
    """The last checkpoint of a run; trained first, or gone on with, where it is not there."""
    from dlm_lens.training import MaskedDiffusionTrainer
    from dlm_lens.training.checkpoints import last_checkpoint, step_of

    found = last_checkpoint(directory)
    if found is not None and step_of(found) >= run.steps:
        return found
    corpus, _ = training_text(run.corpus)
    tokenizer = toy("tokenizer").build_tokenizer()
    trainer = MaskedDiffusionTrainer(network(run), run.settings(directory), corpus, tokenizer=tokenizer)
    trainer.train(resume_from_checkpoint=True)
    made = trainer.last_checkpoint
    if made is None or step_of(made) < run.steps:
        raise RuntimeError(f"{directory} ended before step {run.steps}; start the same command again")
    return made


def network(run: Miniature) -> Any:
    """The untrained network; what it shares with the plain one has the plain one's initial weights."""
    variant = VARIANTS[run.variant]
    if run.start != SCRATCH:
        from dlm_lens.training import convert

        options: dict[str, Any] = variant.options()
        return convert(run.start, seed=run.seed, **options)
    build = toy("model").build_model
    plain, model = build("toy", run.seed), build("toy", run.seed, **variant.fields())
    model.load_state_dict(plain.state_dict(), strict=False)
    return model
