"""Pruning by magnitude and Wanda's score, with and without sinks, against loops."""

import copy
import math
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import attention_blocks
from dlm_lens.probes import input_norms, pruned, sink_weights, untrained_twin
from dlm_lens.probes.weight_pruning import kept_weights, linear_layers
from dlm_lens.recording import ReceivedAttention, rerun
from dlm_lens.sampling import part_of_run
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 17], [6, 2, 40]]


def test_norms_are_those_of_the_inputs_with_sinks_discounted() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    received = rerun(model, run, [ReceivedAttention(min_viewers=1)]).received
    weights = sink_weights(received, run.attention_mask)
    for step in range(3):
        for row in range(2):
            there = run.attention_mask[row].nonzero().flatten().tolist()
            mass = {j: float(received[step, row, :, :, j].double().mean()) for j in there}
            mean = sum(mass.values()) / len(mass)
            spread = math.sqrt(sum((one - mean) ** 2 for one in mass.values()) / len(mass))
            for j in range(run.tokens.shape[1]):
                wanted = 1 / (1 + math.exp(-5 * (mass[j] - mean - 2 * spread))) if j in mass else 0.0
                assert float(weights[step, row, j]) == pytest.approx(wanted, abs=1e-6)
    name, layer = next((n, m) for n, m in linear_layers(model).items() if n.endswith("layers.1.mlp.down_proj"))
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].double()))
    with torch.no_grad():
        for step in range(3):
            model(input_ids=run.canvases[step], attention_mask=run.attention_mask.long())
    handle.remove()
    for discount in ("none", "sinks", "random"):
        found = input_norms(model, run, discount=discount, seed=4)
        if discount == "random":  # another order of the same weights: the same mean, other norms
            assert found.discounted == pytest.approx(input_norms(model, run, discount="sinks").discounted)
            assert not torch.equal(found.values[name], input_norms(model, run, discount="sinks").values[name])
            continue
        kept = run.attention_mask * (1 - weights if discount == "sinks" else torch.ones_like(weights))
        wanted = sum((x * kept[step][..., None]).flatten(0, 1).norm(dim=0) for step, x in enumerate(seen))
        torch.testing.assert_close(found.values[name].double(), wanted, rtol=1e-4, atol=1e-5)
        discounted = sum(weights[step, row].sum() for step in range(3) for row in range(2)) / 6
        assert found.discounted == pytest.approx(float(discounted) if discount == "sinks" else 0.0, rel=1e-5)


@pytest.mark.parametrize("discount", ["none", "sinks", "random"])
def test_a_row_that_is_over_before_others_counts_as_alone(discount: Any) -> None:
    model, given = tiny("llada"), {"gen_length": 12, "steps": 12, "threshold": 0.15}
    prompts = [[5, 9, 11, 3, 17], [6, 2, 40, 8, 8]]
    both, alone = dl.denoise(model, prompts, **given), dl.denoise(model, prompts[:1], **given)
    assert both.row_steps.tolist() == [5, 12]
    assert alone.steps == 5
    found, wanted = (input_norms(model, run, discount=discount) for run in (part_of_run(both, None, [0]), alone))
    assert found.discounted == pytest.approx(wanted.discounted, rel=1e-4)
    for name, values in wanted.values.items():
        # Equal canvases, of which a pass has one.
        torch.testing.assert_close(found.values[name], values, rtol=1e-4, atol=1e-5)


def test_a_planted_sink_is_discounted_and_other_positions_are_not() -> None:
    received = torch.ones(1, 1, 2, 4, 20)
    received[..., 6] = 15.0
    weights = sink_weights(received, torch.ones(1, 20, dtype=torch.bool))[0, 0]
    assert float(weights[6]) > 0.99
    assert float(weights.sum() - weights[6]) < 0.01


@pytest.mark.parametrize("with_norms", [False, True])
def test_the_lowest_scores_of_every_output_are_pruned_and_come_back(with_norms: bool) -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    norms = input_norms(model, run) if with_norms else None
    before = copy.deepcopy(model.state_dict())
    objects = {name: id(layer.weight) for name, layer in linear_layers(model).items()}
    with pruned(model, 0.3, norms) as shares:
        for name, layer in linear_layers(model).items():
            weight = before[f"{name}.weight"]
            count = int(0.3 * weight.shape[1])
            assert shares[name] == pytest.approx(count / weight.shape[1])
            for out in (0, 3):
                scale = norms.values[name] if norms else torch.ones(weight.shape[1])
                score = [abs(float(w)) * float(n) for w, n in zip(weight[out], scale, strict=True)]
                gone = set(sorted(range(len(score)), key=score.__getitem__)[:count])
                wanted = [0.0 if i in gone else float(w) for i, w in enumerate(weight[out])]
                assert layer.weight[out].tolist() == wanted
        others = {key for key in before if key.removesuffix(".weight") not in linear_layers(model)}
        assert all(torch.equal(model.state_dict()[key], before[key]) for key in others)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert objects == {name: id(layer.weight) for name, layer in linear_layers(model).items()}
    assert bool(kept_weights(torch.randn(4, 8), 0.0).all())


def test_the_order_of_parameters_stays_and_with_it_the_untrained_twin() -> None:
    model = tiny("dream")  # linear layers with biases
    names, twin = [name for name, _ in model.named_parameters()], untrained_twin(model).state_dict()
    with pruned(model, 0.5):
        assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(value, twin[name]) for name, value in untrained_twin(model).state_dict().items())


@pytest.mark.parametrize("percent", range(100))
def test_whole_shares_are_pruned_whole(percent: int) -> None:
    weight = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    assert (~kept_weights(weight, percent / 100)).sum(1).tolist() == [percent] * 2


def test_what_cannot_be_measured_or_pruned_is_refused() -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match="sparsity is 1; it must be a share of the weights"), pruned(model, 1):
        pass
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    norms = input_norms(model, run)
    wider = tiny("llada", intermediate_size=64)
    with pytest.raises(ValueError, match="the norms are those of other layers"), pruned(wider, 0.5, norms):
        pass
    causal = tiny("causal")
    with pytest.raises(ValueError, match="every pass must have the whole canvas as queries, and this is an AR run"):
        input_norms(causal, dl.denoise(causal, PROMPTS, gen_length=2))


@pytest.mark.parametrize("family", ["llada_moe", "rnd1", "llada2", "diffusion_gemma"])
def test_fused_experts_are_refused(family: str) -> None:
    model = tiny(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    why = r"has (mlp\.)?experts\.gate_up_proj in .*layers\.\d, weights of no plain linear layer, which"
    with pytest.raises(ValueError, match=why), pruned(model, 0.5):
        pass
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if family in ("llada_moe", "rnd1"):
        run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
        with pytest.raises(ValueError, match=why):
            input_norms(model, run, discount="sinks")


def test_the_matrices_of_linear_layers_are_all_that_blocks_have() -> None:
    for family in ("llada", "dream", "smdm", "mdlm", "modernbert", "sink_qwen", "sdar", "uniform_qwen"):
        model = tiny(family)
        blocks = attention_blocks(model)
        matrices = [p for block in blocks for p in block.parameters() if p.ndim > 1]
        assert sum(layer.weight.numel() for layer in linear_layers(model).values()) == sum(
            p.numel() for p in matrices
        )
