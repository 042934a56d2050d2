"""`Miniature`: one trained network of the miniature tables; `VARIANTS`: the networks that the paper compares."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlm_lens.attention import Placement
from dlm_lens.experiments.one_token.toy_language import toy, training_text
from dlm_lens.files.locks import alone

SCRATCH = "scratch"

AR = "ar"
"""The variant of the autoregressive model that is trained on a text first, to be converted."""

ATTENTION = "eager"
"""Written out as matmul and softmax, attention trains a quarter faster on a CPU than the fused kernel."""

LONGER = 6
"""Steps of that model for one of its conversion."""


@dataclass(frozen=True)
class Variant:
    """What distinguishes one network from the plain DLM.

    Args:
        label: in tables.
        sinks: learned sink tokens.
        position: of them.
        zero_value: their values are forced to zero.
        gated: gated attention.
        softmax: "standard", "off_by_one" or "sink_logits".
    """

    label: str
    sinks: int = 0
    position: Placement = "front"
    zero_value: bool = False
    gated: bool = False
    softmax: str = "standard"

    def fields(self) -> dict[str, Any]:
        """Fields of the config of a network."""
        return {
            "num_sinks": self.sinks,
            "sink_placement": self.position,
            "zero_sink_value": self.zero_value,
            "gated_attention": self.gated,
            "softmax": self.softmax,
        }

    def options(self) -> dict[str, Any]:
        """Arguments of `convert` and of `ModelSettings`."""
        named = ("sinks", "position", "zero_value", "gated", "softmax")
        return {name: getattr(self, name) for name in named}


VARIANTS = {
    "plain": Variant("DLM"),
    "sink": Variant("DLM + sink token", sinks=1),
    "gated": Variant("DLM + GA", gated=True),
    "end": Variant("sink token at the end", sinks=1, position="end"),
    "sinks2": Variant("2 sink tokens", sinks=2),
    "sinks4": Variant("4 sink tokens", sinks=4),
    "zero": Variant("zero-value token", sinks=1, zero_value=True),
    "off-by-one": Variant("off-by-one softmax", softmax="off_by_one"),
}


@dataclass(frozen=True)
class Miniature:
    """What determines a trained network.

    Runs with one seed begin with the same weights, as far as they share them, and see the same batches and masks.

    Args:
        variant: of `VARIANTS`.
        seed: of weights, order of the data and masks.
        start: "scratch", or an AR model to convert, such as "toy-ar"; on a text any other name than "scratch" is
            the AR model of that text, which all seeds share.
        steps: of the optimiser.
        batch_size: sequences per step.
        corpus: sequences of the synthetic training text.
        optimizer: "muon" or "adamw".
        text: real English in place of the synthetic language, as `read_text` takes it.
        precision: "bf16" (autocast, weights stay in float32) or "fp32", which is faster on a CPU without bfloat16
            instructions.

    Raises:
        ValueError: an unknown variant or precision, or a count below 1.
    """

    variant: str
    seed: int
    start: str = SCRATCH
    steps: int = 300
    batch_size: int = 32
    corpus: int = 20_000
    optimizer: str = "muon"
    text: str = ""
    precision: str = "bf16"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS and not (self.causal and self.text):
            raise ValueError(f"{self.variant!r} is no variant; choose from {', '.join(VARIANTS)}")
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision is {self.precision!r}; choose bf16 or fp32")
        for name in ("steps", "batch_size", "corpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def of(cls, item: Mapping[str, Any], settings: Mapping[str, Any]) -> "Miniature":
        """From an item with variant and seed and the settings of an experiment."""
        text = settings.get("text", "")
        names = ["start", "steps", "batch_size", "optimizer", *(() if text else ("corpus",))]
        shared = {name: settings[name] for name in names}
        if text and shared["start"] != SCRATCH:
            shared["start"] = AR
        # Results stored before there was a choice have no `precision`.
        precision = settings.get("precision", "bf16")
        return cls(item["variant"], item["seed"], **shared, text=text, precision=precision)

    @property
    def causal(self) -> bool:
        """Whether this is the AR model."""
        return self.variant == AR

    @property
    def converted(self) -> bool:
        """Whether it begins with the weights of an AR model."""
        return self.start != SCRATCH

    @property
    def text_digest(self) -> str:
        """Digest of the text, whatever its path."""
        from dlm_lens.experiments.one_token.text_corpus import read_text

        return read_text(self.text).digest

    def ar_model(self) -> "Miniature":
        """The AR model that a converted network on a text begins with, one for all seeds and variants."""
        return replace(self, variant=AR, seed=0, start=SCRATCH, steps=LONGER * self.steps)

    @property
    def name(self) -> str:
        """Name of the directory, with a digest of the settings."""
        values = asdict(self)
        text = values.pop("text")
        if self.precision == "bf16":
            # Directories of networks that were trained before there was a choice keep their names.
            del values["precision"]
        if text:
            values["text"] = self.text_digest
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
        start = ("text-" if text else "") + Path(self.start).name
        return f"{start}-{self.variant}-{self.steps}steps-seed{self.seed}-{digest}"

    def settings(self, output: Path) -> Any:
        """The trainer's settings; on the synthetic language those of `experiments/toy` with another batch size."""
        from dlm_lens.training.settings import ModelSettings

        start = self.start if self.converted else ""
        model = {"start": start, **({} if self.causal else VARIANTS[self.variant].options())}
        if self.text:
            from dlm_lens.experiments.one_token.text_network import text_settings

            return text_settings(self, output, model)
        train = toy("train")
        whole = train.Settings(
            "toy", self.optimizer, self.seed, self.steps, self.batch_size, self.corpus, compiled=False
        ).full(output)
        return replace(
            whole,
            model=ModelSettings(**model),
            objective=replace(whole.objective, logit_shift=self.converted),
            precision=self.precision,
            save_steps=100,
            save_minutes=1.0,
        )


def trained(run: Miniature, directory: Path) -> Path:
    """The last checkpoint of a run, which is trained (or resumed) first where it is not complete."""
    from dlm_lens.training import MaskedDiffusionTrainer
    from dlm_lens.training.checkpoints import last_checkpoint, step_of

    found = last_checkpoint(directory)
    if found is not None and step_of(found) >= run.steps:
        return found
    corpus, tokenizer = data(run)
    made_from = network(run, directory.parent)
    trainer = MaskedDiffusionTrainer(made_from, run.settings(directory), corpus, tokenizer=tokenizer)
    trainer.train(resume_from_checkpoint=True)
    made = trainer.last_checkpoint
    if made is None or step_of(made) < run.steps:
        raise RuntimeError(f"{directory} ended before step {run.steps}; start the same command again")
    return made


def data(run: Miniature) -> tuple[Any, Any]:
    """What a run reads, as a source of `dlm_lens.training`, and its tokenizer."""
    if run.text:
        from dlm_lens.experiments.one_token.text_corpus import encoded

        held = encoded(run.text)
        return held.source(), held.tokenizer
    return training_text(run.corpus)[0], toy("tokenizer").build_tokenizer()


def network(run: Miniature, kept: Path = Path("runs/one-token")) -> Any:
    """The untrained network; what it shares with the plain one has the plain one's initial weights.

    Args:
        run: which one.
        kept: where networks are kept; the AR model of a text is trained there first, unless it is there.
    """
    if run.converted:
        return converted(run, kept)
    if run.text:
        from dlm_lens.experiments.one_token.text_network import build_network

        build: Callable[..., Any] = partial(build_network, data(run)[1], run.seed, causal=run.causal)
    else:
        build = partial(toy("model").build_model, "toy", run.seed)
    plain = build()
    if run.causal:
        return plain
    model = build(**VARIANTS[run.variant].fields())
    model.load_state_dict(plain.state_dict(), strict=False)
    model.set_attn_implementation(ATTENTION)
    return model


def converted(run: Miniature, kept: Path) -> Any:
    """An AR model as a DLM: the embedded one, or that of the run's text."""
    from dlm_lens.training import convert

    start = run.start
    if run.text:
        directory = kept / run.ar_model().name
        with alone(directory):
            start = str(trained(run.ar_model(), directory))
    options: dict[str, Any] = VARIANTS[run.variant].options()
    model = convert(start, seed=run.seed, **options)
    model.set_attn_implementation(ATTENTION)
    return model
