"""The loss of models of random tokens against the definition of their bound, in float64, with the noise it drew."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.attention import decoder_of
from dlm_lens.testing import tiny
from dlm_lens.training import (
    DataSettings,
    Example,
    LikelihoodBoundLoss,
    MaskedDiffusionTrainer,
    Optimisation,
    Rows,
    TrainingSettings,
    masked_loss,
    probe_batch,
    read_settings,
    sink_statistics,
)
from dlm_lens.training.bound_objective import ModelBoundLoss
from dlm_lens.training.sink_probe import LEVELS
from tests.dit64 import dit64
from tests.gidd64 import network64
from tests.reference import forward64

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "duo": ("duo", {}),
    "udlm": ("udlm", {}),
    "sumi": ("sumi", {}),
    "gidd uniform": ("gidd", {}),
    "gidd masks": ("gidd", {"noise_type": -1000.0, "mask_token_id": 63}),
    "gidd both": ("gidd", {"noise_type": 0.5, "mask_token_id": 63, "min_log_snr": -4.0, "max_log_snr": 5.0}),
    "gidd_dit": ("gidd_dit", {}),
    "gidd_dit masks": ("gidd_dit", {"p_uniform": 0.0}),
}


def model_of(name: str) -> Any:
    family, config = MODELS[name]
    return tiny(family, **config)


def mask_of(config: Any) -> int | None:
    """The id without probability."""
    if config.model_type not in ("gidd", "dit"):
        return None
    return int(config.excluded_token_id if config.mask_token_id is None else config.mask_token_id)


def noise64(config: Any, t: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The share alpha of the text's token at t, and what the noise writes."""
    mask = mask_of(config)
    if mask is None:
        alpha = 1 - 0.999 * t
        return alpha, ((1 - alpha) / size).expand(size)
    if config.model_type == "gidd":
        alpha = 1 - t
        random = t / (1 + torch.exp(-(torch.log(alpha / t) + config.noise_type)))
    else:
        strength = 2 * config.p_uniform / (1 - config.p_uniform) * torch.sqrt(t * (1 - t))
        alpha, random = (1 - t) / (1 + strength), strength / (1 + strength)
    others = torch.ones(size, dtype=torch.float64).index_fill(0, torch.tensor(mask), 0.0)
    return alpha, random / (size - 1) * others + (1 - alpha - random) * (1 - others)


def bound64(config: Any, logits: Tensor, seen: int, token: int, time: float) -> Tensor:
    """(b'(z) - alpha' / alpha b(z)) / q(z) (KL(q || p) + r - ln r - 1), r = q(z) / p(z), derivatives numerical.

    Summed over the outcomes that the noise or the text can write.
    """
    t, h, size = torch.tensor(time, dtype=torch.float64), 1e-6 * min(time, 1 - time), logits.shape[-1]
    (alpha, b), (alpha0, b0), (alpha1, b1) = (noise64(config, one, size) for one in (t, t - h, t + h))
    mask = mask_of(config)
    if mask is not None:
        logits = logits.index_fill(-1, torch.tensor(mask), -torch.inf)
    text = torch.nn.functional.one_hot(torch.tensor(token), size)
    q, p = alpha * text + b, alpha * logits.softmax(-1) + b
    weight = ((b1 - b0)[seen] / (2 * h) - (alpha1 - alpha0) / (2 * h) / alpha * b[seen]) / q[seen]
    if float(b[seen]) == 0:  # a token of the text that no noise writes
        return 0.0 * logits[0]
    possible = q > 0
    divergence = (q[possible] * (q[possible] / p[possible]).log()).sum()
    ratio = q[seen] / p[seen]
    return weight * (divergence + ratio - ratio.log() - 1)


def logits64(model: Any, ids: Tensor, time: float, clean: int) -> Tensor:
    """Logits of one canvas, from the weights."""
    if model.config.model_type == "gidd":
        return network64(model, ids, clean)["logits"]
    if model.config.model_type == "sumi":
        return forward64(model, ids[None])["logits"][0]
    sigma = time if mask_of(model.config) is not None else -math.log(1 - 0.999 * time)
    return dit64(model, ids[None], sigma=sigma)["logits"][0]


def drawn(model: Any, prompt_length: int = 0, batch: int = 3, **settings: Any) -> tuple[Rows, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 60, (batch, 9), generator=generator)
    rows = Rows.of([Example(row, prompt_length) for row in tokens], 9, 0)
    return rows, LikelihoodBoundLoss(**settings).for_model(model, batch).prepare(rows, range(batch), 7)


def times_of(model: Any, asked: dict[str, Tensor]) -> list[float]:
    """The time of every output."""
    levels = asked["levels"].double().sum(-1)
    return (levels if mask_of(model.config) is not None else (1 - levels) / 0.999).tolist()


@pytest.mark.parametrize("prompt_length", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_bound_of_every_token(name: str, prompt_length: int) -> None:
    model = model_of(name)
    rows, asked = drawn(model, prompt_length)
    count, canvas = asked.pop("count"), asked["input_ids"]
    assert int(count) == 3 * (9 - prompt_length)
    assert canvas[:, :prompt_length].equal(rows.tokens[:, :prompt_length])
    total = 0.0
    for output, time in zip(asked["outputs"].tolist(), times_of(model, asked), strict=True):
        row, place = divmod(output, 9)
        logits = logits64(model, canvas[row], time, prompt_length)[place]
        total += float(bound64(model.config, logits, int(canvas[row, place]), int(rows.tokens[row, place]), time))
    assert total > 0
    with torch.no_grad():
        # Logits in float32; weights of up to 1 / t.
        assert float(masked_loss(model, **asked)) == pytest.approx(total, rel=2e-4)
        # A few rows at a time: 64 tokens, an eighth of the logits.
        few = masked_loss(model, **asked, elements=8 * 64 * 2)
        assert float(few) == pytest.approx(total, rel=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_the_definition(name: str) -> None:
    """Of every parameter, through the same network in float64."""
    model, wide = model_of(name), model_of(name).double()
    asked = drawn(model)[1]
    asked.pop("count")
    masked_loss(model, **asked).backward()
    inputs = {"sigma": asked["sigma"].double()} if "sigma" in asked else {}
    logits = wide(input_ids=asked["input_ids"], **inputs).logits.flatten(0, 1)
    losses = [
        bound64(model.config, logits[output], int(asked["input_ids"].flatten()[output]), int(token), time)
        for output, token, time in zip(asked["outputs"], asked["targets"], times_of(model, asked), strict=True)
    ]
    torch.stack(losses).sum().backward()
    moved = 0
    for (key, found), other in zip(model.named_parameters(), wide.parameters(), strict=True):
        if other.grad is None or not bool(other.grad.any()):
            assert found.grad is None or not bool(found.grad.any()), key
            continue
        moved += 1
        assert found.grad is not None, key
        # A float32 network of two layers against one in float64.
        assert float((found.grad.double() - other.grad).norm() / other.grad.norm()) < 1e-3, key
    assert moved > 10


@pytest.mark.parametrize("name", ["duo", "gidd both"])
def test_the_noise_of_a_row_depends_on_its_number_alone(name: str) -> None:
    model = model_of(name)
    rows, asked = drawn(model, batch=4)
    objective = LikelihoodBoundLoss().for_model(model, 4)
    alone = objective.prepare(Rows.of([Example(rows.tokens[2])], 9, 0), [2], 7)
    assert alone["input_ids"][0].equal(asked["input_ids"][2])
    assert not objective.prepare(rows, range(4), 8)["input_ids"].equal(asked["input_ids"])
    # One time in each quarter of the group; without low discrepancy times are independent.
    times = torch.tensor(times_of(model, objective.prepare(rows, range(8, 12), 7))).view(4, 9)[:, 0]
    assert sorted(int(time * 4) for time in times.tolist()) == [0, 1, 2, 3]
    later = LikelihoodBoundLoss(low_discrepancy=False).for_model(model, 4)
    free = [times_of(model, later.prepare(rows, range(4 * n, 4 * n + 4), 7))[::9] for n in range(8)]
    assert any(sorted(int(time * 4) for time in four) != [0, 1, 2, 3] for four in free)


@pytest.mark.parametrize("normalisation", ["token", "sequence", "batch"])
def test_normalisations(normalisation: str) -> None:
    model = model_of("gidd_dit")
    examples = [Example(torch.arange(4, 13)), Example(torch.arange(20, 25), 2)]
    rows = Rows.of(examples, 9, 0)
    asked = LikelihoodBoundLoss(normalisation=normalisation).for_model(model, 2).prepare(rows, range(2), 0)  # type: ignore[arg-type]
    count = float(asked.pop("count"))
    parts = []
    for row in range(2):
        own = asked["outputs"] // 9 == row
        picked = {key: asked[key][own] for key in ("outputs", "targets", "levels")}
        others = {key: value for key, value in asked.items() if key not in (*picked, "weights")}
        parts.append(float(masked_loss(model, **others, **picked, weights=torch.ones(int(own.sum()))).detach()))
    expected = {"token": sum(parts) / 12, "sequence": (parts[0] / 9 + parts[1] / 3) / 2, "batch": sum(parts) / 2}
    assert float(masked_loss(model, **asked).detach()) / count == pytest.approx(expected[normalisation], rel=1e-5)


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["udlm", "gidd uniform", "gidd both", "gidd_dit"])
def test_training_lowers_the_bound(name: str, tmp_path: Path) -> None:
    """Texts of two kinds, learned by a tiny model; the learned key and value of GIDD take part."""
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    texts = [{"input_ids": [start, start + 1] * 4} for start in (10, 30)] * 8
    settings = TrainingSettings(
        output=str(tmp_path), objective=LikelihoodBoundLoss(), steps=60, batch_size=16, micro_batch_size=8,
        data=DataSettings(length=8, column="input_ids"), optimisation=Optimisation(rate=1e-2, warm_up=0.05),
        eval_rows=4, eval_samples=8, precision="fp32", save_steps=60, workers=0, report_to=(),
    )  # fmt: skip
    trainer = MaskedDiffusionTrainer(model, settings, train_dataset=texts, eval_dataset=texts[:4])
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    end = trainer.evaluate()["eval_loss"]
    # Nats per token: guesses among 64 tokens are ln(64) = 4.2, the entropy of the text is ln(2) / 8 = 0.09.
    assert start > 3
    assert 0.08 < end < 1.5
    still = [key for key, value in model.state_dict().items() if bool((value == before[key]).all())]
    assert not [key for key in still if "bias" in key and "gidd" in name]


@pytest.mark.parametrize("name", ["udlm", "sumi", "gidd uniform"])
def test_a_watched_head_has_the_same_loss_and_gradients(name: str) -> None:
    """A head that runs as a module, again in the backward pass, against gradients computed with the loss."""
    model = model_of(name)
    objective = LikelihoodBoundLoss().for_model(model, 2)
    rows = Rows.of([Example(torch.arange(20, 30), 4), Example(torch.arange(30, 40), 4)], 10, 0)
    arguments = objective.prepare(rows, [0, 1], 0)
    arguments.pop("count")
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = masked_loss(model, **arguments, elements=24 * 64)  # three rows at a time
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        model.get_output_embeddings().register_forward_hook(lambda module, args, output: None)
    # Sums over the vocabulary, and of the rows' gradients, in float32 in another order.
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5 * float(found[0][0]))


@pytest.mark.parametrize("name", ["duo", "gidd uniform", "gidd_dit"])
def test_the_probe_of_the_sinks_shows_the_noise_of_the_model(name: str) -> None:
    class Place:
        length, padding = 16, 0

    model = model_of(name)
    objective = LikelihoodBoundLoss().for_model(model, 2)
    texts = [Example(torch.full((16,), 7)) for _ in range(2)]
    batch = probe_batch(texts, objective, Place)
    shown = batch.canvases[batch.masked]
    assert bool((shown == 63).all()) if name == "gidd_dit" else len(set(shown.tolist())) > 10
    if name == "gidd uniform":
        assert not bool((shown == 3).any())
    found = sink_statistics(model, batch)
    assert found.learned == (name == "gidd uniform")
    assert 0 < float(found.main_share.min()) <= float(found.main_share.max()) <= 1


@pytest.mark.parametrize("name", ["duo", "udlm", "gidd_dit", "gidd uniform"])
def test_the_probe_gives_the_network_what_training_gives_it(name: str) -> None:
    """The noise level of a model that takes it, and a prompt that sees no noise: states of a pass with both."""

    class Place:
        length, padding = 10, 0

    model = model_of(name)
    objective = LikelihoodBoundLoss().for_model(model, 2)
    batch = probe_batch([Example(torch.arange(20, 30), 4), Example(torch.arange(30, 40), 4)], objective, Place)
    seen: list[dict[str, torch.Tensor]] = []
    decoder = decoder_of(model)
    unchanged = decoder.forward
    decoder.forward = lambda *args, **given: (seen.append(given), unchanged(*args, **given))[1]
    found = sink_statistics(model, batch)
    assert not torch.equal(
        found.main_share, sink_statistics(model, replace(batch, noise_levels=None, clean=None)).main_share
    )
    seen = seen[:6]
    assert len(seen) == 3 * 2
    for one, share in zip(seen[::2], LEVELS, strict=True):
        if name == "gidd uniform":
            mask = one["attention_mask"][0, 0] >= 0
            assert not bool(mask[:4, 4:].any())
            assert bool(mask[:4, :4].all())
            assert bool(mask[4:].all())
            assert "sigma" not in one
        else:
            assert one.get("attention_mask") is None
            # Duo's and UDLM's log-linear schedule: alpha = 1 - (1 - 0.001) t; GIDD's network is given t.
            time = {"duo": (1 - 1e-3) * share + 1e-3, "udlm": (1 - 1e-3) * share + 1e-3}.get(name)
            expected = (1 - 2e-4) * share + 1e-4 if time is None else -math.log(1 - 0.999 * time)
            assert one["sigma"].tolist() == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("family", ["llada", "causal", "mdlm", "uniform_qwen"])
def test_other_models_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match="has no bound on the likelihood with random tokens; train it with"):
        LikelihoodBoundLoss().for_model(tiny(family), 4)


def test_a_text_with_the_id_that_has_no_probability_is_refused() -> None:
    for name, mask in (("gidd uniform", 3), ("gidd_dit", 63)):
        objective = LikelihoodBoundLoss().for_model(model_of(name), 1)
        with pytest.raises(ValueError, match=f"holds the mask token {mask}"):
            objective.prepare(Rows.of([Example(torch.tensor([5, mask, 6]))], 3, 0), [0], 0)


def test_documents_with_prompts_that_do_not_see_the_noise_are_refused() -> None:
    example = Example(torch.arange(4, 12), 2, documents=torch.tensor([0] * 4 + [1] * 4))
    objective = LikelihoodBoundLoss().for_model(model_of("gidd uniform"), 1)
    with pytest.raises(ValueError, match=r"set data\.packing to joined"):
        objective.prepare(Rows.of([example], 8, 0), [0], 0)


def test_settings_name_the_objective(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\nobjective: {kind: likelihood_bound, normalisation: sequence}\n")
    settings = read_settings(path)
    assert settings.objective == LikelihoodBoundLoss("sequence")
    assert not isinstance(settings.objective, ModelBoundLoss)
    with pytest.raises(ValueError, match=r"there is no setting objective\.config"):
        read_settings(path, ["objective.config=1"])
