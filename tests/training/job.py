"""A small training run as a program of its own: `python -m tests.training.job DIRECTORY [name=value ...]`."""

import gc
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from dlm_lens.testing import tiny
from dlm_lens.training import (
    DataSettings,
    MaskedDiffusionLoss,
    MaskedDiffusionTrainer,
    NextToken,
    Optimisation,
    TrainingSettings,
)
from dlm_lens.training.trainer import end_processes

ROWS = [{"text": " ".join(f"w{(i * i + j) % 50}" for j in range(6 + i % 13))} for i in range(64)]
STEPS = 8


class Kill(TrainerCallback):
    """End the process as the kernel would, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def job(
    output: Path,
    *,
    callbacks: tuple[TrainerCallback, ...] = (),
    eval_dataset: Any = None,
    train_dataset: Any = ROWS,
    **values: Any,
):
    torch.set_num_threads(1)
    if values.pop("blocks", 0):
        model = tiny("a2d_qwen3", sampler="dllm_blocks", sampler_defaults={"block_length": 4})
    else:
        family = values.pop("family", "sink_qwen")
        model = tiny(family, **({"num_sinks": 1} if family == "sink_qwen" else {}))
    decay = 0.4 if values.pop("average", 0) else None
    settings = {
        "batch_size": 8, "micro_batch_size": 4, "precision": "fp32", "steps": STEPS, "log_steps": 1, "keep": 9,
        "data": DataSettings(length=12), "report_to": (), "optimisation": Optimisation(rate=1e-2, ema_decay=decay),
        "objective": MaskedDiffusionLoss(low_discrepancy=True, random_length_share=0.2),
    } | values  # fmt: skip
    settings = TrainingSettings(output=str(output), **settings)
    return MaskedDiffusionTrainer(model, settings, train_dataset, eval_dataset, callbacks=callbacks)


def losses(trainer: MaskedDiffusionTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def evaluations(trainer: MaskedDiffusionTrainer) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def note_evaluation(trainer: MaskedDiffusionTrainer, file: Path) -> None:
    """Write the evaluation loss of the weights as they are, and the rows that this process computed for it."""
    rows: list[int] = []
    handle = trainer.model.model.register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    loss = trainer.evaluate()["eval_loss"]
    handle.remove()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"loss": loss, "rows": sum(rows)}))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def dropping(output: Path, **values: Any) -> MaskedDiffusionTrainer:
    """Two steps of GPT-2 with dropout in embedding, residual stream and attention."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.2, embd_pdrop=0.2,
        attn_pdrop=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    settings = TrainingSettings(
        output=str(output), steps=2, save_steps=1, batch_size=4, micro_batch_size=2, precision="fp32", log_steps=1,
        data=DataSettings(length=12, column="input_ids"), optimisation=Optimisation(rate=1e-2), report_to=(),
        objective=NextToken(),
    )  # fmt: skip
    rows = [{"input_ids": [(7 * i + j) % 60 for j in range(12)]} for i in range(16)]
    return MaskedDiffusionTrainer(GPT2LMHeadModel(config), replace(settings, **values), rows)


def main(target: Path, options: list[str]) -> None:
    gc.freeze()  # Trainer and `end_processes` collect garbage: not among the imported modules
    run(target, options)
    end_processes()


def run(target: Path, options: list[str]) -> None:
    given = {name: int(value) for name, value in (pair.split("=") for pair in options)}
    kill = given.pop("kill", None)
    data = ROWS if "eval_steps" in given else None
    trainer = job(target, callbacks=() if kill is None else (Kill(kill),), eval_dataset=data, **given)
    if data is not None and not trainer.is_fsdp_enabled:
        note_evaluation(trainer, target / f"evaluation-{trainer.args.process_index}.json")
    output = trainer.train(resume_from_checkpoint=True)
    if trainer.is_world_process_zero():
        (target / "training_loss.json").write_text(json.dumps(output.training_loss))
        (target / "losses.json").write_text(json.dumps(losses(trainer)))
        (target / "evaluations.json").write_text(json.dumps(evaluations(trainer)))
        (target / "sharded.json").write_text(json.dumps(trainer.is_fsdp_enabled))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
