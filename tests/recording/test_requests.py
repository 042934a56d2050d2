"""What identifies a model, also where a weight is larger than float32 counts."""

import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from dlm_lens.evaluation import HarnessLM
from dlm_lens.evaluation.responses import fingerprint
from dlm_lens.probes import TunedLens, train_tuned_lens
from dlm_lens.recording import Recording, record
from dlm_lens.recording.model_identity import SAMPLED, sampled_places, weights_digest
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask
from tests.recording.reference import PROMPTS

LLADA = (126_464, 4_096)
"""LLaDA-8B's embedding: 518 million entries, of which float32 tells only every 32nd apart."""


def weights() -> Iterator[tuple[str, nn.Parameter]]:
    """Weights of that size that take no memory."""
    yield "expanded", nn.Parameter(torch.tensor(0.5).expand(LLADA))
    yield "expanded row", nn.Parameter(torch.arange(4096.0).expand(LLADA))
    yield "transposed", nn.Parameter(torch.arange(4096.0)[:, None].expand(LLADA[::-1]).T)
    yield "meta", nn.Parameter(torch.empty(LLADA, device="meta"))
    yield "flat", nn.Parameter(torch.tensor(0.5).expand(math.prod(LLADA)))


@pytest.mark.parametrize(
    "entries", [1, 2, 63, 64, 65, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, math.prod(LLADA), 2**31 + 5, 10**12]
)
def test_places_are_within_the_weight_evenly_spaced_and_hold_both_ends(entries: int) -> None:
    places = sampled_places(entries)
    assert places[0] == 0
    assert places[-1] == entries - 1
    assert len({*places}) == len(places) == min(SAMPLED, entries)
    step = Fraction(entries - 1, max(1, len(places) - 1))
    assert all(0 <= step * number - place < 1 for number, place in enumerate(places))


@pytest.mark.parametrize("weight", [weight for _, weight in weights()], ids=[name for name, _ in weights()])
def test_a_model_with_a_weight_of_lladas_size_is_recorded_evaluated_and_tuned(
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


@pytest.mark.parametrize("place", [0, 1, -1])
def test_both_digests_see_entries_of_any_layout_without_copying_it(place: int) -> None:
    one, other, model = torch.arange(4096.0), torch.arange(4096.0), tiny("llada")
    other[place] += 1
    found = []
    for row in (one, other, one.clone()):
        model.register_parameter("large", nn.Parameter(row[:, None].expand(LLADA[::-1]).T))
        found.append((weights_digest(model), fingerprint(model)))
    assert found[0] == found[2]
    if place != 1:  # 64 of 518 million entries: the ends are always among them
        assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]
