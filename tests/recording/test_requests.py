"""What identifies a model: every entry of its weights."""

import hashlib
import itertools
import math
import operator
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlm_lens.evaluation import HarnessLM
from dlm_lens.evaluation.responses import fingerprint
from dlm_lens.hooks import at_progress, mask_top_sinks, steer
from dlm_lens.probes import TunedLens, train_tuned_lens
from dlm_lens.recording import Recording, record
from dlm_lens.recording.model_identity import weights_digest
from dlm_lens.recording.shards import _check_same
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask
from tests.recording.reference import PROMPTS

LARGE = (4_112, 4_096)
"""16.8 million entries: more than float32 can count, and 17 parts of the digest."""


def weights() -> Iterator[tuple[str, nn.Parameter]]:
    """Weights of that size that take no memory."""
    yield "expanded", nn.Parameter(torch.tensor(0.5).expand(LARGE))
    yield "expanded row", nn.Parameter(torch.arange(4096.0).expand(LARGE))
    yield "transposed", nn.Parameter(torch.arange(4096.0)[:, None].expand(LARGE[::-1]).T)
    yield "meta", nn.Parameter(torch.empty(LARGE, device="meta"))
    yield "flat", nn.Parameter(torch.tensor(0.5).expand(math.prod(LARGE)))


def expected_digest(model: nn.Module) -> str:
    """The digest in Python's integers: float32 entries as signed 32-bit words, in sums of 2^16 products."""
    multipliers = list(map(int, np.random.PCG64(0).random_raw(2**16)))
    found = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        found.update(f"{name} {tuple(weight.shape)}".encode())
        data = weight.detach().float().numpy().tobytes()
        words = [number for (number,) in struct.iter_unpack("<i", data)]
        for start in range(0, len(words), 2**16):
            part = words[start : start + 2**16]
            total = sum(map(operator.mul, part, multipliers)) % 2**64
            found.update(total.to_bytes(8, "little"))
    return found.hexdigest()[:16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_of_weights_is_that_of_its_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # 300 * 501 words are two spans and a part of one.
    model = nn.ModuleDict({"b": nn.Linear(501, 300, dtype=dtype), "a": nn.Linear(3, 1, dtype=dtype)})
    assert weights_digest(model) == expected_digest(model)


def digest_of(weight: torch.Tensor) -> str:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    return weights_digest(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_every_entry_of_a_weight_counts(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = (10 * torch.randn(70, 33, generator=draw)).to(dtype)
    found = {digest_of(weight)}
    for row, column in itertools.product(range(70), range(0, 33, 4)):
        edited = weight.clone()
        edited[row, column] = edited[row, column] + 1
        found.add(digest_of(edited))
    assert len(found) == 1 + 70 * 9


def test_edits_of_weights_that_leave_their_sums_are_seen() -> None:
    """An ablated head, exchanged rows, columns or entries, opposite changes, and signs; also in several parts."""
    for shape in ((64, 64), (2100, 2100)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        edits = [weight.clone() for _ in range(7)]
        edits[0][8:16] = 0
        edits[1][[3, 50]] = weight[[50, 3]]
        edits[2][:, [3, 50]] = weight[:, [50, 3]]
        edits[3][[3, 50], [7, 9]] = weight[[50, 3], [9, 7]]
        edits[4][5, [1, 2]] += torch.tensor([0.5, -0.5])
        edits[5][5] = -weight[5]
        edits[6][:, [4, 9]] = -weight[:, [4, 9]]
        assert len({digest_of(one) for one in [weight, *edits]}) == 8


def test_a_digest_does_not_depend_on_layout_or_precision() -> None:
    weight = torch.randn(2100, 2101, generator=torch.Generator().manual_seed(0)).bfloat16()
    same = [weight, weight.T.contiguous().T, weight.float(), weight[None][:, :, :].squeeze(0)]
    assert len({digest_of(one) for one in same}) == 1
    assert digest_of(weight.T) != digest_of(weight)
    assert digest_of(torch.empty(4, 0)) != digest_of(torch.empty(0, 4))


def test_edited_weights_do_not_get_the_recording_or_the_answers_of_others(tmp_path: Path) -> None:
    model = tiny("llada")
    before = weights_digest(model), fingerprint(model)
    path = tmp_path / "responses.jsonl"
    HarnessLM(model, responses=path)
    record(model, PROMPTS, to=tmp_path / "recording", steps=2, gen_length=4)
    # One head's output is ablated, all but the entries at the beginning, in the middle and at the end.
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3:13, 1:7] = 0
    assert weights_digest(model) != before[0]
    assert fingerprint(model) != before[1]
    with pytest.raises(ValueError, match="holds answers with fingerprint="):
        HarnessLM(model, responses=path)
    with pytest.raises(ValueError, match="weights"):
        record(model, PROMPTS, to=tmp_path / "recording", steps=2, gen_length=4)


@pytest.mark.parametrize(
    ("family", "name"), [("llada2", "e_score_correction_bias"), ("diffusion_gemma", "layer_scalar")]
)
def test_buffers_of_a_checkpoint_count_as_weights_do(family: str, name: str, tmp_path: Path) -> None:
    model = tiny(family)
    settings = {"steps_per_block": 2, "gen_length": 4}
    record(model, PROMPTS, to=tmp_path, **settings)
    before = weights_digest(model)
    model.register_buffer("not_in_the_files", torch.ones(3), persistent=False)
    assert weights_digest(model) == before
    buffers = [buffer for path, buffer in model.named_buffers() if path.endswith(name)]
    assert buffers
    for buffer in buffers:
        kept = buffer.clone()
        buffer.view(-1)[-1] += 0.5
        assert weights_digest(model) != before
        with pytest.raises(ValueError, match="model weights"):
            record(model, PROMPTS, to=tmp_path, **settings)
        buffer.copy_(kept)
    assert weights_digest(model) == before


def with_defaults(**settings: Any) -> Callable[[Any], None]:
    return lambda model: model.sampler_defaults.update(settings)


def with_config(**fields: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, value in fields.items():
            setattr(model.config, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_defaults(temperature=0.9), "defaults temperature = '0.0', and now it is '0.9'"),
        (with_config(mask_token_id=5), "config mask_token_id = '63', and now it is '5'"),
        (with_config(softmax="off_by_one"), "config softmax = \"'standard'\", and now"),
        (with_config(sampler="dream"), "defaults sampler = \"'llada'\", and now"),
    ],
    ids=["temperature", "mask", "softmax", "sampler"],
)
def test_other_defaults_or_another_config_do_not_get_the_recording(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    settings = {"steps": 2, "gen_length": 4}
    record(tiny("sink_qwen"), PROMPTS, to=tmp_path, **settings)
    model = tiny("sink_qwen")
    change(model)
    model.config.use_cache = True
    with pytest.raises(ValueError, match=re.escape(said)):
        record(model, PROMPTS, to=tmp_path, **settings)


def test_a_recording_is_not_continued_with_other_products(tmp_path: Path) -> None:
    settings = {"steps": 2, "gen_length": 4}
    record(tiny("llada"), PROMPTS, to=tmp_path, **settings)
    of_evaluation = fingerprint(tiny("llada"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match="defaults float32 products = 'float32', and now it is 'bf16'"):
            record(tiny("llada"), PROMPTS, to=tmp_path, **settings)
        assert fingerprint(tiny("llada")) != of_evaluation
    finally:
        torch.set_float32_matmul_precision(before)
    record(tiny("llada"), PROMPTS, to=tmp_path, **settings)
    assert fingerprint(tiny("llada")) == of_evaluation


def test_defaults_that_are_not_used_and_headers_of_earlier_versions_stop_nothing(tmp_path: Path) -> None:
    model = tiny("llada")
    expected = record(model, PROMPTS, to=tmp_path, steps=2, gen_length=4, temperature=0.0)
    model.sampler_defaults["temperature"] = 0.9
    again = record(model, PROMPTS, to=tmp_path, steps=2, gen_length=4, temperature=0.0)
    assert again.received.nan_to_num(-7).equal(expected.received.nan_to_num(-7))
    request = {"model": {"name": "m"}, "settings": {"steps": "2"}}
    _check_same(tmp_path, request, {**request, "config": {"a": "1"}, "defaults": {"b": "2"}})
    _check_same(tmp_path, {**request, "config": {"old": "1", "a": "1"}}, {**request, "config": {"a": "1"}})
    with pytest.raises(ValueError, match="config a = '1', and now it is '2'"):
        _check_same(tmp_path, {**request, "config": {"a": "1"}}, {**request, "config": {"a": "2"}})


@pytest.mark.parametrize("weight", [weight for _, weight in weights()], ids=[name for name, _ in weights()])
def test_a_model_with_a_weight_of_that_size_is_recorded_evaluated_and_tuned(
    weight: nn.Parameter, tmp_path: Path
) -> None:
    model = tiny("llada")
    expected = record(model, PROMPTS, steps=2, gen_length=4)
    before = weights_digest(model)
    model.register_parameter("embedding_of_its_size", weight)
    assert weights_digest(model) != before
    record(model, PROMPTS, to=tmp_path / "recording", steps=2, gen_length=4)
    received = Recording.load(tmp_path / "recording").received
    assert torch.equal(received.nan_to_num(-7), expected.received.nan_to_num(-7))
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 w5 w6")
    lens = train_tuned_lens(model, text, steps=1, batch_size=1, length=6)
    assert TunedLens.load(lens.save(tmp_path / "lens.safetensors"), model).digest == weights_digest(model)
    if weight.device.type != "meta":
        lm = HarnessLM(model, generation={"steps": 2, "gen_length": 4}, record_to=tmp_path / "requests")
        lm.generate_until(ask("generate_until", ("w1 w2", {"until": []})))
        assert Recording.load(tmp_path / "requests/task/00000-0").run.steps == 2


@pytest.mark.long
def test_an_embedding_above_2_to_24_entries_in_use(tmp_path: Path) -> None:
    # The network itself: 600,000 words of width 32 are 19.2 million entries.
    model = tiny("causal", vocab_size=600_000)
    assert model.get_input_embeddings().weight.numel() > 2**24
    record(model, [[5, 6]], to=tmp_path, gen_length=2)
    assert Recording.load(tmp_path).run.steps == 2


@pytest.mark.parametrize("place", [0, 1, 1000, -1])
def test_both_digests_see_entries_of_any_layout_without_copying_it(place: int) -> None:
    one, other, model = torch.arange(4096.0), torch.arange(4096.0), tiny("llada")
    other[place] += 1
    found = []
    for row in (one, other, one.clone()):
        model.register_parameter("large", nn.Parameter(row[:, None].expand(LARGE[::-1]).T))
        found.append((weights_digest(model), fingerprint(model)))
    assert found[0] == found[2]
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_a_recording_under_another_tensor_or_function_is_another_recording(tmp_path: Path) -> None:
    """The hooks of a pair print alike; a recording of one is not that of the other, and its own goes on."""
    model, given = tiny("llada"), {"steps": 2, "gen_length": 4, "seed": 0}
    one, other = torch.zeros(32), torch.zeros(32)
    one[0] = other[1] = 2.0
    pairs = {"tensor": (steer(one), steer(other)), "function": tuple(map(limited, (0.2, 2.0)))}
    for name, (first, second) in pairs.items():
        assert repr(first) == repr(second)
        kept = record(model, PROMPTS, hooks=[first], to=tmp_path / name, **given)
        again = record(model, PROMPTS, hooks=[first], to=tmp_path / name, **given)
        assert torch.equal(again.run.canvases, kept.run.canvases)
        with pytest.raises(ValueError, match="hooks"):
            record(model, PROMPTS, hooks=[second], to=tmp_path / name, **given)


def limited(least: float) -> Any:
    """A hook at rows whose progress is below a number that only the function knows."""
    return at_progress(mask_top_sinks(1), lambda progress: progress < least)
