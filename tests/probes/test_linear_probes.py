"""Linear probes of given labels, against numpy on all states, plain loops, and planted labels."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlm_lens.attention import Hook, PointContext
from dlm_lens.hooks import at_layers, capture
from dlm_lens.probes import linear_probe
from dlm_lens.probes.clock.fitting import RIDGES
from dlm_lens.probes.clock.states import POSITIONS, kinds_of
from dlm_lens.probes.linear_probes import of_other_prompts, permuted
from dlm_lens.sampling import DenoisingRun, denoise, part_of_run
from dlm_lens.testing import tiny

PROMPTS = [f"w{i} w{i + 7} w{(3 * i) % 40}" for i in range(2, 26)]
SETTINGS: dict[str, Any] = {"steps": 4, "gen_length": 8, "seed": 3, "temperature": 1.0}
ROWS = torch.tensor([0, 2, 1, -1, 0, 2, 1, 1, 2, 0, 1, 0] * 2)


class Planted(Hook):
    """Write the vector of each row's label over the stream."""

    site = "resid"
    remembers = False

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """A vector of one channel per label."""
        return 50 * torch.eye(tensor.shape[-1]).to(tensor)[self.labels + 1][:, None].expand_as(tensor)


@pytest.fixture(scope="module")
def run() -> tuple[Any, DenoisingRun]:
    model = tiny("llada")
    return model, denoise(model, PROMPTS, **SETTINGS)


def test_planted_labels_of_rows_are_read(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    hooks = [at_layers(Planted(ROWS), 1)]
    found = linear_probe(model, done, ROWS, names=["a", "b", "c"], hooks=hooks, shuffles=9)
    assert found.accuracy(1).value == 1
    assert found.p_value(1) == 0.1
    assert found.accuracy(0).value < 1
    assert bool((found.wanted[:, 3] == -1).all())
    for label in range(3):
        assert int(found.weight[1, label].argmax()) == label + 1
    part = linear_probe(model, part_of_run(done, [2, 3], range(len(ROWS))), ROWS, hooks=hooks, shuffles=1)
    assert torch.equal(part.wanted[:], found.wanted[2:])
    assert part.by_step(1)["step"].tolist() == [2, 3]
    assert part.names == ("0", "1", "2")


def by_numpy(stream: np.ndarray, fitted: np.ndarray, counted: np.ndarray, labels: Tensor) -> list[np.ndarray]:
    """What ridge regression reads with each penalty: [step, batch, position], -1 where it is not counted."""
    x, y = stream[fitted], np.eye(3)[np.broadcast_to(labels.numpy(), fitted.shape)[fitted]]
    used, reads = x.std(0) > 1e-9, []
    for ridge in RIDGES:
        standard = (x - x.mean(0))[:, used] / x.std(0)[used]
        matrix = standard.T @ standard / len(x) + ridge * np.eye(int(used.sum()))
        weight = np.linalg.solve(matrix, standard.T @ (y - y.mean(0)) / len(x))
        values = ((stream - x.mean(0))[..., used] / x.std(0)[used]) @ weight + y.mean(0)
        reads.append(np.where(counted, values.argmax(-1), -1))
    return reads


def test_a_probe_is_ridge_regression_and_its_nulls_are_counts(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    labels = (done.tokens % 3).masked_fill(done.tokens % 5 == 0, -1)
    found = linear_probe(model, done, labels, positions="written", layers=[1], shuffles=3, seed=4)
    states = capture(model, done, "resid", layers=[1])
    kinds = torch.stack([kinds_of(done, step) for step in range(done.steps)])
    where = (kinds == POSITIONS.index("written")) & done.attention_mask & (labels >= 0)
    held_out, every = found.held_out[:, None], labels.expand_as(where)
    assert torch.equal(found.wanted, every.masked_fill(~(where & held_out), -1))
    stream = torch.stack([states["resid", 1, step] for step in range(done.steps)]).double().numpy()
    fitted, counted = (where & ~held_out).numpy(), (where & held_out).numpy()
    reads = by_numpy(stream, fitted, counted, labels)
    # Which of the penalties was chosen is tested with the regression itself.
    assert any((found.read[0].numpy() == one).all() for one in reads)
    generator = torch.Generator().manual_seed(4)
    for draw in found.draws[:, 0].tolist():
        other = permuted(labels, generator)
        assert not torch.equal(other, labels)
        scores = [(one == other.numpy())[counted].mean() for one in by_numpy(stream, fitted, counted, other)]
        assert any(score == pytest.approx(draw) for score in scores)
    right = total = by_place = by_token = 0
    for step, row, position in (found.wanted >= 0).nonzero().tolist():
        others = [
            int(labels[r, position]) for r in (~found.held_out).nonzero().flatten() if labels[r, position] >= 0
        ]
        alike = [
            int(labels[r, p])
            for s, r, p in torch.from_numpy(fitted).nonzero().tolist()
            if done.canvases[s, r, p] == done.canvases[step, row, position]
        ]
        place, token = int(found.place[step, row, position]), int(found.token[step, row, position])
        assert others.count(place) == max(map(others.count, others)) if others else place == -1
        assert not alike or alike.count(token) == max(map(alike.count, alike))
        wanted = int(found.wanted[step, row, position])
        total, by_place, by_token = total + 1, by_place + (place == wanted), by_token + (token == wanted)
        right += int(found.read[0, step, row, position]) == wanted
    for name, count in (("probe", right), ("place", by_place), ("token", by_token)):
        assert found.accuracy(1, name).value == pytest.approx(count / total)
    assert found.gain(1, "place").value == pytest.approx((right - by_place) / total)
    assert found.accuracy(1, "shuffled").value == pytest.approx(float(found.draws[:, 0].mean()))
    above = sum(draw >= right / total - 1e-9 for draw in found.draws[:, 0].tolist())
    assert found.p_value(1) == (1 + above) / 4
    line = found.table().iloc[0]
    assert (line["probe"], line["over_token"]) == pytest.approx((right / total, (right - by_token) / total))


def test_labels_without_a_meaning_are_not_read(run: tuple[Any, DenoisingRun]) -> None:
    model, _ = run
    prompts = [f"w{i} w{(i * 7) % 40} w{(3 * i) % 40}" for i in range(2, 38)]
    done = denoise(model, prompts, **SETTINGS)
    chances = []
    for seed in range(12):
        labels = torch.randint(2, (len(prompts),), generator=torch.Generator().manual_seed(seed))
        chances.append(linear_probe(model, done, labels, layers=[1], shuffles=9, seed=seed).p_value(1))
    # Uniform on 0.1, ..., 1: 12 values have a mean of 0.55 with a standard deviation of 0.083.
    assert 0.3 < np.mean(chances) < 0.8
    every = linear_probe(model, done, labels, shuffles=9)
    best = max(every.accuracy(layer).value for layer in every.layers)
    assert every.p_value() == (1 + sum(max(draw) >= best - 1e-9 for draw in every.draws.tolist())) / 10
    assert every.p_value() >= min(every.p_value(layer) for layer in every.layers)


def test_rows_of_one_prompt_get_the_labels_of_one_other() -> None:
    model = tiny("llada")
    done = denoise(model, [prompt for prompt in PROMPTS[:5] for _ in range(3)], steps=2, gen_length=4)
    labels = torch.arange(15)
    labels[4] = -1
    seen = set()
    for seed in range(20):
        found = of_other_prompts(labels, done, torch.Generator().manual_seed(seed))
        assert int(found[4]) == -1
        given = [{int(one) // 3 for one in found[3 * i : 3 * i + 3] if one >= 0} for i in range(5)]
        assert sorted(next(iter(one)) for one in given) == list(range(5))
        assert all(len(one) == 1 for one in given)
        seen.add(tuple(found.tolist()))
    assert len(seen) > 10


def test_what_cannot_be_read_is_refused(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    for labels, said in (
        ([0, 1], r"labels is \[0, 1\]; it must be whole numbers or truth values of rows, of shape \[24\], or"),
        (ROWS.float(), r"labels is torch.float32 of shape \[24\]"),
        (["a"] * 24, r"labels is \['a'.*; it must be whole"),
        ([1] * 24, r"labels has the values \[1\]; it must have at least two classes"),
        ([0, 1, -2] * 8, r"labels has the values \[-2, 0, 1\]"),
    ):
        with pytest.raises(ValueError, match=said):
            linear_probe(model, done, labels)
    first = torch.full_like(done.tokens, -1)
    first[:, 0] = ROWS
    with pytest.raises(ValueError, match=r"no fitted prompt has a label at the positions 'open'; .* at 'prompt'$"):
        linear_probe(model, done, first)
    written = denoise(tiny("causal"), PROMPTS, gen_length=4)
    with pytest.raises(ValueError, match=r"the positions 'open'; there are some at 'written', 'prompt'$"):
        linear_probe(tiny("causal"), written, ROWS)
    with pytest.raises(ValueError, match=r"names is \['a'\]; it must be a list of names of the classes 0 to 2"):
        linear_probe(model, done, ROWS, names=["a"])
    with pytest.raises(ValueError, match=r"3 classes and 5000 shuffles are 15003 targets; give fewer"):
        linear_probe(model, done, ROWS, shuffles=5000)
    with pytest.raises(ValueError, match=r"positions is 'masked'; it must be .*open"):
        linear_probe(model, done, ROWS, positions="masked")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"of is 'word'; it must be probe, shuffled, place, token"):
        linear_probe(model, done, ROWS, layers=[0], shuffles=1).accuracy(0, "word")
