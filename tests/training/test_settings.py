import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from dlm_lens.adapters.families.smdm import SIZES
from dlm_lens.testing import tiny
from dlm_lens.training import (
    DataSettings,
    MaskedDiffusionLoss,
    ModelSettings,
    NextToken,
    Optimisation,
    TrainingSettings,
    UniformDiffusionLoss,
    build_model,
    plan,
    read_settings,
    shipped_configs,
)
from dlm_lens.training.callbacks import name_failing_reporters
from dlm_lens.training.config_files import CONFIGS
from dlm_lens.training.cost_estimate import planned_config
from dlm_lens.training.swiglu import SwiGLU


def written(path: Path, **values: object) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_the_papers_settings_are_shipped() -> None:
    """A.1 of "One Token Is Enough", and the published code where it is silent."""
    sink = read_settings("qwen2.5-0.5b-sink")
    assert (sink.model.start, sink.model.sinks, sink.model.position) == ("Qwen/Qwen2.5-0.5B", 1, "front")
    assert (sink.optimisation.betas, sink.optimisation.weight_decay) == ((0.9, 0.95), 0.1)
    assert (sink.optimisation.rate, sink.optimisation.min_rate, sink.optimisation.warm_up) == (1e-4, 1e-5, 0.01)
    assert (sink.tokens, sink.batch_size, sink.data.length) == (30e9, 512, 2048)
    assert isinstance(sink.objective, MaskedDiffusionLoss)
    assert (sink.objective.floor, sink.optimisation.clip) == (1e-3, 1.0)
    large = read_settings("qwen2.5-1.5b")
    assert (large.model.start, large.model.sinks, large.tokens, large.batch_size) == (
        "Qwen/Qwen2.5-1.5B", 0, 100e9, 4096,
    )  # fmt: skip
    assert read_settings("qwen2.5-1.5b-gated").model.gated
    scratch = read_settings("smdm-472m-sink")
    assert (scratch.optimisation.rate, scratch.optimisation.min_rate, scratch.batch_size) == (2e-4, 2e-5, 256)
    assert (scratch.tokens, scratch.model.sinks) == (100e9, 1)
    tuned = read_settings("sft-gsm8k")
    assert (tuned.epochs, tuned.batch_size, tuned.data.length, tuned.optimisation.rate) == (10, 256, 2048, 2e-4)


def test_every_shipped_config_is_complete() -> None:
    for name in shipped_configs():
        settings = read_settings(name)
        assert settings.output != TrainingSettings(steps=1).output, name
    assert {path.stem for path in CONFIGS.glob("accelerate-*")} == {"accelerate-fsdp", "accelerate-deepspeed"}


@pytest.mark.parametrize("base", ["laptop", "qwen2.5-1.5b", "smollm2-scratch"])
@pytest.mark.parametrize(
    ("end", "model"),
    [
        ("sink", {"sinks": 1}),
        ("gated", {"sinks": 0, "gated": True}),
        ("end", {"sinks": 1, "position": "end"}),
        ("sinks2", {"sinks": 2}),
        ("sinks4", {"sinks": 4}),
        ("zero-value", {"sinks": 1, "zero_value": True}),
        ("off-by-one", {"sinks": 0, "softmax": "off_by_one"}),
    ],
)
def test_a_variant_is_its_config_with_another_model(base: str, end: str, model: dict[str, Any]) -> None:
    plain, found = read_settings(base), read_settings(f"{base}-{end}")
    assert found == replace(plain, model=replace(plain.model, **model), output=f"runs/{base}-{end}")
    assert f"{base}-{end}" in shipped_configs()


def test_a_variant_of_a_fine_tuning_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"sft-gsm8k-sink is neither .*, smollm2-scratch; .*, -sink, -ga"):
        read_settings("sft-gsm8k-sink")
    assert {"sft-gsm8k-sink", "smdm-472m-off-by-one"}.isdisjoint(shipped_configs())
    with pytest.raises(FileNotFoundError, match=r"did you mean 'qwen2\.5-0\.5b-sink'"):
        read_settings("qwen2.5-0.5b-snk")
    own = written(tmp_path / "own.yaml", base="smollm2-sinks2", model={"start": "toy-ar"})
    assert read_settings(own).model == ModelSettings(start="toy-ar", sinks=2)


def test_overrides_and_bases(tmp_path: Path) -> None:
    base = written(tmp_path / "base.yaml", steps=5, model={"start": "toy", "sinks": 2}, batch_size=16)
    top = written(tmp_path / "top.yaml", base="base.yaml", model={"sinks": 1})
    settings = read_settings(top, ["optimisation.rate=3e-3", "objective.kind=next_token", "report_to=[wandb]"])
    assert settings.model == ModelSettings(start="toy", sinks=1)
    assert (settings.steps, settings.optimisation.rate, settings.report_to) == (5, 3e-3, ("wandb",))
    assert settings.objective == NextToken()
    assert read_settings(base).model.sinks == 2
    # tokens in place of the base's steps
    assert read_settings(top, ["steps=null", "tokens=1e6"]).tokens == 1e6


def test_another_kind_of_objective_takes_the_settings_that_it_has(tmp_path: Path) -> None:
    objective = {"schedule": "cosine", "weighting": "elbo", "normalisation": "sequence", "floor": 0.01}
    base = written(tmp_path / "base.yaml", steps=5, objective=objective)
    own = written(tmp_path / "own.yaml", base="base.yaml", objective={"kind": "next_token"})
    kept = NextToken(normalisation="sequence")
    assert read_settings(own).objective == kept
    assert read_settings(base, ["objective.kind=next_token"]).objective == kept
    uniform = UniformDiffusionLoss("cosine", 0.01, "sequence")
    assert read_settings(base, ["objective.kind=uniform_diffusion"]).objective == uniform
    # The base's masked diffusion is not read through a kind that lacks its settings.
    back = written(tmp_path / "back.yaml", base="own.yaml", objective={"kind": "masked_diffusion"})
    assert read_settings(back).objective == MaskedDiffusionLoss(normalisation="sequence")
    assert read_settings("qwen2.5-0.5b", ["objective.kind=next_token"]).objective == NextToken()
    same = written(tmp_path / "same.yaml", base="base.yaml", objective={"kind": "masked_diffusion"})
    assert read_settings(same).objective == MaskedDiffusionLoss(**objective)
    # What is given with the new kind must be its own, in either order, and so must a misspelt name of the base.
    pair = ["objective.kind=next_token", "objective.floor=0.1"]
    for overrides in (pair, pair[::-1]):
        with pytest.raises(ValueError, match=r"there is no setting objective\.floor"):
            read_settings(base, overrides)
    written(tmp_path / "base.yaml", steps=5, objective={"flor": 1})
    with pytest.raises(ValueError, match=r"there is no setting objective\.flor"):
        read_settings(own)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimisation.rte=1", r"no setting optimisation\.rte; did you mean optimisation\.rate\?"),
        ("objective.flor=1", r"no setting objective\.flor; did you mean objective\.floor\?"),
        ("batch=8", r"no setting batch; did you mean batch_size\?"),
        ("seed=one", r"the setting seed is 'one': input should be a valid integer"),
        ("data.packing=loose", r"packing"),
        ("objective.floor=2", r"floor is 2\.0; a masking probability"),
        ("objective.kind=gan", r"objective\.kind is 'gan'; it must be one of 'masked_diffusion', 'next_token'"),
        ("seed", r"'seed' is not key=value"),
        ("tokens=5", r"tokens and steps given as the length"),
        (f"seed={2**63}", rf"seed is {2**63}; it must be below 2\^63$"),
        ("seed=-1", r"seed is -1; it must not be negative$"),
        ("eval_steps=-1", r"eval_steps is -1; it must not be negative, and 0 for none"),
        ("save_steps=-1", r"save_steps is -1; it must not be negative, and 0 for none"),
        ("probe_steps=-1", r"probe_steps is -1; it must not be negative"),
        ("workers=-1", r"workers is -1; it must not be negative"),
        ("data.eval_split=test", r"data\.eval_split is 'test' and eval_steps is 0, so that no evaluation loss"),
        ("data.eval_path=test.txt", r"data\.eval_path is 'test\.txt' and eval_steps is 0, .* or data\.eval_path"),
        (
            "optimisation.rate=.inf",
            r"learning rates go from rate inf down to .*; they must be finite, and not negative",
        ),
        (
            "optimisation.rate=1e-6",
            r"rate is 1e-06 and min_rate is 1e-05, to which the rate falls; set min_rate to 1e-06 or less",
        ),
        ("save_minutes=.nan", r"save_minutes is nan; it must be positive"),
        ("data={length: 8, length: 9}", r"is no YAML: length is given twice, leave one of them out"),
        ("optimisation.betas=[1.5,0.9]", r"betas is \(1\.5, 0\.9\); it must be two numbers from 0 to below 1"),
        ("optimisation.clip=.nan", r"clip is nan; it must be finite and not negative, and 0 for none"),
        ("optimisation.clip=-1", r"clip is -1\.0; it must be finite and not negative"),
        ("optimisation.weight_decay=-1", r"weight_decay is -1\.0; it must be finite and not negative"),
        ("optimisation.other_weight_decay=.nan", r"other_weight_decay is nan; it must be finite"),
        ("data.shuffle_buffer=-1", r"data\.shuffle_buffer is -1; it must not be negative, and 0 for none"),
        ("steps=true", r"the setting steps is True; it takes no truth value"),
        ("tokens=yes", r"the setting tokens is True; it takes no truth value"),
        ("optimisation.clip=false", r"the setting optimisation\.clip is False; it takes no truth value"),
        ("steps.more=5", r"goes below steps, which is a value"),
        (
            "objective=3",
            r"objective is 3; it has settings of its own: give objective\.kind, one of masked_diffusion",
        ),
        ("objective=false", r"objective is False; it has settings of its own"),
        ("objective=next_token", r"objective is 'next_token'; it has settings of its own"),
        ("objective.kind=[1]", r"objective\.kind is \[1\]; it must be one of 'masked_diffusion'"),
        ("objective={kind: {}}", r"objective\.kind is \{\}; it must be one of"),
    ],
)
def test_mistakes_are_one_sentence(override: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "run.yaml", steps=5)
    with pytest.raises(ValueError, match=message) as error:
        read_settings(path, [override])
    assert "\n" not in str(error.value)


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a shipped config: laptop, qwen2\.5-0\.5b"):
        read_settings("qwen3")
    (tmp_path / "a.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="is no YAML"):
        read_settings(tmp_path / "a.yaml")
    (tmp_path / "twice.yaml").write_text("steps: 5\ndata: {length: 8}\nseed: 1\nsteps: 7\n")
    with pytest.raises(ValueError, match=r"twice\.yaml is no YAML: steps is given twice, leave one of them out"):
        read_settings(tmp_path / "twice.yaml")
    merged = "base: null\ndata: &short {length: 8, column: a}\nobjective: {}\nsteps: 5\n"
    (tmp_path / "merged.yaml").write_text(merged + "model: {start: toy}\n")
    assert (
        read_settings(tmp_path / "merged.yaml", ["data={<<: {length: 8, column: b}, length: 9}"]).data.length == 9
    )
    (tmp_path / "b.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="it must hold settings"):
        read_settings(tmp_path / "b.yaml")


def small(**values: object) -> TrainingSettings:
    settings = {"model": ModelSettings(start="toy-ar", sinks=1), "data": DataSettings(length=64), "steps": 10}
    return TrainingSettings(**settings | {"batch_size": 64, "micro_batch_size": 32} | values)


def test_a_plan_counts_parameters_and_operations() -> None:
    settings = small()
    found = plan(settings, devices=2, device="a100", utilisation=0.5)
    model = build_model(settings)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.steps, found.tokens) == (10, 10 * 64 * 64)
    layers = sum(p.numel() for p in model.model.layers.parameters())
    products = sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)
    # The sink is a query and a key more in every layer, and has no logits.
    row = 65 * (6 * products + 12 * 65 * 128 * 4) + 64 * 6 * 0.5 * 118 * 128
    assert found.flops == pytest.approx(640 * row)
    assert found.state_bytes == 16 * found.parameters
    assert found.device_hours == pytest.approx(found.flops / (312e12 * 0.5) / 3600)
    muon = plan(replace(settings, optimisation=Optimisation(optimizer="muon")), devices=2)
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert matrices < layers  # AdamW has the norms
    assert muon.state_bytes == 16 * found.parameters - 4 * matrices


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ids", "added"), [("none", 1), ("with a mask token", 0), ("all in use", 1)])
def test_a_plan_counts_the_row_of_the_mask_token(ids: str, added: int, tied: bool, tmp_path: Path) -> None:
    model = tiny("causal", model_type="llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    tokenizer, rows = model.tokenizer, model.config.vocab_size
    assert len(tokenizer) == rows
    if ids == "all in use":
        tokenizer.mask_token = None
    if ids != "none":
        tokenizer.save_pretrained(tmp_path)
    for objective, more in ((MaskedDiffusionLoss(), added), (NextToken(), 0)):
        settings = small(model=ModelSettings(start=str(tmp_path)), objective=objective)
        built = build_model(settings)
        assert len(built.get_input_embeddings().weight) == rows + more
        assert plan(settings).parameters == sum(each.numel() for each in built.parameters())


def test_a_plan_of_smollm2_has_a_new_row_for_the_mask_token() -> None:
    smollm2 = small(model=ModelSettings(start="smollm2"))
    baseline = replace(smollm2, objective=NextToken())
    assert plan(smollm2).parameters - plan(baseline).parameters == 576


@pytest.mark.parametrize(
    ("start", "sinks", "checkpointing"),
    [
        ("toy-ar", 0, False),
        ("toy-ar", 4, False),
        ("toy-ar", 0, True),
        ("rnd1", None, False),  # mixtures of experts: a token uses 2 of 8
        ("llada_moe", None, False),
        ("modernbert", None, False),  # its head has a layer of its own
        ("duo", None, False),  # a DiT, whose modulation acts on a row
        ("sedd", None, False),
        ("diffugpt", None, False),
    ],
)
def test_planned_operations_are_those_of_the_matrix_products(
    start: str, sinks: int | None, checkpointing: bool, tmp_path: Path
) -> None:
    """Against torch's own counter, forward and backward, with half of the positions masked."""
    from torch.utils.flop_counter import FlopCounterMode

    from dlm_lens.training import masked_loss
    from dlm_lens.training.trainer import _enable_checkpointing

    if start != "toy-ar":
        tiny(start).save_pretrained(tmp_path)
        start = str(tmp_path)
    chosen = ModelSettings(start=start) if sinks is None else ModelSettings(start=start, sinks=sinks)
    settings = replace(small(model=chosen), checkpointing=checkpointing)
    model = build_model(settings).train()
    model.set_attn_implementation("hooked")  # the counter does not know the CPU's fused attention
    model.config._experts_implementation = "eager"  # nor grouped products
    if checkpointing:
        _enable_checkpointing(model, {"context_fn": SwiGLU.recomputed})
    # The counter knows `addmm` alone, not its form in place.
    in_place = {torch.ops.aten.addmm_: lambda _, left, right, **kwargs: 2 * math.prod(left) * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, SwiGLU():
        outputs = torch.arange(0, 2 * 64, 2)
        masked_loss(model, torch.zeros(2, 64, dtype=torch.long), outputs, outputs % 60, torch.ones(64)).backward()
    per_token = plan(settings, devices=1).flops / plan(settings, devices=1).tokens
    # 6%: torch does not repeat the last product of a layer.
    assert counter.get_total_flops() / (2 * 64) == pytest.approx(per_token, rel=0.06 if checkpointing else 0.02)


def test_planned_activations_are_close_to_what_autograd_keeps() -> None:
    from dlm_lens.training.cost_estimate import _activations
    from dlm_lens.training.head_loss import ELEMENTS

    settings = small(precision="fp32", data=DataSettings(length=128), micro_batch_size=4)
    model = tiny(
        "sink_qwen", hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_key_value_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    sizes: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return value

    with SwiGLU(), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        states = model.model(input_ids=torch.zeros(4, 128, dtype=torch.long)).last_hidden_state
    expected = _activations(model.config, settings) - 8 * ELEMENTS["cuda"]
    assert states.requires_grad
    assert 0.6 < sum(sizes.values()) / expected < 1.5


def test_a_plan_needs_no_weights_and_no_network_for_the_shipped_configs() -> None:
    for name in ("qwen2.5-0.5b-sink", "qwen2.5-1.5b-gated", "smdm-472m"):
        assert plan(read_settings(name)).steps > 1000
    # The papers' sizes: 0.49B, and SMDM's 472M beside embedding and head.
    plain = plan(read_settings("qwen2.5-0.5b"))
    assert plain.parameters == 494_032_768
    smdm = plan(read_settings("smdm-472m"))
    assert smdm.parameters == pytest.approx(471_906_560 + 64_001 * 1280, rel=1e-3)
    assert planned_config(read_settings("smdm-472m-sink")).num_sinks == 1


@pytest.mark.long
def test_every_shipped_config_is_planned_on_any_machine() -> None:
    from dlm_lens.training.cost_estimate import MOST_DEVICES

    for name in shipped_configs():
        settings = read_settings(name)
        # A checkpoint that only an earlier run makes: its shape is that of the model it began as.
        if settings.model.start.startswith("runs/"):
            settings = replace(settings, model=replace(settings.model, start="Qwen/Qwen2.5-0.5B"))
        found = plan(settings, rows=100_000)
        share = settings.micro_batch_size * found.devices
        assert settings.batch_size % share == 0, name
        larger = range(found.devices + 1, MOST_DEVICES + 1)
        assert all(settings.batch_size % (settings.micro_batch_size * n) for n in larger), name
    assert plan(read_settings("laptop")).devices == 1
    assert plan(read_settings("qwen2.5-0.5b")).devices == 8
    assert plan(small(batch_size=96, micro_batch_size=32)).devices == 3


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"does not divide into 8 device\(s\) of 32; .* or devices=2"):
        plan(small(), devices=8)
    with pytest.raises(ValueError, match="devices is 0; a run needs at least 1"):
        plan(small(), devices=0)
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="utilisation is"):
            plan(small(), utilisation=share)
    for name in ("batch_size", "micro_batch_size"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be positive"):
            small(**{name: 0})
    with pytest.raises(ValueError, match="device 'tpu' is not listed"):
        plan(small(), device="tpu")
    with pytest.raises(ValueError, match="does not divide into 3 device"):
        plan(small(), devices=3)


def test_models_of_a_run() -> None:
    dlm = build_model(small())
    assert (dlm.config.model_type, dlm.config.num_sinks, dlm.dtype) == ("sink_qwen", 1, torch.float32)
    with pytest.warns(UserWarning, match=r"model\.sinks do not apply to an AR baseline .*: not used"):
        assert build_model(small(objective=NextToken())).config.model_type == "qwen2"
    message = r"model\.tokenizer is 'toy', and toy-ar has its own; .* leave it out, or set it to null"
    with pytest.raises(ValueError, match=message):
        build_model(small(model=ModelSettings(start="toy-ar", tokenizer="toy")))
    again = build_model(small(model=ModelSettings(start="toy-sink")))
    assert again.config.num_sinks == 1
    with pytest.raises(ValueError, match=r"toy is a DLM already, and model\.sinks apply only to"):
        build_model(small(model=ModelSettings(start="toy", sinks=1)))
    with pytest.raises(ValueError, match=r"not a size of SMDM; choose from smdm-472M, smdm-1028M"):
        build_model(small(model=ModelSettings(start="smdm-500M")))
    with pytest.raises(ValueError, match="no softmax 'off_by_one'"):
        build_model(small(model=ModelSettings(start="smdm-472M", softmax="off_by_one")))
    with pytest.raises(ValueError, match=r"model\.start is empty"):
        build_model(small(model=ModelSettings()))


def test_the_layout_of_an_ar_checkpoint_with_new_weights() -> None:
    started = small(model=ModelSettings(start="new:toy-ar", sinks=1), seed=3)
    new, again, trained = build_model(started), build_model(started), build_model(small())
    weights = dict(new.named_parameters())
    assert weights.keys() == dict(trained.named_parameters()).keys()
    assert all(torch.equal(value, dict(again.named_parameters())[name]) for name, value in weights.items())
    # Normal weights of the config's deviation; the conversion copies them.
    for name, value in weights.items():
        if value.numel() > 10_000:
            assert float(value.detach().std()) == pytest.approx(new.config.initializer_range, rel=0.03), name
            assert not torch.equal(value, dict(trained.named_parameters())[name])
    other = build_model(replace(started, seed=4)).state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], other)
    assert new.tokenizer.mask_token_id == trained.tokenizer.mask_token_id
    assert plan(started).flops == plan(replace(started, model=ModelSettings(start="toy-ar", sinks=1))).flops
    with pytest.raises(ValueError, match=r"begins with 'new:', which takes an AR checkpoint"):
        build_model(small(model=ModelSettings(start="new:toy")))


def test_a_model_from_scratch_has_its_authors_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dict(SIZES["472M"], n_layer=2, n_embd=256, n_head=4, intermediate_size=512, vocab_size=500)
    monkeypatch.setitem(SIZES, "tiny", {**shape, "padded_vocab_size": 500})
    model = build_model(small(model=ModelSettings(start="smdm-tiny", sinks=1), seed=3))
    layer = model.model.layers[0]
    usual, written = (2 / 5 / 256) ** 0.5, 1 / 256**0.5 / 2
    # Standard deviations of at least 65,536 normal numbers.
    for weight, deviation in (
        (layer.self_attn.q_proj.weight, usual),
        (layer.mlp.up_proj.weight, usual),
        (model.lm_head.weight, usual),
        (model.model.embed_tokens.weight, usual),
        (layer.self_attn.o_proj.weight, written),
        (layer.mlp.down_proj.weight, written),
    ):
        assert float(weight.detach().std()) == pytest.approx(deviation, rel=0.02)
    assert bool((layer.input_layernorm.weight == 1).all())


@pytest.mark.parametrize("start", ["toy-ar", "new:toy-ar", "smdm-tiny"])
def test_new_weights_leave_the_generators(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "intermediate_size": 32, "vocab_size": 50}
    monkeypatch.setitem(SIZES, "tiny", {**SIZES["472M"], **sizes, "padded_vocab_size": 50})
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)  # torch.manual_seed seeds GPUs with it
    state = torch.random.get_rng_state()
    build_model(small(model=ModelSettings(start=start, sinks=1), seed=3))
    assert torch.random.get_rng_state().equal(state)
    assert seeds == []


def test_docs_of_the_settings_name_every_field() -> None:
    for kind in (TrainingSettings, DataSettings, ModelSettings, Optimisation, MaskedDiffusionLoss, NextToken):
        for field in fields(kind):
            assert f"{field.name}:" in str(kind.__doc__), f"{kind.__name__}.{field.name}"


def test_a_reporter_that_cannot_begin_is_named() -> None:
    class Reporter:
        def setup(self, where: str) -> None:
            raise RuntimeError(f"No key configured\nfor {where}.")

    reporter = Reporter()
    name_failing_reporters([reporter, object()])
    message = (
        r"^report_to: Reporter could not begin \(No key configured for here\.\); set it up, or leave it out of"
    )
    with pytest.raises(ValueError, match=message):
        reporter.setup("here")


@pytest.mark.parametrize("family", ["diffugpt", "modernbert", "gpt2", "llada"])
def test_a_plan_of_networks_whose_parts_have_other_names(family: str, tmp_path: Path) -> None:
    if family == "gpt2":
        model: Any = GPT2LMHeadModel(
            GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=1
            )
        )
    else:
        model = tiny(family)
    model.save_pretrained(tmp_path)
    settings = TrainingSettings(
        model=ModelSettings(start=str(tmp_path)),
        data=DataSettings(length=16),
        objective=NextToken() if family == "gpt2" else MaskedDiffusionLoss(),
        steps=3, batch_size=4, micro_batch_size=2,
    )  # fmt: skip
    found = plan(settings)
    assert found.parameters == sum(each.numel() for each in model.parameters())
    layers = {"diffugpt": "h", "gpt2": "h"}.get(family, "layers")
    inside = sum(each.numel() for name, each in model.named_parameters() if f".{layers}." in f".{name}")
    # 6 operations a weight and token, and those of attention, are the least; the head comes on top.
    width = model.config.hidden_size
    assert found.flops > found.tokens * (6 * inside + 12 * 16 * width * model.config.num_hidden_layers)
    assert found.flops < found.tokens * 6 * (
        found.parameters + 2 * 16 * width * model.config.num_hidden_layers + 64 * width
    )
