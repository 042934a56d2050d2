"""What linear probes read of the final token's class, against numpy on all states, and planted classes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlm_lens.attention import Hook, PointContext
from dlm_lens.hooks import at_layers
from dlm_lens.probes import ClassReadability, class_readability
from dlm_lens.probes.clock.fitting import RIDGES
from dlm_lens.sampling import DenoisingRun, denoise, part_of_run
from dlm_lens.sinks.token_classes import TOKEN_CLASSES, TokenClasses
from dlm_lens.testing import tiny

PROMPTS = [f"w{i} w{i + 7} w{(3 * i) % 40}" for i in range(2, 12)]
SETTINGS: dict[str, Any] = {"steps": 6, "gen_length": 12, "seed": 3, "temperature": 1.0}


class Planted(Hook):
    """Write a vector of each position's final class over the stream that leaves layer 1."""

    site = "resid"

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """The vectors in place of the stream."""
        return self.vectors[:, : tensor.shape[1]].to(tensor)


@pytest.fixture(scope="module")
def run() -> tuple[Any, DenoisingRun]:
    model = tiny("llada")
    return model, denoise(model, PROMPTS, **SETTINGS)


def names_of(run: DenoisingRun) -> np.ndarray:
    class_of = TokenClasses(run.tokenizer, None, run.eos_token_ids)
    return np.array([[class_of(token) for token in row] for row in run.tokens.tolist()])


def test_planted_classes_are_read(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    wanted = torch.tensor([[list(TOKEN_CLASSES).index(name) for name in row] for row in names_of(done)])
    assert len(wanted[:, done.prompt_length :].unique()) > 1
    vectors = 50 * torch.eye(model.config.hidden_size)[wanted]  # far above the model's own states
    found = class_readability(model, done, hooks=[at_layers(Planted(vectors), 1)])
    # Two classes are frequent enough in the fitted rows to be learned from them.
    frequent = torch.isin(wanted, torch.tensor([TOKEN_CLASSES.index(name) for name in ("words", "end of text")]))
    where = frequent & (found.read[1] >= 0)
    assert bool((found.read[1] == wanted)[where].all())
    assert bool((found.class_at(1) == 0)[frequent & (found.class_at(1) >= 0)].all())
    assert not bool((found.read[0] == wanted)[where].all())
    assert not bool((found.shuffled[1] == wanted)[where].all())


def test_the_probe_is_ridge_regression_on_all_open_states(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    found = class_readability(model, done, layers=[0])
    seen: list[Tensor] = []

    class Keep(Hook):
        site = "resid"

        def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
            seen.append(tensor.detach().double().clone())
            return tensor

    from dlm_lens.sampling import StoredRun

    stored = StoredRun(model, done, hooks=[at_layers(Keep(), 0)])
    with torch.no_grad():
        for step in range(done.steps):
            stored.states(step)
    wanted, (train, test, _) = found.wanted, (~found.held_out, found.held_out, None)
    x, y = [], []
    for step in range(done.steps):
        where = done.open[step] & (wanted >= 0) & train[:, None]
        x.append(seen[step][where].numpy())
        y.append(np.eye(len(TOKEN_CLASSES))[wanted[where].numpy()])
    states, labels = np.concatenate(x), np.concatenate(y)
    centre, scale, mean = states.mean(0), states.std(0), labels.mean(0)
    standard = (states - centre) / scale
    reads = set()
    for ridge in RIDGES:
        matrix = standard.T @ standard / len(standard) + ridge * np.eye(len(centre))
        weight = np.linalg.solve(matrix, standard.T @ (labels - mean) / len(standard))
        lines = []
        for step in range(done.steps):
            values = ((seen[step].numpy() - centre) / scale) @ weight + mean
            values[..., mean == 0] = -np.inf
            lines.append(np.where((done.open[step] & test[:, None]).numpy(), values.argmax(-1), -1))
        reads.add(np.stack(lines).tobytes())
    # Which of the penalties was chosen is tested with the regression itself.
    assert found.read[0].numpy().tobytes() in reads


def test_the_nulls_and_the_times(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    found = class_readability(model, done, seed=1)
    names, test = names_of(done), found.held_out.numpy()
    decided = done.open[0].numpy() & ~done.open[-1].numpy()
    for place in range(done.prompt_length, done.tokens.shape[1]):
        counts = [int(((names == name) & decided)[~test, place].sum()) for name in TOKEN_CLASSES]
        assert counts[int(found.place[0, place])] == max(counts)
    by_step = found.by_step(1).set_index("step")["class"]
    right = total = 0
    for step in range(done.steps):
        before = right, total
        for row in np.flatnonzero(test):
            for place in np.flatnonzero(done.open[step, row].numpy() & decided[row]):
                total += 1
                right += TOKEN_CLASSES[int(found.read[1, step, row, place])] == names[row, place]
        assert by_step[step] == pytest.approx((right - before[0]) / (total - before[1]))
    assert found.accuracy(1).value == pytest.approx(right / total)
    assert found.accuracy(1, step=-1).value == pytest.approx(by_step[done.steps - 1])
    with pytest.raises(ValueError, match=f"accuracy: step {done.steps} of {done.steps}"):
        found.accuracy(1, step=done.steps)
    token = (found.settled.token == done.tokens) & found.settled.predicted & found.held_out[:, None]
    assert found.accuracy(0, "token").value == pytest.approx(int(token.sum()) / total)
    gaps = []
    for row in np.flatnonzero(test):
        for place in np.flatnonzero(decided[row]):
            at, end = int(found.settled.decided_at[row, place]), int(found.settled.committed_at[row, place])
            first = at + 1
            while first > 0 and found.read[1, first - 1, row, place] == found.wanted[row, place]:
                first -= 1
            assert int(found.class_at(1)[row, place]) == first
            if end > 0:
                gaps.append(end - first)
    assert found.earlier(1).value == pytest.approx(np.mean(gaps))
    known = found.held_out[:, None] & (found.settled.committed_at > 0)
    by_place = torch.where(found.place == found.wanted, 0, found.settled.decided_at + 1)
    gaps = (found.settled.committed_at - by_place)[known].float()
    assert found.earlier(1, "place").value == pytest.approx(gaps.mean().item())


def test_what_cannot_be_read_is_refused(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    with pytest.raises(ValueError, match="class_readability: layer 9"):
        class_readability(model, done, layers=[9])
    with pytest.raises(ValueError, match="class_readability: 1 different prompt; give runs of at least two"):
        class_readability(model, denoise(model, PROMPTS[:1], **SETTINGS))
    found = class_readability(model, done, layers=[0])
    assert isinstance(found, ClassReadability)
    with pytest.raises(ValueError, match="layer 1 was not read; there are 0"):
        found.accuracy(1)
    with pytest.raises(ValueError, match="of is 'word'; it must be class, shuffled, place, token"):
        found.accuracy(0, "word")


def test_a_part_without_the_first_steps_has_the_classes_of_the_whole_run(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    whole = class_readability(model, done, layers=[0])
    part = class_readability(model, part_of_run(done, [4, 5], range(10)), layers=[0])
    assert bool((whole.wanted[:, done.prompt_length :] >= 0).all())
    assert torch.equal(part.wanted, whole.wanted)


def test_steps_that_a_part_leaves_out_count(run: tuple[Any, DenoisingRun]) -> None:
    model, done = run
    numbers = [0, 3, 5]
    found = class_readability(model, part_of_run(done, numbers, range(10)), layers=[1])
    gaps, settled = [], found.class_at(1)
    for row, place in ((settled >= 0) & (found.settled.committed_at > 0)).nonzero().tolist():
        at = int(found.settled.decided_at[row, place])
        ends = (int(each[row, place]) for each in (found.settled.committed_at, settled))
        token, own = (numbers[end] if end <= at else numbers[at] + 1 for end in ends)
        gaps.append(token - own)
    assert len({*gaps}) > 2
    assert found.earlier(1).value == pytest.approx(np.mean(gaps))


def test_rows_of_one_prompt_are_one_prompt_of_the_intervals() -> None:
    model = tiny("llada")
    settings = SETTINGS | {"temperature": 0.0}
    once, often = (class_readability(model, denoise(model, PROMPTS[:6] * n, **settings)) for n in (1, 8))
    assert int(often.held_out.sum()) == 8 * int(once.held_out.sum())
    for name in ("class", "token"):
        one, other = once.accuracy(1, name), often.accuracy(1, name)
        assert one.prompts == other.prompts == int(once.held_out.sum())
        assert (other.value, other.low, other.high) == pytest.approx((one.value, one.low, one.high))
    one, other = once.earlier(1, late=False), often.earlier(1, late=False)
    assert (other.low, other.high) == pytest.approx((one.low, one.high))
