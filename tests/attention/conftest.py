"""Fixtures of the tests of attention."""

import pytest

from dlm_lens.attention import tiled


@pytest.fixture(params=["one tile", "small tiles", "long heads", "long heads, small tiles"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Heads of all rows in one tile, or tiles of 8 rows of 37 columns (the last one shorter); or as long heads."""
    elements = 300 if "small" in request.param else 1 << 19
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(tiled, "BATCHED_ELEMENTS", elements * 8)
    if "long" in request.param:
        monkeypatch.setattr(tiled, "SHORT_HEAD", 0)
    return str(request.param)
