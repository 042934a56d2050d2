"""Every public call of every family equals the CPU's on one GPU, over two, and with weights offloaded."""

from pathlib import Path

import pytest

from tests.pretend_gpu.comparison import FAMILIES, assert_same, in_turn, model_of, on_the_cpu, outcome, scenes_of
from tests.pretend_gpu.placing import EVERYWHERE, PLACEMENTS, Placement, placed


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_equal_those_on_the_cpu(family: str, where: Placement, tmp_path: Path) -> None:
    failed = []
    # One for all calls: to build and to move it takes longer than many of them. The CPU's is a new one for each, so
    # what a call left behind in the model would show in the next.
    model = placed(model_of(family), where, tmp_path)
    for name, scene in scenes_of(family).items():
        if family not in EVERYWHERE and where != "one" and not name.startswith("denoise"):
            continue  # placement is a matter of weights, not of families
        if family not in EVERYWHERE and not in_turn(name, family):
            continue
        try:
            assert_same(outcome(scene, model, family), on_the_cpu(family, name))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, "\n".join(failed)
