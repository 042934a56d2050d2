"""The notebooks run, their stored outputs are those of a run, and their text says what the numbers say."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.notebooks.execution import FOLDER, NOTEBOOKS, executed, printed, read, source_of
from tests.pages import distance
from tests.printed import CLOSE, differences

RENEW = "run `make notebooks`"
TRAINED = ("block_diffusion.ipynb", "sink_token_training.ipynb")
"""Training amplifies the rounding of another CPU: of their numbers less is compared."""


def picture(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("L")


@pytest.mark.parametrize(
    ("fresh", "stored", "equal"),
    [
        ("layer 2: 0.412 [0.31, 0.52]", "layer 2: 0.413 [0.31, 0.52]", True),
        ("layer 2: 0.412", "layer 2: 0.512", False),
        ("8 of 16 right", "9 of 16 right", False),
        ("answer 23 .", "answer 20 .", False),
        ("sink at 'tom'", "sink at 'mia'", False),
        ("kl 1.2e-3", "kl 1.3e-3", True),
    ],
)
def test_stale_text_is_found(fresh: str, stored: str, equal: bool) -> None:
    assert (not differences(fresh, stored)) == equal


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_its_outputs_are_stored(path: Path) -> None:
    fresh, stored = executed(path), read(path)
    for ours, theirs in zip(fresh["cells"], stored["cells"], strict=True):
        outputs = ours.get("outputs", []), theirs.get("outputs", [])
        kinds = [[(each["output_type"], sorted(each.get("data", ()))) for each in every] for every in outputs]
        assert kinds[0] == kinds[1], f"{RENEW}: {path.name}, {source_of(ours)[:80]!r}"
        for one, other in zip(*outputs, strict=True):
            data = one.get("data", {"text": one.get("text")}), other.get("data", {"text": other.get("text")})
            for kind, value in data[0].items():
                place = f"{RENEW}: {path.name}, {source_of(ours)[:80]!r}"
                _check(kind, value, data[1][kind], place, trained=path.name in TRAINED)


def _check(kind: str, fresh: Any, stored: Any, place: str, *, trained: bool) -> None:
    if kind == "image/png":
        one, other = picture(fresh), picture(stored)
        assert max(abs(a - b) for a, b in zip(one.size, other.size, strict=True)) <= 4, place
        assert distance(one, other) < (8 if trained else 2), place
    else:
        texts = (re.sub(r"<style.*?</style>|<[^>]*>", " ", "".join(text)) for text in (fresh, stored))
        found = differences(*texts, tolerance=(0.3, 0.2) if trained else CLOSE)
        assert not found, f"{place}: {found}"


def lines_of(name: str) -> list[str]:
    """Every line that a notebook prints."""
    return "\n".join(printed(read(FOLDER / name))).splitlines()


def estimate_in(line: str, after: str) -> tuple[float, float, float]:
    value, low, high = line.split(after)[1].replace("[", " ").replace(",", " ").replace("]", " ").split()[:3]
    return float(value), float(low), float(high)


def test_moving_sinks() -> None:
    text, _, moves, norms, lens, mechanism = printed(read(FOLDER / "moving_sinks.ipynb"))
    assert text.startswith("tom has 5 apples")
    assert "answer 9 ." in text
    toy, ar, chance = (estimate_in(line, "pattern") for line in moves.splitlines())
    assert ar[0] < toy[1] <= toy[2] < 1 < chance[1]  # more than the AR twin, far less than chance
    measures = {line.split()[0]: [float(x) for x in line.split()[1:4]] for line in norms.splitlines()[1:8]}
    assert measures["ratio"][1] > 1.2
    assert measures["shorter"][2] < 0.4
    found = {tuple(line.split()[:2]): [float(x) for x in line.split()[3:6]] for line in lens.splitlines()[1:]}
    assert found["1", "sink"][1] > found["1", "other"][2]
    # None of the sinks, which 8 prompts do not tell apart from the others' share.
    assert found["0", "sink"][0] == 0 < found["0", "other"][1] < found["0", "sink"][2]
    lines = [line.replace("steps later", "later").split() for line in mechanism.splitlines()[1:5]]
    differences = {(line[0], line[1]): [float(x) for x in line[-3:]] for line in lines}
    assert differences["confidence", "sinks"][2] < -0.1
    assert differences["later", "sinks"][2] < 0
    assert abs(differences["confidence", "random"][0]) < 0.01


def test_tracing() -> None:
    plain, _, edited, late = printed(read(FOLDER / "tracing.ipynb"))
    rows = [line.split("hidden from step ")[1].split(": ") for line in late.splitlines()]
    answers = {int(step): answer for step, answer in rows}
    assert answers[8] == plain.strip()  # there is no step 8
    assert answers[0] != plain.strip()
    assert len({line.split("in the last layer: ")[1] for line in edited.splitlines()}) > 2


def test_transformerlens() -> None:
    outputs = printed(read(FOLDER / "transformerlens.ipynb"))
    assert outputs[0].startswith("answer 1 2 4 9 .\n")
    (patched,) = [text for text in outputs if text.startswith("donor")]
    lines = dict(line.split(": ") for line in patched.splitlines())
    assert lines["donor"] == lines["after layer 0"] == "answer 3 5 7 8 ."
    assert lines["after layer 3"] == "answer 1 2 4 9 ."  # no other position reads the stream after the last layer
    (heads,) = [text for text in outputs if text.startswith("nothing off")]
    assert all("{'answer 1 2 4 9 .'}" in line for line in heads.splitlines()[1:])


def test_diffusion_gemma() -> None:
    lines = lines_of("diffusion_gemma.ipynb")
    answers = {
        line.split()[0]: line.split()[1:] for line in lines if line.startswith(("own ", "other ", "patched "))
    }
    assert answers["patched"] == answers["other"] != answers["own"]
    kinds = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("logits ", "top ", "none "))}
    assert len({tuple(answer) for answer in kinds.values()}) == 3
    shares = [float(line.split("(uniform ")[1].rstrip(")")) for line in lines if line.startswith("layer ")]
    assert shares[0] == shares[1] < shares[2]  # a window of 6 sees 5 cached keys and the canvas of 8
    assert shares[0] == pytest.approx(5 / 13, abs=0.005)


def test_ten_minutes() -> None:
    lines = lines_of("ten_minutes.ipynb")
    right = "26 - 6 = 20 . 20 - 9 = 11 . 11 + 12 = 23 . answer 23 ."
    assert lines.count(right) == 3  # the controls
    assert "True True" in lines


def test_knock_outs() -> None:
    lines = lines_of("knock_outs.ipynb")
    assert "16 of 16 right without hooks" in lines
    differences = [estimate_in(line, "minus strongest column:") for line in lines if "minus strongest" in line]
    assert [low > 0 for _, low, _ in differences] == [False, False, True]  # two of three reach 0
    shifts = [estimate_in(line, "mean KL") for line in lines if "mean KL" in line]
    assert shifts[0][1] > 5 * max(shifts[1][2], shifts[2][2])  # clear on fixed canvases
    kinds = [estimate_in(line, " right") for line in lines if line.startswith(("numbers", "not numbers"))]
    assert all(
        kinds[i][0] < kinds[i + 1][0] and kinds[i][2] >= kinds[i + 1][1] for i in (0, 2)
    )  # one way, undecided


def test_block_diffusion() -> None:
    lines = lines_of("block_diffusion.ipynb")
    whole, untrained, trained = (
        estimate_in(line, ":")
        for line in lines
        if re.match(r"toy, which|the same weights|by blocks, trained", line)
    )
    assert whole[0] == 1
    assert untrained[2] < trained[1]
    assert "cached equals uncached: True" in lines


def test_own_detector_and_hook() -> None:
    lines = lines_of("own_detector_and_hook.ipynb")
    shares = [estimate_in(line, "columns):") for line in lines if "of earlier blocks hidden" in line]
    excess = [estimate_in(line, "random minus hidden:") for line in lines if "random minus hidden" in line]
    assert shares[0][2] < shares[1][1]  # numbers are needed, signs are not
    assert excess[0][1] > 0 >= excess[1][1]
    assert "the same in TransformerLens: True" in lines


def test_sink_token_training() -> None:
    lines = lines_of("sink_token_training.ipynb")
    losses = [[float(x) for x in line.split(":")[1].split()] for line in lines if "loss every 10 steps" in line]
    assert all(abs(a - b) < 0.1 for a, b in zip(*losses, strict=True))  # the token makes no difference yet
    shares = [
        float(x) for line in lines if line.startswith("  layer") for x in re.findall(r"head \d ([\d.]+)", line)
    ]
    assert max(shares[:16]) < 0.1
    assert shares[16:24] == [1, 1, 0, 0, 0, 1, 0, 1]
    assert max(shares[24:]) < 0.1
    trained = lines[lines.index("toy-sink, 10,000 steps") :]
    whole, hidden, *controls = (
        estimate_in(line, label)
        for line in trained
        for label in ("no hook", "hidden", "seed 0", "seed 1")
        if label in line
    )
    assert hidden[2] < min(control[1] for control in controls)
    assert whole[0] == 1


def test_smollm2() -> None:
    lines = lines_of("smollm2.ipynb")
    assert any(line.endswith("The capital of France is Paris.") for line in lines)
    null = [lines[place + 1] for place, line in enumerate(lines) if line.startswith("uniform attention,")]
    assert [estimate_in(line, "with a sink")[0] for line in null] == [1, 0]
    ratio = next([float(x) for x in line.split()[1:4]] for line in lines if line.startswith("ratio"))
    assert ratio[2] < 0.5  # short values
    shares = [
        (estimate_in(line, "share of attention"), float(line.split()[-1])) for line in lines if "; uniform" in line
    ]
    (causal, _), (without, even) = shares
    assert causal[1] > 0.5
    assert without[2] < even  # less than uniform
    strongest = [float(line.split("receives ")[1].split()[0]) for line in lines if "strongest key receives" in line]
    assert strongest[1] < strongest[0] / 2
