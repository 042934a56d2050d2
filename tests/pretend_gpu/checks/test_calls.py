"""Every public call of every family equals the CPU's on one GPU, over two, and with weights offloaded."""

import os
from pathlib import Path

import pytest

from tests.pretend_gpu.comparison import FAMILIES, NO_FLOAT64, assert_same, model_of, on_the_cpu, outcome, scenes_of
from tests.pretend_gpu.division import KINDS, OF_A_FAMILY, ORDER, PLACED, is_made, whose_turn
from tests.pretend_gpu.placing import EVERYWHERE, PLACEMENTS, Placement, placed
from tests.pretend_gpu.probe_scenes import PROBES

SHARE = os.environ.get("PRETEND_GPU_SHARE", "01")
SHARED = [(family, where) for family, where in PLACED if str(FAMILIES.index(family) % 2) in SHARE]
"""With every family, or with every second one: 0 or 1 of two shares."""


@pytest.mark.parametrize(("family", "where"), SHARED)
def test_calls_equal_those_on_the_cpu(family: str, where: Placement, tmp_path: Path) -> None:
    failed = []
    # One for all calls: to build and to move it takes longer than many of them. The CPU's is a new one for each, so
    # what a call left behind in the model would show in the next.
    model = placed(model_of(family), where, tmp_path)
    for name, scene in scenes_of(family).items():
        if not is_made(name, family, where):
            continue
        try:
            assert_same(outcome(scene, model, family), on_the_cpu(family, name))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, "\n".join(failed)


@pytest.mark.skipif(NO_FLOAT64, reason="few families are made there")
@pytest.mark.skipif(SHARE not in ("01", "0"), reason="once is enough")
def test_every_call_is_made_in_every_place_and_with_families_of_every_kind() -> None:
    for name in set(ORDER) - {*OF_A_FAMILY, *PROBES}:
        without = [kind for kind in KINDS if whose_turn(name, kind) is None]
        assert without in ([], [("causal",)]), name  # whose runs have no masks, and grow
        places = {where for where in PLACEMENTS[1:] for family in EVERYWHERE if is_made(name, family, where)}
        assert places in ({"split", "cpu"}, {"split", "disk"}), name
    for family in FAMILIES:
        made = [name.split(":")[0] for name in scenes_of(family) if is_made(name, family, "one")]
        assert made.count("hook") >= 2, family
        assert {"denoise", "nnsight", "record"} <= set(made), family
