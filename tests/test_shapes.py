"""Results are held to the shapes that their annotations promise."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.shapes import check_shapes, taken


@dataclass(frozen=True, eq=False)
class Result:
    """A result."""

    scores: Float[Tensor, "step layer key"]
    expected: Float[Tensor, "step #layer key"]
    found: Bool[Tensor, "step layer key"] | None = None
    top: "Int[Tensor, 'step 2'] | None" = None
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_shapes(self, **{"layer": len(self.layers)} if self.layers else {})


SCORES = torch.zeros(3, 4, 5)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"expected": torch.zeros(3, 1, 5)},
        {"scores": SCORES.half(), "expected": SCORES.double()},
        {"found": SCORES > 0, "top": torch.zeros(3, 2, dtype=torch.int32), "layers": (0, 3, 5, 7)},
    ],
)
def test_what_fits_is_taken(fields: dict[str, Any]) -> None:
    assert isinstance(Result(**{"scores": SCORES, "expected": SCORES, **fields}), Result)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"scores": SCORES[0]}, r"shape \[4, 5\] \(torch\.float32\); it must be Float \[step, layer, key\]$"),
        ({"expected": torch.zeros(3, 2, 5)}, r"expected .*Float \[step, #layer, key\] with step=3, key=5"),
        ({"found": SCORES}, r"Result\.found has shape \[3, 4, 5\] \(torch\.float32\); it must be Bool"),
        ({"found": SCORES[:, :, :4] > 0}, r"Result\.found .* with step=3, layer=4, key=5"),
        ({"top": torch.zeros(3, 3, dtype=torch.long)}, r"Result\.top has shape \[3, 3\].*\[step, 2\] with step=3"),
        ({"scores": [[1.0]]}, r"Result\.scores is a list; it must be a tensor, Float"),
        ({"layers": (1, 2)}, r"Result\.scores has shape \[3, 4, 5\].* with layer=2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_it_must_be(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Result(**{"scores": SCORES, "expected": SCORES, **fields})


def test_results_do_not_bind_each_other() -> None:
    """Sizes are forgotten between two results."""
    Result(SCORES, SCORES)
    other = torch.zeros(1, 2, 9)
    assert Result(other, other).scores.shape == (1, 2, 9)


@dataclass(frozen=True, eq=False)
class Longer(Result):
    """A result with a tensor more than its base."""

    counts: Int[Tensor, "step"] | None = None


def test_a_tensor_of_a_base_is_compared_with_those_of_the_class() -> None:
    with pytest.raises(ValueError, match=r"Longer\.scores has shape \[3, 4, 5\].* with step=2"):
        Longer(scores=SCORES, expected=SCORES, counts=torch.zeros(2, dtype=torch.long))


def test_taken_cuts_every_tensor_on_its_own_axes() -> None:
    scores, expected = torch.arange(60.0).view(3, 4, 5), torch.arange(15.0).view(3, 1, 5)
    result = Result(scores, expected, top=torch.arange(6).view(3, 2))
    found = taken(result, {"step": slice(1, 3), "layer": slice(2, 3)})
    assert list(found) == ["scores", "expected", "top"]
    assert torch.equal(found["scores"], scores[1:3, 2:3])
    assert torch.equal(found["expected"], expected[1:3])
    assert torch.equal(found["top"], torch.tensor([[2, 3], [4, 5]]))
    assert found["scores"].data_ptr() == scores[1:3, 2:3].data_ptr()
    order = torch.tensor([2, 0, 1])
    assert torch.equal(taken(result, {"step": order})["expected"], expected[order])
