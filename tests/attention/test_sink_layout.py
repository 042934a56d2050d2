"""`SinkLayout`: learned sink tokens before or after the canvas."""

import pytest
import torch

from dlm_lens.attention import SinkLayout, beside_sinks


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_sinks_last_orders_an_axis_as_canvas_then_sinks(axis: int) -> None:
    """Sinks before the canvas move to its end; sinks at its end, no sinks and an axis that broadcasts stay."""
    values = torch.arange(5 * 5 * 5).reshape(5, 5, 5)
    moved = SinkLayout(2, "front").sinks_last(values, axis)
    assert torch.equal(moved, values.index_select(axis, torch.tensor([2, 3, 4, 0, 1])))
    for layout in (SinkLayout(2, "end"), SinkLayout()):
        assert layout.sinks_last(values, axis) is values
    broadcast = values.select(axis, 0).unsqueeze(axis)
    assert SinkLayout(2, "front").sinks_last(broadcast, axis) is broadcast


def test_beside_sinks_appends_ids_or_a_flag_per_sink() -> None:
    ids = torch.tensor([[5, 6], [7, 8]])
    assert beside_sinks(ids, 2).tolist() == [[5, 6, -1, -2], [7, 8, -1, -2]]
    assert beside_sinks(ids > 5, 1, value=True).tolist() == [[False, True, True], [True, True, True]]
    assert beside_sinks(ids > 5, 1, value=False).tolist() == [[False, True, False], [True, True, False]]
    assert beside_sinks(ids, 0) is ids
