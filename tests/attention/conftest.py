"""Fixtures of the tests of attention."""

import pytest

from dlm_lens.attention import kernel_selection, tile_sums, tiled

TILES = ["one tile", "small tiles", "long heads", "long heads, small tiles"]


COMPILED = ["one tile, compiled", "small tiles, compiled", "long heads, small tiles, compiled"]


@pytest.fixture(params=[*TILES, "one tile, blocks", "long heads, small tiles, blocks", *COMPILED])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Heads of all rows in one tile, or tiles of 8 rows of 37 columns (the last one shorter); or as long heads.

    With blocks a tile's columns are summed 4 by 4, as those of wide tiles are. Compiled by numba, or else in calls
    of torch.
    """
    if "compiled" in request.param:
        pytest.importorskip("numba", reason="needs numba: pip install 'dlm-lens[numba]'")
        monkeypatch.setattr(kernel_selection, "LEAST_ENTRIES", 0)
    for name in ("THREADS_OF_STATISTICS", "THREADS_OF_SUMS"):
        monkeypatch.setattr(kernel_selection, name, 1 << 10 if "compiled" in request.param else 0)
    if "blocks" in request.param:
        monkeypatch.setattr(tile_sums, "BLOCK", 4)
        monkeypatch.setattr(tile_sums, "NARROW", 4)
    elements = 300 if "small" in request.param else 1 << 19
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(tiled, "BATCHED_ELEMENTS", elements * 8)
    if "long" in request.param:
        monkeypatch.setattr(tiled, "SHORT_HEAD", 0)
    return str(request.param)
