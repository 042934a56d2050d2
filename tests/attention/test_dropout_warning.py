"""A model in training mode with dropout: every call that runs it warns once, training does not."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import dlm_lens as dl
from dlm_lens.attention import attach_hooks, attention_blocks
from dlm_lens.hooks import ablate
from dlm_lens.testing import tiny
from tests.training.job import job

IDS = [5, 9, 14]
RUN = {"steps": 2, "gen_length": 8, "block_length": 8}

CALLS: dict[str, Callable[[Any, Any], object]] = {
    "denoise": lambda model, run: dl.denoise(model, IDS, **RUN),
    "under hooks": lambda model, run: dl.denoise(model, IDS, hooks=[ablate("z")], **RUN),
    "record": lambda model, run: dl.record(model, IDS, [dl.ReceivedAttention()], **RUN),
    "compare": lambda model, run: dl.compare(model, IDS, [ablate("z")], **RUN),
    "replay": lambda model, run: dl.replay(model, run, [ablate("z")]),
    "received": lambda model, run: dl.received_over_steps(model, run),
    "likelihood": lambda model, run: dl.log_likelihood(model, IDS, [3, 4], samples=2),
    "lens": lambda model, run: dl.logit_lens(model, run),
    "nnsight": lambda model, run: dl.DiffusionLM(model, check=False).generate(IDS, **RUN),
    "trace of a run": lambda model, run: traced_run(dl.DiffusionLM(model, check=False)),
    "trace": lambda model, run: traced(dl.DiffusionLM(model, check=False)),
    "bridge run": lambda model, run: dl.bridge(model).denoise(IDS, **RUN),
    "bridge": lambda model, run: dl.bridge(model).run_with_cache(torch.tensor([IDS])),
}


def traced_run(lm: Any) -> Any:
    with lm.generate(IDS, **RUN) as tracer:
        run = tracer.result.save()
    return run


def traced(lm: Any) -> Any:
    with lm.trace(IDS):
        logits = lm.output.logits.save()
    return logits


def warned_of_dropout(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [one for one in seen if "training mode" in str(one.message)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_warns_once_of_dropout_in_training_mode(name: str) -> None:
    model = tiny("llada", attention_dropout=0.25)
    run = dl.denoise(model, IDS, **RUN)
    assert not warned_of_dropout(lambda: CALLS[name](model, run))
    model.train()
    seen = warned_of_dropout(lambda: CALLS[name](model, run))
    assert [str(one.message) for one in seen] == [
        "the model is in training mode with dropout (model.layers.0.self_attn.attention_dropout is 0.25), so that "
        "every pass is random: call model.eval() first"
    ]
    assert seen[0].filename == __file__
    assert warned_of_dropout(lambda: CALLS[name](model, run))  # in the next call too


@pytest.mark.parametrize(
    ("family", "config", "where"),
    [
        ("diffugpt", {"embd_pdrop": 0.5, "resid_pdrop": 0.0, "attn_pdrop": 0.0}, r"drop\.p is 0\.5"),
        ("diffugpt", {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, r"attn_dropout\.p is 0\.5"),
        ("mdlm", {"dropout": 0.1}, r"dropout is 0\.1"),
        ("causal", {"attention_dropout": 0.1}, r"attention_dropout is 0\.1"),
    ],
)
def test_dropout_is_found_in_modules_and_in_their_fields(family: str, config: dict[str, Any], where: str) -> None:
    model = tiny(family, **config).train()
    settings = {"gen_length": 2} if family == "causal" else {"gen_length": 4, "steps": 2}
    with pytest.warns(UserWarning, match=where):
        dl.denoise(model, IDS, **settings)
    block = attention_blocks(model)[-1]
    model.eval()
    assert not warned_of_dropout(lambda: dl.denoise(model, IDS, **settings))
    block.train()  # a part of the model alone
    found = warned_of_dropout(lambda: dl.denoise(model, IDS, **settings))
    assert len(found) == (config.get("embd_pdrop") != 0.5)


def test_training_mode_without_dropout_and_a_block_of_ones_own_do_not_warn() -> None:
    still = tiny("llada").train()
    assert not warned_of_dropout(lambda: dl.denoise(still, IDS, **RUN))
    model = tiny("llada", attention_dropout=0.25).train()

    def own_loop() -> None:
        with attach_hooks(model, ablate("z")):
            model(torch.tensor([IDS])).logits.sum().backward()

    assert not warned_of_dropout(own_loop)


class Denoising(TrainerCallback):
    """Denoises the model that is trained."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        dl.denoise(model.train(), IDS, steps=2, gen_length=8)


@pytest.mark.parametrize("callback", [False, True])
def test_training_does_not_warn_and_a_run_in_a_callback_does(callback: bool, tmp_path: Path) -> None:
    trainer = job(tmp_path, family="mdlm", steps=1, probe_steps=1, callbacks=(Denoising(),) if callback else ())
    assert trainer.model.train().config.dropout > 0
    assert len(warned_of_dropout(trainer.train)) == callback
