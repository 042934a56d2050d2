"""Fixtures of the tests of attention."""

import pytest

from dlm_lens.attention import pattern_reductions, tiled

TILES = ["one tile", "small tiles", "long heads", "long heads, small tiles"]


@pytest.fixture(params=[*TILES, "one tile, blocks", "long heads, small tiles, blocks"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Heads of all rows in one tile, or tiles of 8 rows of 37 columns (the last one shorter); or as long heads.

    With blocks a tile's columns are summed 4 by 4, as those of wide tiles are.
    """
    if "blocks" in request.param:
        monkeypatch.setattr(pattern_reductions, "BLOCK", 4)
        monkeypatch.setattr(pattern_reductions, "NARROW", 4)
    elements = 300 if "small" in request.param else 1 << 19
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(tiled, "BATCHED_ELEMENTS", elements * 8)
    if "long" in request.param:
        monkeypatch.setattr(tiled, "SHORT_HEAD", 0)
    return str(request.param)
