"""Checkpoints of a conversion: an AR model becomes a masked DLM, and its weights after given steps are kept.

`dlm-lens experiment beyond-conversion` trains up to a checkpoint where it is missing. To train without measuring:
`python -m dlm_lens.experiments.attention_sinks.conversion_training smollm2 --small`. Both continue one training.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_lens.experiments.results import Settings
from dlm_lens.files.locks import alone
from dlm_lens.option_values import process_of_run, read_setting

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"sinks": 0},
    "sink": {"sinks": 1},
    "gate": {"sinks": 0, "gated": True},
}
"""Arguments of `convert`: the plain DLM, one learned sink token in front, gated attention (2601.19657, Table 1)."""

AR = "ar"
"""The variant of the parent, which is not converted."""

HORIZON = 1_000_000
"""Steps of the schedule. The rate is constant after the warm-up, so that a training may end, or go on, anywhere."""

KEPT = "kept"
"""Folder of the weights that are measured, in a training's directory."""

LANGUAGE = ""
"""The setting `text` of the synthetic language of the embedded models."""

LENGTH = 64
"""Positions of a row of the synthetic language."""

DETERMINE = ("text", "length", "corpus", "rate", "warm_up", "batch_size", "precision")
"""Settings that determine the weights."""


@dataclass(frozen=True, eq=False)
class Material:
    """What a conversion is trained on, and what its checkpoints are measured on; the two share no document.

    Args:
        source: of the trainer.
        objective: the masked-diffusion loss, without the model's fields.
        prompts: text or ids.
        held: one sequence per prompt, for the loss.
        length: positions of a row.
    """

    source: Any = field(repr=False)
    objective: Any
    prompts: Sequence[Any] = field(repr=False)
    held: Sequence[Any] = field(repr=False)
    length: int


def material(tokenizer: Any, settings: Settings) -> Material:
    """The text of the settings in the tokens of a model.

    Args:
        tokenizer: the model's.
        settings: of its start.

    Raises:
        FileNotFoundError: the text is not there.
        ValueError: fewer held-out rows than prompts.
    """
    if settings["text"] == LANGUAGE:
        return _language(settings["prompts"], settings["corpus"])
    training, held = encoded(tokenizer, settings["text"], settings["length"])
    count, prompt = settings["prompts"], settings["prompt_length"]
    if len(held) < count:
        raise ValueError(
            f"the held-out part of text={settings['text']} has {len(held)} rows of {settings['length']} tokens, "
            f"and prompts={count} are requested; give a longer text or fewer prompts"
        )
    import torch

    from dlm_lens.training.sources import RowSource

    rows = held[torch.arange(count) * len(held) // count]
    return Material(
        RowSource(training, _row, settings["length"], int(tokenizer.eos_token_id)),
        _objective(),
        [row[:prompt].tolist() for row in rows],
        [_row(row) for row in rows],
        settings["length"],
    )


def _language(prompts: int, corpus: int) -> Material:
    """The synthetic language: word problems that the training text does not hold, with their answers."""
    from dataclasses import replace

    from dlm_lens.experiments.one_token.toy_language import encoded as encode
    from dlm_lens.experiments.one_token.toy_language import tests, toy, training_text

    examples = tests("A", prompts, corpus)
    source, _ = training_text(corpus)
    objective = replace(toy("train").DIFFUSION, logit_shift=None)
    held = encode(examples)
    return Material(source, objective, [one.prompt for one in examples], _in_order(held), source.length)


def _in_order(corpus: Any) -> list[Any]:
    from dlm_lens.training.sources import Example

    lengths = zip(corpus.tokens, corpus.prompt_length, strict=True)
    return [Example(tokens.long(), int(prompt)) for tokens, prompt in lengths]


def _row(tokens: Any) -> Any:
    """A row of text; its first token, which has no predecessor to predict it, is never masked, as in a prompt."""
    import torch

    from dlm_lens.training.sources import Example

    return Example(tokens, unmasked=torch.arange(len(tokens)) == 0)


def _objective() -> Any:
    """Eq. 3 and 4 of 2601.19657: exactly ceil(t S) of a row are masked, t evenly spread over the batch."""
    from dlm_lens.training import MaskedDiffusionLoss

    return MaskedDiffusionLoss(masks="count", low_discrepancy=True)


_ROWS: dict[Any, Any] = {}


def encoded(tokenizer: Any, text: str, length: int) -> tuple[Any, Any]:
    """Training and held-out rows [row, position] of a text; an end-of-text token after every document.

    Raises:
        FileNotFoundError: as `read_text`.
        ValueError: as `read_text`, or a part shorter than a row.
    """
    import torch

    from dlm_lens.experiments.one_token.text_corpus import read_text

    found = read_text(text)
    key = (found.digest, length, len(tokenizer), tokenizer.name_or_path)
    if key not in _ROWS:
        parts = []
        for documents in (found.training, found.validation):
            ids = tokenizer(list(documents), add_special_tokens=False)["input_ids"]
            flat = [token for document in ids for token in (*document, tokenizer.eos_token_id)]
            if len(flat) < length:
                raise ValueError(
                    f"a part of text={text} has {len(flat)} tokens, and a row has {length}; give a longer text"
                )
            parts.append(torch.tensor(flat[: len(flat) // length * length]).view(-1, length))
        _ROWS[key] = tuple(parts)
    rows: tuple[Any, Any] = _ROWS[key]
    return rows


def name_of(start: str, variant: str, seed: int, settings: Settings) -> str:
    """Name of a training's directory, with a digest of what determines its weights."""
    values = {"start": _identity(start), **{name: settings[name] for name in DETERMINE}}
    if settings["text"] != LANGUAGE:
        from dlm_lens.experiments.one_token.text_corpus import read_text

        values["text"] = read_text(settings["text"]).digest
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{Path(start).name}-{variant}-seed{seed}-{digest}"


def _identity(start: str) -> str:
    """What tells an AR model from others in a digest: its files where it is a directory, else its whole name."""
    folder = Path(start)
    if not folder.is_dir():
        return start
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    return _digest_of(tuple((str(file.absolute()), file.stat().st_mtime_ns) for file in files))


@cache
def _digest_of(files: tuple[tuple[str, int], ...]) -> str:
    """A digest of files that were changed at these times."""
    from dlm_lens.files.tensor_files import file_digest

    contents = [(Path(name).name, file_digest(Path(name))) for name, _ in files]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def training_settings(start: str, variant: str, seed: int, settings: Settings, output: Path) -> Any:
    """The trainer's settings: AdamW, a linear warm-up, then a constant rate."""
    from dlm_lens.training import DataSettings, Optimisation, TrainingSettings
    from dlm_lens.training.settings import ModelSettings

    language = settings["text"] == LANGUAGE
    micro = settings["micro_batch_size"] or settings["batch_size"]
    return TrainingSettings(
        output=str(output),
        model=ModelSettings(start=start, **VARIANTS[variant]),
        data=DataSettings(length=LENGTH if language else settings["length"]),
        objective=_language_objective() if language else _objective(),
        optimisation=Optimisation(
            rate=settings["rate"], min_rate=settings["rate"], warm_up=settings["warm_up"] / HORIZON,
            weight_decay=0.01,
        ),
        batch_size=settings["batch_size"],
        micro_batch_size=micro,
        steps=HORIZON,
        seed=seed,
        precision=settings["precision"],
        compile=settings["compile"],
        save_minutes=settings["save_minutes"],
        keep=1,
        log_steps=5,
        report_to=(),
    )  # fmt: skip


def kept(start: str, variant: str, seed: int, step: int, settings: Settings) -> Path:
    """The weights after `step` steps; where they are missing the training begins or goes on, up to that step.

    Args:
        start: an AR model.
        variant: of `VARIANTS`.
        seed: of new weights, the order of the rows, and masks.
        step: of the optimiser; 0 for the untrained conversion.
        settings: of the start.

    Raises:
        ValueError: an unknown variant, another process trains this conversion and has not reached the step, or
            several processes would train it.
    """
    if variant not in VARIANTS:
        raise ValueError(f"{variant!r} is no variant; choose from {', '.join(VARIANTS)}")
    directory = Path(settings["trained"]) / name_of(start, variant, seed, settings)
    found = directory / KEPT / f"step-{step}"
    if found.is_dir():
        return found
    if process_of_run()[1] > 1:
        raise ValueError(
            f"{found} is missing, and the processes of an experiment take an item each: train in one process first "
            f"(`python -m {__name__} {start}`), then start this command again"
        )
    train(start, variant, seed, [step], settings)
    return found


def train(start: str, variant: str, seed: int, steps: Sequence[int], settings: Settings) -> None:
    """Train a conversion, or go on with it, up to the last of the steps, and keep the weights after each of them.

    Raises:
        RuntimeError: the training ended before.
        ValueError: another process trains it, or it has passed a step whose weights were not kept.
    """
    from dlm_lens.training.checkpoints import last_checkpoint, step_of

    directory = Path(settings["trained"]) / name_of(start, variant, seed, settings)
    missing = [step for step in steps if not (directory / KEPT / f"step-{step}").is_dir()]
    if not missing:
        return
    model = _converted(start, variant, seed)
    if 0 in missing:
        _save_untrained(model, directory)
    missing = [step for step in missing if step]
    if not missing:
        return
    newest = last_checkpoint(directory)
    done = 0 if newest is None else step_of(newest)
    if done in missing:
        _keep_checkpoint(directory, done)
        missing.remove(done)
        if not missing:
            return
    passed = [step for step in missing if step < done]
    if passed:
        raise ValueError(
            f"{directory} is at step {done}, and the weights after {', '.join(map(str, passed))} steps were not "
            "kept; measure other steps, or give another directory as trained"
        )
    _train(model, start, variant, seed, missing, settings, directory)
    if not (directory / KEPT / f"step-{missing[-1]}").is_dir():
        raise RuntimeError(f"{directory} ended before step {missing[-1]}; start the same command again")


def _train(
    model: Any, start: str, variant: str, seed: int, steps: Sequence[int], settings: Settings, directory: Path
) -> None:
    from dataclasses import replace

    from dlm_lens.training import MaskedDiffusionTrainer

    found = material(model.tokenizer, settings)
    keeper = _keeper(directory, steps)
    chosen = training_settings(start, variant, seed, settings, directory)
    trainer = MaskedDiffusionTrainer(
        model, replace(chosen, data=replace(chosen.data, length=found.length)), found.source, callbacks=[keeper]
    )
    trainer.train(resume_from_checkpoint=True)


def _language_objective() -> Any:
    from dataclasses import replace

    from dlm_lens.experiments.one_token.toy_language import toy

    return replace(toy("train").DIFFUSION, logit_shift=None)


def _converted(start: str, variant: str, seed: int) -> Any:
    """The untrained DLM; `convert` adds the mask token to its tokenizer."""
    import torch

    from dlm_lens.training import convert

    model = convert(start, seed=seed, **VARIANTS[variant])
    if not torch.cuda.is_available():
        # Written out as matmul and softmax, attention trains faster on a CPU than the fused kernel.
        model.set_attn_implementation("eager")
    return model


def _save_untrained(model: Any, directory: Path) -> None:
    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)

    _keep(directory, 0, write)


def _keep(directory: Path, step: int, write: Any) -> None:
    """Make the folder of a step by `write(folder)`; it is whole or not there."""
    target, partial = directory / KEPT / f"step-{step}", directory / f".step-{step}"
    with alone(directory):
        if target.is_dir():
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        target.parent.mkdir(exist_ok=True)
        partial.rename(target)


def _keep_checkpoint(directory: Path, step: int) -> None:
    """Keep the weights of a checkpoint: links to its files, which are written once and then only deleted."""
    from dlm_lens.training.checkpoints import MOMENTS_FILE, RUN_FILE

    left = {MOMENTS_FILE, RUN_FILE, "trainer_state.json", "training_args.bin"}

    def link(folder: Path) -> None:
        for file in (directory / f"checkpoint-{step}").iterdir():
            if file.is_file() and file.name not in left:
                _link(file, folder / file.name)

    _keep(directory, step, link)


def _keeper(directory: Path, steps: Sequence[int]) -> Any:
    """A callback that keeps the weights after these steps, and stops after the last."""
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):
        """Requests a checkpoint after each of the steps, keeps its weights, and stops after the last."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in steps:
                control.should_save = True
            if state.global_step >= max(steps):
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in steps:
                _keep_checkpoint(directory, state.global_step)

    return Keeper()


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # a file system without hard links
        shutil.copy2(file, to)


def main(
    start: Annotated[str, typer.Argument(help="An AR model: embedded, smollm2, a directory or a hub name.")],
    variant: Annotated[str, typer.Option(help=f"One of {', '.join(VARIANTS)}.")] = "plain",
    seed: Annotated[int, typer.Option(help="Of new weights, the order of the rows, and masks.")] = 0,
    small: Annotated[bool, typer.Option("--small", help="The small settings of beyond-conversion.")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting, such as rate=2e-4.")] = None,
) -> None:
    """Train one conversion up to the last of its steps, keep the weights after each, and measure nothing."""
    from dlm_lens.experiments import find_experiment
    from dlm_lens.experiments.model_settings import settings_of

    given = dict(read_setting(text) for text in settings or ())
    chosen = find_experiment("beyond-conversion").config(small, [start], given)["settings"]
    own = settings_of(chosen, start)
    train(start, variant, seed, sorted(own["steps"]), own)


if __name__ == "__main__":
    typer.run(main)
