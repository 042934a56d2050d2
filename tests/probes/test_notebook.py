"""The notebook shows what its text says."""

import pytest

from tests.tracing.notebook import NOTEBOOKS, executed
from tests.tracing.test_notebook import printed


def estimate_in(line: str, after: str) -> tuple[float, float, float]:
    value, low, high = line.split(after)[1].replace("[", " ").replace(",", " ").replace("]", " ").split()[:3]
    return float(value), float(low), float(high)


@pytest.mark.long
def test_the_claims_are_in_the_numbers() -> None:
    (path,) = [path for path in NOTEBOOKS if path.name == "moving_sinks.ipynb"]
    text, _, moves, norms, lens, mechanism = printed(executed(path))
    assert text.startswith("tom has 5 apples")
    assert "answer 9 ." in text
    toy, ar, chance = (estimate_in(line, "pattern") for line in moves.splitlines())
    assert ar[0] < toy[1] <= toy[2] < 1 < chance[1]  # more than the AR twin, far less than chance
    measures = {line.split()[0]: [float(x) for x in line.split()[1:4]] for line in norms.splitlines()[1:8]}
    assert measures["ratio"][1] > 1.2
    assert measures["shorter"][2] < 0.4
    found = {tuple(line.split()[:2]): [float(x) for x in line.split()[3:6]] for line in lens.splitlines()[1:]}
    assert found["1", "sink"][1] > found["1", "other"][2]
    assert found["0", "sink"][2] < found["0", "other"][1]
    lines = [line.replace("steps later", "later").split() for line in mechanism.splitlines()[1:5]]
    differences = {(line[0], line[1]): [float(x) for x in line[-3:]] for line in lines}
    assert differences["confidence", "sinks"][2] < -0.1
    assert differences["later", "sinks"][2] < 0
    assert abs(differences["confidence", "random"][0]) < 0.01
