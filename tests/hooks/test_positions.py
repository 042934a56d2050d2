import pytest
import torch

from dlm_lens.attention import Hook
from dlm_lens.hooks import MaskPositions, mask_positions
from dlm_lens.testing import tiny
from tests.reference import forward64


@pytest.mark.parametrize("stage", ["before_softmax", "after"])
@torch.no_grad()
def test_hiding_positions_equals_float64(stage: str) -> None:
    model = tiny("llada")
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    hook = mask_positions(2, -1, stage=stage)

    def by_hand(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        for query in range(9):
            for key in (2, 8):
                if query != key:
                    value[:, :, query, key] = torch.finfo(torch.float32).min if stage == "before_softmax" else 0
        return value

    expected = forward64(model, ids, edits={(layer, hook.site): by_hand for layer in range(2)})["logits"]
    for layer in model.model.layers:
        point = layer.self_attn.get_submodule(f"hook_{hook.site}")
        point.register_forward_hook(lambda _m, _a, out: hook(out))
    got = model(input_ids=ids).logits.double()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    assert (got - forward64(model, ids)["logits"]).abs().max() > 1e-2


def test_with_a_cache_the_queries_are_the_last_ones() -> None:
    scores = torch.zeros(1, 1, 2, 6)
    hidden = mask_positions(5, 1)(scores) < 0
    assert hidden[0, 0].tolist() == [[False, True, False, False, False, True], [False, True] + [False] * 4]


def test_it_is_a_hook_with_a_readable_repr_and_leaves_its_argument_alone() -> None:
    hook = mask_positions(3)
    assert isinstance(hook, Hook)
    assert hook == MaskPositions((3,), "before_softmax")
    assert repr(hook) == "MaskPositions(positions=(3,), stage='before_softmax')"
    scores = torch.zeros(1, 1, 4, 4)
    assert hook(scores).min() < -1e30
    assert scores.abs().max() == 0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one position"):
        mask_positions()
    with pytest.raises(ValueError, match="stage is 'during'"):
        mask_positions(1, stage="during")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="position 7, but there are 4 keys"):
        mask_positions(7)(torch.zeros(1, 1, 4, 4))
