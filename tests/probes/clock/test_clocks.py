"""The clock against numpy on all states, planted clocks whose R^2 is known, and its nulls."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook, PointContext, SinkLayout, run_of
from dlm_lens.hooks import capture
from dlm_lens.probes import (
    class_readability,
    denoising_clock,
    read_clock,
    untrained_twin,
)
from dlm_lens.probes.clock.fitting import RIDGES, permuted, prompts_of_rows
from dlm_lens.probes.clock.states import POSITIONS, kinds_of, quantities_of
from dlm_lens.probes.normal_equations import NormalEquations, best_ridges
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.statistics import R2_BOUNDS, estimate
from dlm_lens.testing import tiny

PROMPTS = [[5 + i, 9, 14 + 2 * i, 3 + i, 20][i % 2 :] for i in range(8)]
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"steps": 5, "gen_length": 10, "cfg_scale": 0.5}),
    "shift": ("dream", {"steps": 5, "gen_length": 8}),
    "blocks": ("sdar", {"gen_length": 8, "block_length": 4, "steps": 8}),
    "sinks": ("sink_qwen", {"gen_length": 8, "block_length": 4, "steps": 4}),
    "causal": ("causal", {"gen_length": 5}),
}


def by_numpy(x: Any, y: Any, ridge: float) -> tuple[Any, float]:
    """Ridge regression of standardised features, by least squares on all rows and rows of the penalty."""
    mean, scale = x.mean(0), x.std(0)
    used = scale > 1e-9
    z = (x[:, used] - mean[used]) / scale[used]
    penalty = np.sqrt(ridge * len(x)) * np.eye(used.sum())
    found = np.linalg.lstsq(np.vstack([z, penalty]), np.r_[y - y.mean(), np.zeros(used.sum())], rcond=None)[0]
    weight = np.zeros(x.shape[1])
    weight[used] = found / scale[used]
    return weight, float(y.mean() - weight @ mean)


def test_sums_give_the_regression_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 6)) @ rng.normal(size=(6, 6)) + 50 * rng.normal(size=6)
    x[:, 2] = 3.7  # a constant feature, as the embedding of [MASK]
    y = rng.normal(size=(60, 2)) + x[:, :1]
    sums = NormalEquations(6, 2)
    for part in np.array_split(np.arange(60), 7):
        sums.add(torch.from_numpy(x[part]), torch.from_numpy(y[part]))
    for ridge in (1e-6, 0.1, 10.0):
        weight, bias = sums.solve(ridge)
        for target in range(2):
            wanted = by_numpy(x, y[:, target], ridge)
            np.testing.assert_allclose(weight[target].numpy(), wanted[0], rtol=1e-7, atol=1e-10)
            assert float(bias[target]) == pytest.approx(wanted[1], rel=1e-7)
        errors = ((x @ weight.numpy().T + bias.numpy() - y) ** 2).sum(0)
        np.testing.assert_allclose(sums.error(weight, bias).numpy(), errors, rtol=1e-7)
    slopes = [[np.cov(x[:, i], y[:, j], ddof=0)[0, 1] / y[:, j].var() for i in range(6)] for j in range(2)]
    np.testing.assert_allclose(sums.slope().numpy(), slopes, atol=1e-9)
    draws = sums.draws(40_000, torch.Generator().manual_seed(0)).numpy()
    np.testing.assert_allclose(np.cov(draws.T), np.cov(x.T, ddof=0), atol=0.03 * x.var(0).max())


def test_the_penalty_is_chosen_by_the_error_on_the_other_half() -> None:
    rng = np.random.default_rng(1)
    x, noise = rng.normal(size=(2, 40, 12)), rng.normal(size=(2, 40, 1))
    for strength in (0.0, 3.0):
        y = strength * x[..., :1] + noise
        halves = NormalEquations(12, 1), NormalEquations(12, 1)
        for half, a, b in zip(halves, x, y, strict=True):
            half.add(torch.from_numpy(a), torch.from_numpy(b))
        ridges = (1e-3, 1e-1, 10.0, 1000.0)
        errors = []
        for ridge in ridges:
            one, two = (by_numpy(x[i], y[i, :, 0], ridge) for i in range(2))
            errors.append(
                ((x[1] @ one[0] + one[1] - y[1, :, 0]) ** 2).sum()
                + ((x[0] @ two[0] + two[1] - y[0, :, 0]) ** 2).sum()
            )
        assert best_ridges(halves, ridges) == [ridges[int(np.argmin(errors))]] == [1000.0 if not strength else 1e-1]
    # A penalty for each group of targets.
    halves = NormalEquations(12, 4), NormalEquations(12, 4)
    for half, a, b in zip(halves, x, noise, strict=True):
        half.add(
            torch.from_numpy(a), torch.from_numpy(np.concatenate([b, -b, b + 3 * a[:, :1], b + 3 * a[:, :1]], 1))
        )
    assert best_ridges(halves, ridges, 2) == [1000.0, 1e-1]
    assert best_ridges(halves, ridges) == [1000.0, 1000.0, 1e-1, 1e-1]


def ended_after(run: dl.DenoisingRun, row: int) -> int:
    """The number of steps after which the row changes no more, if its text ended or SDAR filled it; else all."""
    answer = run.tokens[row][run.masked[0, row] & ~run.masked[-1, row]].tolist()
    full = run.settings["sampler"] == "sdar" and not bool(run.masked[-1, row].any())
    if not full and (not bool(run.masked[-1, row].any()) or not set(answer) & set(run.eos_token_ids)):
        return run.steps
    changed = [step for step in range(run.steps) if bool(run.unmasked[step, row].any())]
    return changed[-1] + 1


def all_states(model: Any, run: DenoisingRun, name: str, layer: int) -> tuple[Any, Any, Any]:
    """The states of a class of positions at a layer, their times and rows, from captured activations."""
    kept = capture(model, run, "resid", layers=[layer])
    stored, layout = StoredRun(model, run), SinkLayout.of(model)
    states, times, rows = [], [], []
    for step in range(run.steps):
        there = run.attention_mask & stored.computes(step) & (kinds_of(run, step) == POSITIONS.index(name))
        tensor = kept["resid", layer, step]
        tensor = tensor[: len(run.tokens), layout.canvas(tensor.shape[1])]
        for row, position in there.nonzero().tolist():
            if step >= ended_after(run, row):
                continue
            states.append(tensor[row, position].double().numpy())
            times.append(step / ended_after(run, row))
            rows.append(row)
    return np.array(states), np.array(times), np.array(rows)


@pytest.mark.parametrize("name", RUNS)
def test_the_clock_is_that_of_all_states(name: str) -> None:
    family, settings = RUNS[name]
    model = tiny(family)
    run = dl.denoise(model, PROMPTS, seed=list(range(8)), **settings)
    clock = denoising_clock(model, run, ridge=0.05, bins=4, seed=3)
    assert clock.prompts == len(clock.reading.steps) == 4
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    test = sorted(order[:4].tolist())  # the rows that the seed holds out
    kinds = [kind for kind in POSITIONS if clock.reading.count[POSITIONS.index(kind)].any()]
    assert kinds == (["written", "prompt"] if name == "causal" else list(POSITIONS))
    for kind in kinds:
        x, y, rows = all_states(model, run, kind, 1)
        counts = clock.reading.count[POSITIONS.index(kind)].sum(0)
        assert counts.tolist() == [int((rows == row).sum()) for row in test]
        scored = np.isin(rows, test)
        weight, bias = by_numpy(x[~scored], y[~scored], 0.05)
        place = clock.layers.index(1)
        np.testing.assert_allclose(clock.weight[POSITIONS.index(kind), place].numpy(), weight, rtol=1e-4, atol=1e-6)
        error = x[scored] @ weight + bias - y[scored]
        wanted = 1 - (error**2).sum() / ((y[scored] - y[scored].mean()) ** 2).sum()
        found = clock.reading.r2(kind, 1)
        assert found.value == pytest.approx(wanted, abs=1e-5)
        assert found.low <= found.value <= found.high
        away = (y[scored] - y[scored].mean()) ** 2
        spread = [away[rows[scored] == row].sum() for row in test]
        np.testing.assert_allclose(clock.reading.spread(kind).numpy(), spread, atol=1e-12)
        steps = np.array([ended_after(run, int(row)) for row in rows[scored]])
        assert clock.reading.mae(kind, 1).value == pytest.approx((np.abs(error) * steps).mean(), abs=1e-5)
        bins = np.floor(y[~scored] * 4 + 1e-9)
        for number in set(bins.astype(int).tolist()):
            mean = clock.curve[POSITIONS.index(kind), place, number].numpy()
            np.testing.assert_allclose(mean, x[~scored][bins == number].mean(0), rtol=1e-4, atol=1e-5)
        transfer = clock.reading.transfer(kind).set_index(["probe", "layer"])
        assert transfer.r2[1, 1] == pytest.approx(wanted, abs=1e-5)
        if (name, kind) == ("causal", "prompt"):  # its states do not change
            assert np.isnan(transfer.correlation[0, 1])
            continue
        wanted = np.corrcoef(x[scored] @ clock.weight[POSITIONS.index(kind), 1].numpy(), y[scored])[0, 1]
        assert transfer.correlation[0, 1] == pytest.approx(wanted, abs=1e-4)


def test_the_nulls_are_probes_of_permuted_labels() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=5, gen_length=10)
    clock = denoising_clock(model, run, ridge=0.05, shuffles=2, seed=3)
    x, y, rows = all_states(model, run, "open", 1)
    steps = (y * 5).round().astype(int)
    scored = np.isin(rows, torch.randperm(8, generator=torch.Generator().manual_seed(3))[:4].numpy())
    label = torch.arange(5, dtype=torch.float64)[:, None].expand(5, 8) / 5
    found = []
    for fitted, other in zip(permuted(label, 2, 3), permuted(label, 2, 3 + 7919), strict=True):
        assert fitted.sort(0).values.equal(label)
        assert other.sort(0).values.equal(label)
        weight, bias = by_numpy(x[~scored], fitted.numpy()[steps, rows][~scored], 0.05)
        z = other.numpy()[steps, rows][scored]
        found.append(1 - ((x[scored] @ weight + bias - z) ** 2).sum() / ((z - z.mean()) ** 2).sum())
    assert clock.reading.null("open", 1) == pytest.approx(found, abs=1e-5)
    line = clock.table().set_index(["positions", "layer"]).loc[("open", 1)]
    assert line["null"] == pytest.approx(max(found), abs=1e-5)
    assert line["r2"] == clock.reading.r2("open", 1).value
    assert line["steps_off"] == clock.reading.mae("open", 1).value


def test_what_a_reading_follows_is_the_nearest_line_of_the_training_labels() -> None:
    model = tiny("llada")
    runs = [dl.denoise(model, PROMPTS, steps=5, gen_length=length) for length in (10, 15)]
    clock = denoising_clock(model, runs[0], shuffles=0, seed=3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    assert sorted(order[4:].tolist()) == sorted(set(range(8)) - set(order[:4].tolist()))
    found = read_clock(model, runs[1], clock)
    x, y, rows = all_states(model, runs[1], "open", 1)
    p = x @ clock.weight[0, 2].numpy() + float(clock.bias[0, 2])
    steps = (y * 5).round().astype(int)
    opened = np.array([10, 8, 6, 4, 2])  # of ten in five steps, whose labels are 0, 0.2, ..., 0.8
    lines = {"open positions": np.polyfit(opened, np.arange(5) / 5, 1), "time": (1.0, 0.0)}
    off = found.follows("open", 1).set_index("quantity").off
    for quantity, q in (("open positions", np.array([15, 12, 9, 6, 3])), ("time", np.arange(5) / 5)):
        slope, start = lines[quantity]
        errors = [
            p[(steps == step) & (rows == row)].mean() - start - slope * q[step]
            for step in range(5)
            for row in range(8)
        ]
        assert off[quantity] == pytest.approx(np.sqrt(np.mean(np.square(errors))), abs=1e-5)
    binned = found.by_label("open", 1, bins=2)
    early = y < 0.5
    assert binned.positions.tolist() == [early.sum(), (~early).sum()]
    assert binned.label.tolist() == pytest.approx([y[early].mean(), y[~early].mean()])
    with pytest.raises(ValueError, match="by_label: bins is 0; it must be a whole number of at least 1"):
        found.by_label("open", 1, bins=0)
    assert binned.read.tolist() == pytest.approx([p[early].mean(), p[~early].mean()], abs=1e-5)


@dataclass(frozen=True)
class PlantedClock(Hook):
    """Replaces the output of a layer by gain * q * v + noise, q a quantity of the canvas and |v| = 1."""

    gain: float
    quantity: str = "time"
    seed: int = 0
    site = "resid"
    layers = (0,)

    def direction(self, width: int) -> Tensor:
        found = torch.randn(width, generator=torch.Generator().manual_seed(9))
        return found / found.norm()

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        run = run_of(hook, self)
        q = {
            "time": torch.full((len(tensor),), run.step / run.total),
            "step": torch.full((len(tensor),), float(run.step)),
            "open positions": run.open.sum(-1).float(),
        }[self.quantity]
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1000 * self.seed + run.step))
        return noise + self.gain * q[:, None, None] * self.direction(tensor.shape[-1])


MANY = [[3 + i % 50, 7 + (i * 5) % 40, 30] for i in range(48)]


def test_a_planted_clock_is_found_with_its_own_r2() -> None:
    model = tiny("llada")
    run = dl.denoise(model, MANY, steps=8, gen_length=16)
    planted = PlantedClock(3.0)
    clock = denoising_clock(model, run, hooks=[planted], shuffles=6)
    for number, kind in enumerate(POSITIONS):
        # x = gain t v + noise of variance 1: the best predictor has R^2 = g^2 V / (g^2 V + 1), V the variance of t.
        n, y, yy = clock.reading.label_sums(number).sum(0).tolist()
        signal = 9.0 * (yy / n - (y / n) ** 2)
        best, cases = signal / (signal + 1), float(clock.curve_counts[number].sum())
        # Fitting 32 weights to n cases costs about 32 / n of the remaining variance; 0.03 for chance.
        cost = 1.5 * (1 - best) * 32 / cases
        assert clock.reading.r2(kind, 0).value == pytest.approx(best, abs=0.03 + cost)
        assert cost < 0.06
        assert 0.2 < best < 0.8
        direction = planted.direction(32).double()
        slope = clock.slope[number, 1]
        assert float(slope @ direction) == pytest.approx(3.0, rel=0.1)
        assert float(slope @ direction / slope.norm()) > 0.95
        assert float(clock.weight[number, 1] @ direction / clock.weight[number, 1].norm()) > 0.9
        # Permuted labels, and the embeddings of [MASK] and of the prompt, say nothing.
        assert max(clock.reading.null(kind, 0)) < 0.05
        if kind != "written":
            assert abs(clock.reading.r2(kind, -1).value) < 0.01
        assert clock.reading.beyond(kind, 0, "token").value > 0.05
    geometry = clock.geometry("open").set_index("layer")
    # One direction and noise; the embedding of [MASK] does not move at all.
    assert geometry["first"][0] > 0.7
    assert np.isnan(geometry["dimension"][-1])
    assert geometry["ninety"][-1] == 0
    curve = clock.curve[0, 1].numpy()[clock.curve_counts[0].numpy() > 0]
    power = np.linalg.eigvalsh(np.cov(curve.T))[::-1]
    assert geometry["first"][0] == pytest.approx(power[0] / power.sum())
    assert geometry["dimension"][0] == pytest.approx(power.sum() ** 2 / (power**2).sum())
    assert geometry["ninety"][0] == int((np.cumsum(power) / power.sum() < 0.9).sum()) + 1
    assert geometry["dimension"][0] < 2
    assert clock.cosines("open").loc[0, 0] == pytest.approx(1.0)


@pytest.mark.long
@pytest.mark.parametrize("quantity", ["time", "step", "open positions"])
def test_a_reading_says_which_quantity_it_follows(quantity: str) -> None:
    model = tiny("llada")
    planted = PlantedClock(4.0 if quantity != "time" else 32.0, quantity)
    clock = denoising_clock(model, dl.denoise(model, MANY[:16], steps=8, gen_length=8), hooks=[planted])
    longer = dl.denoise(model, MANY[16:24], steps=8, gen_length=16)
    faster = dl.denoise(model, MANY[16:24], steps=4, gen_length=8)
    for run in (longer, faster):
        found = read_clock(model, run, clock, hooks=[planted]).follows("prompt", 0).set_index("quantity").off
        same = ["time", "progress"] if quantity == "time" else [quantity]
        if quantity == "open positions" and run is faster:
            same += ["time", "progress", "written positions", "open share of the canvas"]  # all the same there
        if quantity == "step" and run is longer:
            same += ["time", "progress"]
        if quantity == "time" and run is longer:
            same += ["step"]
        if quantity == "time" and run is faster:
            same += ["open positions", "written positions", "open share of the canvas"]
        assert found[same].max() < 0.1 < found.drop([*same, "open share of the canvas"], errors="ignore").min()


def test_a_causal_prompt_knows_no_time() -> None:
    model = tiny("causal")
    clock = denoising_clock(model, dl.denoise(model, MANY[:12], gen_length=6))
    for layer in (0, 1):
        # Its states are the same at every step, so that the probe can only say the mean.
        assert abs(clock.reading.r2("prompt", layer).value) < 0.02
        assert clock.reading.baseline_r2("written", "position").value > 0.05
        assert clock.reading.beyond("written", layer, "position").value < 0.02
    assert not clock.reading.count[0].any()
    with pytest.raises(ValueError, match="the run has no open positions"):
        clock.best_layer("open")


def test_a_class_whose_label_is_the_same_everywhere_is_left_out_of_the_repr() -> None:
    model = tiny("llada")
    clock = denoising_clock(model, dl.denoise(model, MANY[:3], steps=2, gen_length=4), shuffles=1)
    with pytest.raises(ValueError, match="its label is the same everywhere"):
        clock.best_layer("written")  # on the canvas of the second step alone
    shown = repr(clock)
    assert [name for name in ("open", "prompt", "written") if f"{name} R^2" in shown] == ["open", "prompt"]


def test_a_recording_stands_for_its_run() -> None:
    model = tiny("llada")
    recordings = [
        dl.record(model, part, [dl.ReceivedAttention()], steps=4, gen_length=8) for part in (MANY[:4], MANY[4:8])
    ]
    found = denoising_clock(model, recordings)
    own = denoising_clock(model, [one.run for one in recordings])
    # The same numbers, but for the order of BLAS's sums, which depends on where tensors lie in memory.
    torch.testing.assert_close(found.weight, own.weight, rtol=1e-9, atol=1e-12)
    received = dl.received_of(dl.record(model, MANY[:2], [dl.ReceivedAttention()], steps=2, gen_length=8))
    with pytest.raises(TypeError, match="the run is a Received; give the DenoisingRun that"):
        denoising_clock(model, received)  # type: ignore[arg-type]


def test_baselines_are_group_means_of_the_training_prompts() -> None:
    model = tiny("llada")
    run = dl.denoise(model, MANY[:10], steps=4, gen_length=8)
    clock = denoising_clock(model, run, positions=["written"], seed=1)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    test, train = order[:5].tolist(), order[5:].tolist()
    groups: dict[str, dict[int, list[float]]] = {"token": {}, "position": {}}
    everything = []
    for fitted in (True, False):
        errors: dict[str, list[float]] = {"token": [], "position": []}
        labels = []
        for step in range(4):
            for row in train if fitted else test:
                for position in range(3, 11):
                    if run.open[step, row, position]:
                        continue
                    keys = {"token": int(run.canvases[step, row, position]), "position": position}
                    for name, key in keys.items():
                        if fitted:
                            groups[name].setdefault(key, []).append(step / 4)
                        else:
                            known = groups[name].get(key, everything)
                            errors[name].append((float(np.mean(known)) - step / 4) ** 2)
                    (everything if fitted else labels).append(step / 4)
    for name, error in errors.items():
        wanted = 1 - sum(error) / (len(labels) * np.var(labels))
        assert clock.reading.baseline_r2("written", name).value == pytest.approx(wanted, abs=1e-9)
    # LLaDA decides as many positions at every step: the number of open positions is the time.
    assert clock.reading.baseline_r2("written", "open count").value == pytest.approx(1.0)


def test_rows_of_one_prompt_are_held_out_together() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [MANY[0]] * 3 + [MANY[1]] * 2, steps=3, gen_length=6, seed=[1, 2, 3, 4, 5])
    clock = denoising_clock(model, run)
    assert clock.prompts == len(clock.reading.prompt.unique()) == 1
    assert len(clock.reading.steps) in (2, 3)
    with pytest.raises(ValueError, match="denoising_clock: 1 different prompt; give runs of at least two"):
        denoising_clock(model, dl.denoise(model, [MANY[0]] * 3, steps=3, gen_length=6))


def test_intervals_are_over_prompts_and_not_over_the_seeds_of_one() -> None:
    model = tiny("llada")
    prompts = ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9", "w10 w11 w12"]
    runs = [
        dl.denoise(model, prompts, gen_length=8, steps=8, block_length=8, seed=seed, temperature=1.0)
        for seed in range(4)
    ]
    clock = denoising_clock(model, runs, shuffles=0)
    assert clock.prompts == 2
    assert "fitted to 2 prompts; held out: ClockReading(2 prompts" in repr(clock)
    reading = clock.reading
    assert reading.prompt.tolist() == [reading.prompt[0], reading.prompt[1]] * 4
    rows = torch.cat([reading.label_sums(0), reading.errors("open", 1)[:, None]], -1).numpy()
    by_prompt = np.stack([rows[0::2].sum(0), rows[1::2].sum(0)])

    def r2(sums: np.ndarray) -> np.ndarray:
        n, y, yy, error = np.moveaxis(sums, -1, 0)
        found: np.ndarray = 1 - error / (yy - y * y / n)
        return found

    wanted = estimate(by_prompt, r2, bounds=R2_BOUNDS, seed=reading.seed)
    found = reading.r2("open", 1)
    assert (found.value, found.low, found.high) == pytest.approx((wanted.value, wanted.low, wanted.high), abs=1e-12)
    assert found.prompts == reading.mae("open", 1).prompts == 2
    assert read_clock(model, runs, clock).r2("open", 1).prompts == 4


def test_one_training_prompt_has_the_largest_penalty_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llada")
    two, three = (dl.denoise(model, MANY[:count], steps=3, gen_length=6) for count in (2, 3))
    clock = denoising_clock(model, two)
    assert set(clock.ridge.flatten().tolist()) == {max(RIDGES)}
    assert "denoising_clock: there is one training prompt" in caplog.text
    assert "give more different prompts, a smaller held_out=, or ridge=" in caplog.text
    caplog.clear()
    denoising_clock(model, two, ridge=0.1)
    denoising_clock(model, three, held_out=0.3)
    assert "training prompt" not in caplog.text
    class_readability(model, two)
    assert "class_readability: there is one training prompt" in caplog.text


def test_batches_of_a_run_are_one_run() -> None:
    model = tiny("llada")
    settings: dict[str, Any] = {"steps": 4, "gen_length": 8}
    whole = dl.denoise(model, MANY[:8], **settings)
    parts = [dl.denoise(model, MANY[i : i + 4], **settings) for i in (0, 4)]
    one, two = (denoising_clock(model, runs, ridge=0.1, shuffles=0) for runs in (whole, parts))
    torch.testing.assert_close(one.weight, two.weight)
    assert one.table().drop(columns="null").round(5).equals(two.table().drop(columns="null").round(5))


def test_the_untrained_twin_has_the_same_entries_in_other_places() -> None:
    model = tiny("llada")
    before = {name: value.clone() for name, value in model.named_parameters()}
    twin = untrained_twin(model, seed=1)
    for name, value in twin.named_parameters():
        assert torch.equal(model.get_parameter(name), before[name])
        torch.testing.assert_close(value.flatten().sort().values, before[name].flatten().sort().values)
        assert value.ndim == 1 or not torch.equal(value, before[name])
    again = untrained_twin(model, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), again.parameters(), strict=True))
    run = dl.denoise(model, MANY[:8], steps=4, gen_length=8)
    assert denoising_clock(twin, run).prompts == 4


def test_a_row_of_llada2_has_the_labels_and_the_prompt_that_it_has_alone() -> None:
    """Another row's last block ends two positions later, so that the canvas has two masks after this one's."""
    model, settings = tiny("llada2"), {"gen_length": 8, "block_length": 4, "threshold": 0.3}
    prompts = [[3, 41, 7, 7, 19, 28, 55, 2, 33, 14, 9, 50], [9, 8, 7, 6, 5, 4, 3, 2, 1, 22]]
    together, alone = dl.denoise(model, prompts, **settings), dl.denoise(model, prompts[:1], **settings)
    own = together.confidence[:, 0].isfinite().any(-1)
    found, wanted = (quantities_of(run)[2:, :, 0] for run in (together, alone))
    assert found[:, own].equal(wanted)
    assert prompts_of_rows(together) == [tuple(prompt) for prompt in prompts]
