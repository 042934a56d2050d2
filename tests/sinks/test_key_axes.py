"""`KeyAxes`: the fields that received attention, sinks and trajectories share."""

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import torch

from dlm_lens import AboveMean, find_sinks, trajectories
from dlm_lens.attention.hook_identity import identity_of
from dlm_lens.hooks import mask_sinks
from dlm_lens.sinks import KeyAxes, KeyStatistic, Received

SHARED = [each for each in fields(KeyAxes) if each.name != "dims"]


@pytest.fixture
def received() -> Received:
    """Two steps, three rows, two layers, two heads, five keys; every shared field differs from its default."""
    random = torch.Generator().manual_seed(0)
    return Received(
        values=torch.rand(2, 3, 2, 2, 5, generator=random),
        expected=torch.rand(2, 3, 1, 2, 5, generator=random) + 0.5,
        counted=torch.tensor([[5, 4, 3], [5, 5, 5]]),
        tokens=torch.randint(9, (2, 3, 5), generator=random),
        masked=torch.rand(2, 3, 5, generator=random) > 0.5,
        valid=torch.arange(5) >= torch.tensor([0, 2, 1])[:, None],
        final_tokens=torch.randint(9, (3, 5), generator=random),
        layers=(1, 4),
        steps=(2, 7),
        heads=(3, 5),
        sinks=1,
        tokenizer=object(),
        row_prompts=torch.tensor([0, 1, 0]),
        rows=(4, 2, 7),
        model="toy",
        answer=torch.rand(2, 3, 5, generator=random) > 0.5,
        decided=torch.rand(2, 3, 5, generator=random) > 0.5,
        follow="token",
    )


def same(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.equal(one, other) if both else one is other or one == other


def test_every_shared_field_is_in_the_sinks_and_in_the_trajectories(received: Received) -> None:
    sinks = find_sinks(received, "above-mean:0.2")
    for each in SHARED:
        value = getattr(received, each.name)
        assert each.default is not MISSING
        assert not same(value, each.default), f"the fixture leaves {each.name} at its default"
        for result in (sinks, trajectories(sinks), trajectories(received, "above-mean:0.2")):
            assert same(getattr(result, each.name), value), (type(result).__name__, each.name)


def test_a_part_has_its_rows_steps_layers_and_heads_of_every_field(received: Received) -> None:
    part = received.part(rows=slice(1, 3), steps=slice(1, 2), layers=slice(0, 1), heads=slice(1, 2))
    assert torch.equal(part.values, received.values[1:2, 1:3, :1, 1:])
    assert part.rows == (2, 7)
    assert torch.equal(part.expected, received.expected[1:2, 1:3, :, 1:])
    for name in ("counted", "tokens", "masked"):
        assert torch.equal(getattr(part, name), getattr(received, name)[1:2, 1:3]), name
    for name in ("valid", "final_tokens", "row_prompts"):
        assert torch.equal(getattr(part, name), getattr(received, name)[1:3]), name
    assert (part.layers, part.steps, part.heads) == ((1,), (7,), (5,))
    assert part.padding is not None
    assert part.padding.tolist() == [2, 1]
    counted = replace(received, steps=(), heads=(), rows=())  # from 0
    part = counted.part(rows=slice(1, 3), steps=slice(1, 2), heads=slice(1, 2))
    assert (part.step_numbers, part.head_numbers, part.row_numbers) == ((1,), (1,), (1, 2))


def test_the_identities_of_hooks_that_recordings_store_stay() -> None:
    """A recording that was begun under hooks with such sources can be resumed; digests of commit 5dc3dbcc.

    It had no `row_prompts` and no `model`. Trajectories, which are no source of hooks, had other fields there.
    """
    scores = torch.arange(12.0).view(1, 1, 1, 1, 12)
    ids, own = torch.arange(12).view(1, 1, 12), torch.tensor([0])
    shared = {"tokens": ids, "masked": ids > 6, "valid": ids[0] > 1, "final_tokens": ids[0] + 1, "layers": (0,)}
    given = Received(scores, torch.ones_like(scores), torch.tensor([[12]]), row_prompts=own, model="toy", **shared)
    norms = KeyStatistic(scores, "key norm", row_prompts=own, **shared)
    sinks = find_sinks(given, "above-mean:1")
    hooks = (mask_sinks(AboveMean(1.0), source=given), mask_sinks(source=sinks))
    found = [identity_of(one).partition("#")[2] for one in (*hooks, norms, trajectories(sinks))]
    assert found == ["cd7fc92ee2a291d3", "7c0269d6cbaf8059", "faca7a6a114a9a44", "01893b81e4daba3a"]


def test_sinks_have_the_tensors_of_the_axes_in_dims(received: Received) -> None:
    """A pattern without steps and rows: the sinks are without these axes, and give them back."""
    one = replace(received.part(rows=slice(1, 2), steps=slice(1)), dims=("layer", "head", "key"), steps=())
    sinks = find_sinks(one, "above-mean:0.2")
    assert sinks.tokens is not None
    assert sinks.tokens.tolist() == received.tokens[0, 1].tolist()
    assert sinks.padding is not None
    assert sinks.padding.tolist() == [2]
    for name, value in sinks.shared_fields.items():
        assert same(value, getattr(one, name)), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"dims": ("batch", "step", "layer", "head", "key")},
            r"Received\.dims is \('batch'.*in this order",
        ),
        ({"dims": ("step", "batch", "layer", "head")}, "the key axis has size 5, but dims"),
        ({"tokens": torch.zeros(2, 3, 4, dtype=torch.long)}, r"Received\.tokens has shape \[2, 3, 4\].*key=5"),
        ({"row_prompts": torch.tensor([0, 1])}, r"Received\.row_prompts has shape \[2\].*batch=3"),
        ({"heads": (3, 5, 6)}, r"Received\.values has shape .* with .*head=3"),
    ],
)
def test_fields_that_contradict_the_statistic_are_refused(
    received: Received, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(received, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"masked": torch.ones(3, 5).bool()}, r"Sinks\.masked has shape \[3, 5\]; is_sink needs \[2, 3, 5\]"),
        ({"row_prompts": torch.tensor([0, 1])}, r"Sinks\.row_prompts has shape \[2\]; is_sink needs \[3\]"),
        ({"layers": ()}, "0 layer numbers for is_sink"),
        ({"steps": (1, 2, 3)}, "3 step numbers for is_sink"),
    ],
)
def test_fields_that_contradict_the_sinks_are_refused(
    received: Received, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(find_sinks(received, "above-mean:0.2"), **change)
