import copy
import re

import pytest
import torch
from torch import nn
from transformers import Conv1D, GptOssConfig, GptOssForCausalLM, get_wsd_schedule

from dlm_lens.adapters.registry import families
from dlm_lens.testing import tiny
from dlm_lens.training.optimizers import (
    build_optimizer,
    layer_weights,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)
from dlm_lens.training.settings import Optimisation


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int) -> dict[str, torch.Tensor]:
    """The weights after some steps with made-up gradients, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: value.detach().double() for name, value in model.named_parameters()}


def adamw64(model: nn.Module, settings: Optimisation, rounds: int) -> dict[str, torch.Tensor]:
    """Algorithm 2 of "Decoupled weight decay regularization" (1711.05101) in float64, weight by weight."""
    generator = torch.Generator().manual_seed(0)
    values = {name: value.detach().double() for name, value in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    (b1, b2), rate = settings.betas, settings.rate
    for step in range(1, rounds + 1):
        for name, value in model.named_parameters():
            grad = torch.randn(value.shape, generator=generator).double()
            first[name] = b1 * first[name] + (1 - b1) * grad
            second[name] = b2 * second[name] + (1 - b2) * grad**2
            ratio = (first[name] / (1 - b1**step)) / ((second[name] / (1 - b2**step)).sqrt() + 1e-8)
            values[name] = values[name] * (1 - rate * settings.weight_decay) - rate * ratio
    return values


def test_adamw_is_one_fused_kernel_and_equals_float64() -> None:
    model, settings = tiny("sink_qwen", num_sinks=1), Optimisation(rate=1e-2)
    wanted = adamw64(model, settings, 4)
    optimizer = build_optimizer(model, settings)
    assert all(group["fused"] for group in optimizer.param_groups)
    found = stepped(model, optimizer, 4)
    for name, value in found.items():
        # float32: 4 updates of 1e-2 on weights below 1.
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_moments_of_the_earlier_implementation_are_continued() -> None:
    """A checkpoint that was written before the kernel was fused goes on from the same moments."""
    model, settings = tiny("sink_qwen"), Optimisation(rate=1e-2)
    optimizer = build_optimizer(model, settings)
    unfused = copy.deepcopy(model)
    earlier = build_optimizer(unfused, settings)
    for group in earlier.param_groups:
        group["fused"] = None
    stepped(unfused, earlier, 3)
    model.load_state_dict(unfused.state_dict())
    restore_optimizer(optimizer, optimizer_tensors(earlier.state_dict()).items())
    assert all(group["fused"] for group in optimizer.param_groups)
    wanted, found = stepped(unfused, earlier, 1), stepped(model, optimizer, 1)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_moments_in_the_order_of_an_earlier_version_are_refused() -> None:
    """Its experts were among the weights outside of the layers; torch's kernel reads beyond a moment's end."""
    model = tiny("llada_moe")
    layers = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    earlier = torch.optim.AdamW([{"params": layers}, {"params": others}])
    stepped(model, earlier, 1)
    moments = optimizer_tensors(earlier.state_dict())
    optimizer = build_optimizer(model, Optimisation())
    with pytest.raises(
        ValueError, match=r"of shape \[\d+, 32\] for weight \d+ .*, whose shape is \[\d+, \d+, \d+\]: they"
    ):
        restore_optimizer(optimizer, moments.items())
    assert not optimizer.state
    first = build_optimizer(model.get_input_embeddings(), Optimisation())
    with pytest.raises(ValueError, match="for weight 1 of the optimiser, which has fewer weights"):
        restore_optimizer(first, {"0/exp_avg": torch.zeros(64, 32), "1/exp_avg": torch.zeros(3)}.items())


@pytest.mark.parametrize("family", ["sink_qwen", "llada_moe", "diffugpt", "mdlm"])
def test_layers_weights_of_two_and_more_axes_decay(family: str) -> None:
    model = tiny(family)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_layer = {name: re.search(r"\.(layers|h)\.\d+\.", name) is not None for name in names.values()}
    wanted = {name for name, p in model.named_parameters() if in_layer[name] and p.ndim >= 2}
    for kind in ("adamw", "muon"):
        settings = Optimisation(weight_decay=0.1, other_weight_decay=0.0, optimizer=kind)
        groups = build_optimizer(model, settings).param_groups
        held = [names[id(p)] for group in groups for p in group["params"]]
        assert sorted(held) == sorted(names.values())
        assert {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]} == wanted
    # Muon's groups have a momentum, AdamW's betas.
    muon = {names[id(p)] for group in groups if "momentum" in group for p in group["params"]}
    assert muon == {name for name, p in model.named_parameters() if in_layer[name] and p.ndim == 2}


FAMILIES = [family.name for family in families() if not family.causal and family.name != "diffusion_gemma"]
"""Those that are trained."""


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_only_what_multiplies_activations_is_a_matrix(family: str) -> None:
    """GIDD's learned key and value, [head, d_head], were orthogonalised and decayed as matrices."""
    model = experts_with_biases() if family == "gpt_oss" else tiny(family)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(p)] for p in layer_weights(model)}
    added = {name for name, p in model.named_parameters() if p.ndim >= 2 and name not in found}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    routers = {name for name in found if name.endswith(("gate.weight", "router.weight"))}
    assert all(re.search(r"experts\.(gate_up|down)_proj$", name) for name in found - linear - routers)
    learned = {"gidd": ("k_bias", "v_bias"), "gpt_oss": ("proj_bias",)}.get(family, ())
    others = {name for name in added - linear - tables if not name.endswith(".sinks")}
    assert bool(others) == bool(learned)
    assert all(name.endswith(learned) for name in others)
    settings = Optimisation(weight_decay=0.1, other_weight_decay=0.0, optimizer="muon")
    for group in build_optimizer(model, settings).param_groups:
        if {names[id(p)] for p in group["params"]} & others:
            assert group["weight_decay"] == 0.0
            assert "momentum" not in group


def experts_with_biases() -> nn.Module:
    """A gpt-oss, whose experts have biases [expert, d] and whose heads have sinks."""
    config = GptOssConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, vocab_size=64, pad_token_id=0,
    )  # fmt: skip
    return GptOssForCausalLM(config)


def test_muon_says_which_weights_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    build_optimizer(tiny("llada_moe"), Optimisation(optimizer="muon"))
    assert "4 weights of the layers with more axes (experts) are left to AdamW" in caplog.text
    frozen = tiny("sink_qwen")
    frozen.model.layers.requires_grad_(False)
    with pytest.raises(ValueError, match="the layers of SinkQwenForMaskedLM have no matrices"):
        build_optimizer(frozen, Optimisation(optimizer="muon"))


def stable(**values: object) -> Optimisation:
    return Optimisation(schedule="warmup_stable_decay", **{"rate": 2.0, "min_rate": 0.2} | values)


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "1-sqrt"])
def test_a_stable_rate_decays_as_in_transformers(decay_type: str) -> None:
    """`get_wsd_schedule` one step later; its warm-up begins at min_rate, and so is compared without it."""
    settings = stable(warm_up=0.1, decay_share=0.3, decay_type=decay_type)
    rates = [learning_rate(step, 50, settings) for step in range(51)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = get_wsd_schedule(optimizer, 5, 15, num_training_steps=50, decay_type=decay_type, min_lr_ratio=0.1)
    expected = []
    for _ in range(52):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[4:] == pytest.approx(expected[5:52], abs=1e-12)


def test_a_stable_rate_has_three_phases() -> None:
    settings = stable(warm_up=0.2, decay_share=0.4)
    expected = [1.0, *[2.0] * 5, 1.55, 1.1, 0.65, 0.2]
    assert [learning_rate(step, 10, settings) for step in range(10)] == pytest.approx(expected)
    usual = [learning_rate(step, 100, stable()) for step in range(100)]
    assert usual[89] == 2.0 > usual[90]
    assert usual[99] == pytest.approx(0.2)
    assert [learning_rate(step, 10, stable(decay_share=0)) for step in range(11)] == [2.0] * 11
    # Two of three steps each: the warm-up has both of its steps, the decay the one that is left.
    few = stable(warm_up=0.5, decay_share=0.5)
    assert [learning_rate(step, 3, few) for step in range(3)] == pytest.approx([1.0, 2.0, 0.2])
    assert [learning_rate(step, 1, few) for step in range(1)] == [2.0]


def test_a_second_stable_rate_is_that_of_llada() -> None:
    """2502.09992, section 2.2: 1.2T tokens up to the drop, 0.8T at 1e-4, 0.3T of a linear decay to 1e-5."""
    shares = {"warm_up": 0.02, "second_share": 0.8 / 2.3, "decay_share": 0.3 / 2.3}
    llada = stable(rate=4e-4, second_rate=1e-4, min_rate=1e-5, **shares)
    rates = [learning_rate(step, 2300, llada) for step in range(2300)]
    assert rates[:46] == pytest.approx([4e-4 * (step + 1) / 46 for step in range(46)])
    assert rates[46:2000] == [4e-4] * 1154 + [1e-4] * 800
    assert rates[2000:] == pytest.approx([1e-4 - 9e-5 * (k + 1) / 300 for k in range(300)])
    held = stable(second_rate=1.0, second_share=0.5, decay_share=0)
    assert [learning_rate(step, 10, held) for step in range(11)] == [2.0] * 5 + [1.0] * 6
    for given, message in (
        ({"second_rate": 1.0}, r"second_rate is 1\.0 and second_share is None; give both, or neither"),
        (
            {"second_rate": 3.0, "second_share": 0.5},
            r"second_rate is 3\.0; it must be from min_rate, 0\.2, to",
        ),
        (
            {"second_rate": 1.0, "second_share": 0.9},
            r"second_share is 0\.9, and warm_up and the decay take 0\.11",
        ),
        ({"second_rate": 1.0, "second_share": float("nan")}, r"second_share is nan, and warm_up and the decay"),
        (
            {"schedule": "cosine", "second_share": 0.5},
            r"second_share is 0\.5 and optimisation\.schedule is",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Optimisation(**{"schedule": "warmup_stable_decay", "rate": 2.0, "min_rate": 0.2} | given)


def test_decays_that_cannot_be_are_refused() -> None:
    for given, message in (
        ({"decay_share": 0.2}, r"decay_share is 0\.2 and optimisation\.schedule is 'cosine', which falls from the"),
        ({"decay_type": "linear"}, r"decay_type is 'linear' and optimisation\.schedule is 'cosine'"),
        ({"schedule": "constant"}, r"schedule is 'constant'; it must be one of 'cosine', 'warmup_stable_decay'"),
    ):
        with pytest.raises(ValueError, match=message):
            Optimisation(**given)
    assert stable(warm_up=0.8, decay_share=0.2).decay_share == 0.2  # 1 - 0.8 is less than 0.2 in floats
    for share in (-0.1, 1.1, float("nan"), 0.95):
        with pytest.raises(ValueError, match=rf"decay_share is {share} and warm_up is 0\.1; they are shares of"):
            stable(warm_up=0.1, decay_share=share)
    with pytest.raises(ValueError, match=r"decay_type is 'sqrt'; it must be one of 'linear', 'cosine', '1-sqrt'"):
        stable(decay_type="sqrt")
