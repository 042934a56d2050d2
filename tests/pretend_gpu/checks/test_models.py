"""Loading over several devices, training, evaluation, the kernels and the doctor on the pretended GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dlm_lens as dl
from dlm_lens.attention import QUERY_STATS, AttentionInputs, pattern_stats
from dlm_lens.attention.received import attention_lse, received_sums
from dlm_lens.attention.tile_sums import tiled_received_sums
from dlm_lens.attention.tiled import tiled_lse
from dlm_lens.cli import installation as doctor
from dlm_lens.evaluation import check_checkpoint
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.placement import devices, input_device
from dlm_lens.testing import tiny
from dlm_lens.training import Example, LikelihoodBoundLoss, Rows, masked_loss
from tests.pretend_gpu.comparison import model_of
from tests.pretend_gpu.placing import device_map
from tests.pretend_gpu.scenes import PROMPTS


def test_loading_over_two_devices() -> None:
    plain, model = dl.load("toy"), dl.load("toy", device_map="balanced")
    text = "tom has 5 apples . tom buys 4 more . how many apples ? :"
    runs = [dl.denoise(m, text, steps=4, gen_length=8, hooks=[mask_top_sinks(2)]) for m in (plain, model)]
    assert len(devices(model)) == 2
    assert input_device(model).type == "cuda"
    assert runs[0].tokens.equal(runs[1].tokens.cpu())


@pytest.mark.parametrize("family", ["causal", "llada", "sink_qwen"])
def test_checks_of_loading_over_two_devices(family: str, tmp_path: Path) -> None:
    tiny(family, **({"num_sinks": 1} if family == "sink_qwen" else {})).save_pretrained(tmp_path)
    assert len(devices(dl.load(tmp_path, device_map="balanced"))) == 2


@pytest.mark.parametrize("family", ["modernbert", "diffusion_gemma"])
def test_tied_weights_loaded_to_the_disk(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    loaded = dl.load(tmp_path, dtype=torch.float32, device_map=device_map(model, "disk"), check=False)
    loaded.config._experts_implementation = "eager"  # as `model_of` does
    ids = torch.tensor([PROMPTS[1]])
    expected = model(input_ids=ids).logits
    for _ in range(4):  # every pass reads the weights from the disk again
        torch.testing.assert_close(
            loaded(input_ids=ids.cuda()).logits.cpu(), expected, rtol=1e-4, atol=1e-5
        )  # float32, another kernel


@pytest.mark.parametrize("family", ["llada", "sink_llama", "causal"])
def test_a_training_step_equals_the_cpus(family: str) -> None:
    losses, gradients = [], []
    for device in ("cpu", "cuda:0"):
        model: Any = tiny(family).to(device)
        ids = torch.tensor([PROMPTS[1]], device=device)
        outputs = torch.tensor([1, 3], device=device)
        targets, weights = ids[0, outputs], torch.tensor([0.5, 2.0], device=device)
        loss = masked_loss(model, ids, outputs, targets, weights)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.get_input_embeddings().weight.grad.cpu())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)  # float32, another kernel


@pytest.mark.parametrize("family", ["udlm", "gidd", "gidd_dit"])
def test_a_step_of_the_bound_equals_the_cpus(family: str) -> None:
    """In float64: on the CPU for a device without it."""
    found = []
    for device in ("cpu", "cuda:0"):
        model: Any = tiny(family).to(device)
        rows = Rows.of([Example(torch.arange(4, 16), 2)], 12, 0)
        asked = LikelihoodBoundLoss().for_model(model, 1).prepare(rows, [3], 1)
        asked.pop("count")
        loss = masked_loss(model, **{name: value.to(device) for name, value in asked.items()})
        loss.backward()
        found.append((loss.item(), model.get_input_embeddings().weight.grad.cpu()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)  # float32, another kernel


@pytest.mark.parametrize("width", [64, 128])
def test_the_dispatcher_runs_the_kernels_in_the_interpreter(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_lens.attention import triton_kernels

    monkeypatch.setenv("DLM_LENS_KERNELS", "on")
    called = []
    launch = triton_kernels._launch
    monkeypatch.setattr(triton_kernels, "_launch", lambda *a, **o: called.append(1) or launch(*a, **o))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 40, width, generator=generator) for _ in range(2))
    weights = torch.ones(1, 1, 40)
    found = received_sums(q.cuda(), k.cuda(), scale=0.1)
    torch.testing.assert_close(
        found.cpu(), tiled_received_sums(q, k, 0.1, None, weights, False), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        attention_lse(q.cuda(), k.cuda(), scale=0.1).cpu(), tiled_lse(q, k, 0.1, None, False)
    )
    assert len(called) == 3
    canvas, counted = q[:, :, :37], torch.arange(37)[None] > 4  # three learned sink tokens after the canvas
    stats, on_gpu = (
        pattern_stats(AttentionInputs(0, a, b, b, 0.1, own_start=0), w, QUERY_STATS, counted=c, canvas=37)
        for a, b, w, c in (
            (canvas, k, weights[..., :37], counted),
            (canvas.cuda(), k.cuda(), weights[..., :37].cuda(), counted.cuda()),
        )
    )
    assert len(called) == 5
    torch.testing.assert_close(on_gpu.sums.cpu(), stats.sums, rtol=1e-4, atol=1e-5)
    for name, values in stats.per_query.items():
        got = on_gpu.per_query[name].cpu()
        torch.testing.assert_close(got, values * counted[:, None], rtol=1e-4, atol=1e-6)  # sums in another order


def test_a_kernel_that_cannot_be_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.errors import OutOfResources

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OutOfResources(98304, 65536, "shared memory")

    from dlm_lens.attention import kernel_selection, triton_kernels

    monkeypatch.setattr(triton_kernels, "_launch", refuse)
    monkeypatch.setattr(kernel_selection, "_failed", set())
    monkeypatch.setenv("DLM_LENS_KERNELS", "on")
    model = tiny("llada").to("cuda")
    recording = dl.record(model, PROMPTS, gen_length=4)
    assert [record.name for record in caplog.records].count("dlm_lens.attention.kernel_selection") == 1
    expected = dl.record(tiny("llada"), PROMPTS, gen_length=4)
    torch.testing.assert_close(recording.received, expected.received, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_the_doctor_computes_on_every_device() -> None:
    found = {finding.subject: finding for finding in doctor.findings()}
    for index in range(2):
        assert found[f"cuda:{index}"].good, found[f"cuda:{index}"]
        assert "Pretended GPU: toy wrote" in found[f"cuda:{index}"].found
        assert "attention kernels off (DLM_LENS_KERNELS=off)" in found[f"cuda:{index}"].found


def test_a_checkpoint_is_checked_on_the_device(tmp_path: Path) -> None:
    plain, model = dl.load("toy"), dl.load("toy", device_map="cuda")
    ids = torch.tensor([plain.tokenizer("leo has 7 apples . leo picks 8 more .")["input_ids"]])
    save_file(
        {"input_ids": ids, "logits": plain(input_ids=ids).logits.detach()}, tmp_path / "reference.safetensors"
    )
    found = [list(check_checkpoint(m, reference=tmp_path / "reference.safetensors")) for m in (plain, model)]
    assert "float32 on cuda:0" in found[1][0].found
    assert [(each.subject, each.good) for each in found[0]] == [(each.subject, each.good) for each in found[1]]
    reading = [next(each.found for each in one if each.subject == "reading") for one in found]
    assert reading[0] == reading[1]


def test_a_tuned_lens_of_an_offloaded_model(tmp_path: Path) -> None:
    from tests.pretend_gpu.placing import placed

    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 w5 w6")
    settings = {"steps": 2, "batch_size": 1, "length": 6}
    lenses = [
        dl.probes.train_tuned_lens(model, text, **settings)
        for model in (tiny("llada"), placed(tiny("llada"), "disk", tmp_path / "weights"))
    ]
    assert lenses[0].digest == lenses[1].digest
    torch.testing.assert_close(lenses[0].bias, lenses[1].bias, rtol=1e-4, atol=1e-5)  # float32, another kernel


LLADA2_2 = {"expert_capacity": 4, "block_size": 4, "delete_token_id": 14, "split_token_id": 61}


@pytest.mark.parametrize(
    ("family", "sampler", "given"),
    [
        ("sdar", "multi_block", {"running_blocks": 3, "threshold": 0.05}),
        ("llada2", "multi_block", {"running_blocks": 2, "threshold": 0.05, "top_p": 0.9}),
        ("llada", "d2f", {"threshold": 0.05}),
        ("dream", "d2f", {"threshold": 0.05, "temperature": 0.7}),
        ("llada", "d3llm", {"entropy_threshold": 3.9, "temperature": 0.7}),
        ("llada2", "dmax", {"threshold": 0.05}),
        ("llada2", "llada2_levenshtein", {"threshold": 0.1, "max_post_steps": 3}),
        ("dreamon", "dreamon", {"temperature": 0.9}),
    ],
)
def test_other_samplers_of_a_family(family: str, sampler: str, given: dict[str, Any]) -> None:
    recorded = []
    given = given if family == "dreamon" else {**given, "block_length": 4}
    for device in ("cpu", "cuda:0"):
        model: Any = tiny(family, sampler=sampler, **(LLADA2_2 if sampler == "llada2_levenshtein" else {}))
        model.config._experts_implementation = "eager"
        model.to(device)
        reducers = [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()]
        recorded.append(dl.record(model, PROMPTS, reducers, gen_length=12, **given))
    cpu, gpu = recorded
    assert cpu.run.canvases.equal(gpu.run.canvases)
    assert cpu.run.in_block.equal(gpu.run.in_block)
    for name, values in cpu.arrays.items():
        torch.testing.assert_close(gpu.arrays[name], values, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_an_adapter_over_two_devices(tmp_path: Path) -> None:
    tiny("dream").save_pretrained(tmp_path / "model")
    name, shape = (
        "model.layers.1.self_attn.v_proj",
        tiny("dream").state_dict()["model.layers.1.self_attn.v_proj.weight"].shape,
    )
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    factors = {"A": torch.ones(2, shape[1]), "B": torch.ones(shape[0], 2)}
    tensors = {f"base_model.model.{name}.lora_{one}.weight": value for one, value in factors.items()}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    plain = dl.load(tmp_path / "model", adapter=tmp_path / "adapter")
    split = dl.load(tmp_path / "model", adapter=tmp_path / "adapter", device_map="balanced")
    assert len(devices(split)) == 2
    for key, value in plain.state_dict().items():
        assert split.state_dict()[key].cpu().equal(value), key
