"""When predictions settle, and how calibrated they are, against loops and planted predictions."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.probes import Commitment, commitment, proposed_commitment
from dlm_lens.sampling import StoredRun, denoise
from dlm_lens.sampling.run_parts import RunPart
from dlm_lens.testing import tiny
from dlm_lens.viz import commitment_map
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import find_plot, write_plot
from tests.probes.test_decisions import run_of
from tests.recording.reference import PROMPTS

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"steps": 6, "gen_length": 10, "temperature": 0.7}),
    "semi-autoregressive": ("llada", {"steps": 6, "gen_length": 12, "block_length": 4}),
    "shift": ("dream", {"steps": 5, "gen_length": 9}),
    "blocks": ("sdar", {"gen_length": 8, "block_length": 4, "steps": 8}),
    "causal": ("causal", {"gen_length": 5}),
}


def committed_by_loop(found: Commitment) -> list[list[int]]:
    """The first step from which every prediction is the final token, by walking back from the decision."""
    run = found.run
    wanted = []
    for row in range(len(run.tokens)):
        line = []
        for place in range(run.tokens.shape[1]):
            decided = int(run.step_of[row, place])
            seen = [
                (t, int(found.token[t, row, place])) for t in range(decided + 1) if found.token[t, row, place] >= 0
            ]
            first = decided + 1
            for step, token in reversed(seen):
                if token != int(run.tokens[row, place]):
                    break
                first = step
            line.append(first if seen and not run.masked[-1, row, place] else -1)
        wanted.append(line)
    return wanted


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_the_logits_that_the_run_saw(name: str) -> None:
    family, settings = RUNS[name]
    model = tiny(family)
    seen: list[Tensor] = []
    run = denoise(model, PROMPTS, seed=[3, 4], on_logits=lambda *given: seen.append(given[2].clone()), **settings)
    found, stored = commitment(model, run), StoredRun(model, run)
    mask = getattr(model.config, "mask_token_id", None)
    for step, row in itertools.product(range(run.steps), range(len(run.tokens))):
        predicted = stored.predicted(step)[row].nonzero().flatten().tolist()
        assert found.predicted[step, row].nonzero().flatten().tolist() == predicted
        for place in predicted:
            logits = (seen[step][row] if name == "causal" else seen[step][row, place]).double()
            if mask is not None:
                logits[mask] = -math.inf
            likely = logits.softmax(-1)
            assert int(found.token[step, row, place]) == int(likely.argmax())
            positive = likely[likely > 0]
            wanted = (likely.max(), -(positive * positive.log()).sum(), likely[run.tokens[row, place]])
            got = [float(getattr(found, one)[step, row, place]) for one in ("confidence", "entropy", "likely")]
            assert got == pytest.approx([float(value) for value in wanted], rel=1e-5)
    assert found.committed_at.tolist() == committed_by_loop(found)


def test_a_token_that_the_sampler_excludes_is_never_predicted() -> None:
    """GIDD's [MASK] has no probability, also where the noise is random tokens and no config names a mask."""
    model = tiny("gidd")
    model.get_output_embeddings().weight.data[3] *= -50  # the likeliest of most states, if it counted
    seen: list[Tensor] = []
    run = denoise(model, PROMPTS, gen_length=6, steps=6, on_logits=lambda *given: seen.append(given[2].clone()))
    found, lens = commitment(model, run), dl.logit_lens(model, run, layers=[-1])
    stored = StoredRun(model, run)
    assert bool((stored.logits(stored.states(2)).argmax(-1) == 3).any())
    for step, row, place in found.predicted.nonzero().tolist():
        logits = seen[step][row, place].double()
        allowed = logits.index_fill(0, torch.tensor(3), -math.inf)
        assert int(found.token[step, row, place]) == int(allowed.argmax())
        entry = (lens.step == step) & (lens.batch == row) & (lens.predicts == place)
        assert int(lens.rank[entry, 0]) == int((allowed > logits[run.tokens[row, place]]).sum())


def planted(predictions: list[list[int]], steps: list[int], final: list[int]) -> Commitment:
    """Predictions [step][position] of a run that decides position i at steps[i]."""
    run = run_of(steps)
    run = replace(run, canvases=torch.where(run.masked, 99, torch.tensor(final)))
    token = torch.tensor(predictions)[:, None]
    values = torch.where(token >= 0, 0.5, math.nan)
    return Commitment(run, token, values, values, values, run.tokens)


def test_commitments_that_are_known() -> None:
    # Position 0 wavers 7, 5, 7, 7; position 1 knows its token from the start; position 2 is drawn against the odds.
    found = planted([[7, 8, 1], [5, 8, 1], [7, 8, 2], [7, -1, -1]], steps=[3, 2, 2], final=[7, 8, 9])
    assert found.committed_at.tolist() == [[2, 0, 3]]
    assert found.lead.tolist() == [[1, 2, -1]]
    assert found.flips.tolist() == [[2, 0, 1]]
    assert found.mean_lead.value == pytest.approx(2 / 3)
    # The token with id 0 is a token, and what the first step decides is known as it is decided.
    found = planted([[0, 4], [5, -1], [0, -1]], steps=[2, 0], final=[0, 4])
    assert found.flips.tolist() == [[2, 0]]
    assert found.lead.tolist() == [[0, 0]]


def test_the_lead_in_a_part_counts_the_steps_of_the_run() -> None:
    found = planted([[7, 8, 1], [5, 8, 1], [7, 8, 2], [7, -1, -1]], steps=[3, 2, 2], final=[7, 8, 9])
    place = RunPart((0, 3, 4, 9), (0, 3, 4, 9), found.run.answer)
    assert replace(found, run=replace(found.run, part=place)).lead.tolist() == [[5, 4, -1]]


@pytest.mark.parametrize("name", ["causal", "dream", "diffugpt", "llada2"])
def test_calibration_without_confidences_has_accuracies_alone(name: str) -> None:
    run = denoise(tiny(name), [[5, 6, 7], [8, 9, 10, 11]], gen_length=4, temperature=0.0)
    found = proposed_commitment(run)
    table = found.calibration()
    assert table["predictions"].tolist() == found.predicted.sum((1, 2)).tolist()
    for step, line in table[table["predictions"] > 0].iterrows():
        where = found.predicted[step]
        right = (found.token[step] == run.tokens)[where].double().mean()
        assert line["accuracy"] == pytest.approx(float(right))
        assert line[["confidence", "ece", "brier", "entropy"]].isna().all()
    (accuracy,) = commitment_map(found).axes[1].get_lines()
    assert accuracy.get_gid() == "accuracy"


def test_calibration_is_that_of_a_loop_over_bins() -> None:
    model = tiny("llada")
    run = denoise(model, PROMPTS, seed=[3, 4], steps=4, gen_length=10, temperature=1.0)
    found = commitment(model, run)
    table = found.calibration(bins=5)
    for step, line in enumerate(table.itertuples()):
        entries = [
            (
                float(found.confidence[step, row, place]),
                float(found.token[step, row, place] == run.tokens[row, place]),
            )
            for row, place in found.predicted[step].nonzero().tolist()
        ]
        ece = 0.0
        for number in range(5):
            inside = [(c, y) for c, y in entries if number / 5 <= c < (number + 1) / 5 or (number == 4 and c == 1)]
            if inside:
                ece += abs(sum(y - c for c, y in inside)) / len(entries)
        assert line.predictions == len(entries)
        assert line.ece == pytest.approx(ece)
        assert line.brier == pytest.approx(sum((c - y) ** 2 for c, y in entries) / len(entries))
        assert line.accuracy == pytest.approx(sum(y for _, y in entries) / len(entries))
    # Of the right tokens elsewhere nothing is known.
    blind = commitment(model, run, reference=torch.full_like(run.tokens, -1))
    assert blind.calibration()["predictions"].sum() == 0


@pytest.mark.long
def test_the_answers_of_a_trained_model_are_known_from_the_start() -> None:
    model = dl.load("toy")
    prompts = [
        "tom has 5 apples . tom buys 4 more . how many apples ? :",
        "mia has 9 eggs . mia buys 2 more . how many eggs ? :",
    ]
    found = commitment(model, dl.denoise(model, prompts, steps=16, gen_length=16))
    assert found.mean_lead.value > 5
    table = found.by_class().set_index("class")
    assert table["positions"].sum() == 32
    assert (table["lead_low"] <= table["lead"]).all()


def test_a_reference_of_another_shape_is_refused() -> None:
    model = tiny("llada")
    run = denoise(model, PROMPTS, steps=2, gen_length=4)
    with pytest.raises(ValueError, match=r"reference has shape \[1, 3\], and the run's canvas"):
        commitment(model, run, reference=torch.zeros(1, 3))
    for bins in (0, 2.5, "a"):
        with pytest.raises(ValueError, match=f"bins is {bins!r}; it must be a whole number of at least 1"):
            commitment(model, run).calibration(bins=bins)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llada", "shift", "blocks"])
@pytest.mark.parametrize("where", ["needed", "all"])
def test_a_run_alone_says_what_its_model_predicted(name: str, where: Any) -> None:
    family, settings = RUNS[name]
    model = tiny(family)
    seen: list[Tensor] = []
    settings = settings | ({"remasking": "entropy"} if name == "shift" else {})
    settings = {**settings, "temperature": 0.0, "on_logits": lambda *given: seen.append(given[2].clone())}
    run = denoise(model, PROMPTS, logits=where, **settings)
    alone, read = proposed_commitment(run), commitment(model, run)
    assert bool(alone.predicted.any())
    assert not bool((alone.predicted & ~read.predicted).any())
    assert alone.token[alone.predicted].equal(read.token[alone.predicted])
    if where == "all":
        assert alone.predicted.equal(read.predicted)
        assert alone.committed_at.equal(read.committed_at)
        assert alone.lead.nan_to_num(-9).equal(read.lead.nan_to_num(-9))
    assert committed_by_loop(alone) == alone.committed_at.tolist()
    known = alone.confidence.isfinite()
    assert bool(known.any()) == (name == "llada")
    for step, logits in enumerate(seen if name == "llada" else ()):
        likely = logits.double().softmax(-1).gather(-1, alone.token[step].clamp(min=0)[..., None])[..., 0]
        here = known[step]
        # The run's softmax is in the model's float32, and [MASK] has a share of it.
        torch.testing.assert_close(alone.confidence[step][here].double(), likely[here], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "sampler", "settings"),
    [
        ("llada", "dllm_var", {"block_length": 4, "threshold": 0.03, "stop_tokens": []}),
        ("llada", "dllm_var", {"block_length": 4, "threshold": 0.03, "stop_tokens": [], "use_cache": False}),
        ("nemotron_labs_diffusion", None, {"block_length": 4}),
        ("efficient_dlm", None, {"block_length": 4, "temperature": 0.0}),
        ("stable_diffcoder", None, {"block_length": 4}),
    ],
)
def test_settings_that_a_sampler_has_by_default_are_the_runs(family: str, sampler: Any, settings: Any) -> None:
    """Their runs name no temperature, or no rule; dLLM-Var's were refused: "has temperature None"."""
    model = tiny(family) if sampler is None else tiny(family, sampler=sampler)
    seen: list[Tensor] = []
    keep = {"on_logits": lambda *given: seen.append(given[2].clone())}
    run = denoise(model, [[1, 2, 3, 4, 5], [6, 7]], gen_length=8, **settings, **keep)
    alone, read = proposed_commitment(run), commitment(model, run)
    assert bool(alone.predicted[-1].any())
    assert alone.token[alone.predicted].equal(read.token[alone.predicted])
    known = alone.confidence.isfinite()
    assert known.equal(alone.predicted & run.confidence.isfinite())
    assert bool(known.any())
    # Without and with a share of [MASK], which is one of 64 tokens.
    share = alone.confidence[known] / read.confidence[known]
    assert bool(((share > 0.8) & (share < 1 + 1e-5)).all())
    for step, logits in enumerate(seen if sampler else ()):
        likely = logits.double().softmax(-1).gather(-1, alone.token[step].clamp(min=0)[..., None])[..., 0]
        here = known[step]
        # The run's softmax is in the model's float32.
        torch.testing.assert_close(alone.confidence[step][here].double(), likely[here], rtol=1e-5, atol=1e-6)


def test_tokens_that_guidance_keeps_are_kept_in_a_rerun() -> None:
    model, prompts = tiny("a2d_qwen3"), [[5, 9, 12, 7, 3], [8, 4, 2]]
    given: dict[str, Any] = {"gen_length": 6, "steps": 6, "cfg_scale": 3.0}
    run = denoise(model, prompts, cfg_keep_tokens=[5, 8, 4], **given)
    found = commitment(model, run)
    assert found.token[found.predicted].equal(run.proposals[found.predicted])
    assert not run.tokens.equal(denoise(model, prompts, **given).tokens)


def test_what_stays_open_is_neither_right_nor_wrong() -> None:
    """The answer to the first prompt ends with the first block."""

    def ends(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        forced = logits.clone()
        forced[0, 3, 9], forced[1, 3, 9] = 30.0, -30.0
        return forced

    given: dict[str, Any] = {"gen_length": 6, "block_length": 2, "steps": 6, "eot_token": 9, "on_logits": ends}
    run = denoise(tiny("mmada"), [[1, 2], [4, 5]], logits="all", **given)
    assert run.masks_left.tolist() == [4, 0]
    found = proposed_commitment(run)
    assert found.reference[0].tolist() == [*run.tokens[0, :4].tolist(), -1, -1, -1, -1]
    assert (found.token == -1).equal(~found.predicted)
    counted = [(run.open[step] & run.running[step, :, None]).sum(-1).tolist() for step in range(run.steps)]
    left = [4 * int(run.running[step, 0]) for step in range(run.steps)]
    assert found.calibration()["predictions"].tolist() == [
        sum(both) - open_ for both, open_ in zip(counted, left, strict=True)
    ]


def test_proposals_that_are_drawn_say_nothing_alone() -> None:
    with pytest.raises(ValueError, match="the run has temperature"):
        proposed_commitment(denoise(tiny("llada"), PROMPTS, steps=2, gen_length=4, temperature=0.7))
    with pytest.raises(ValueError, match="holds random tokens at open positions"):
        proposed_commitment(denoise(tiny("uniform_qwen"), PROMPTS, steps=2, gen_length=4))
    with pytest.raises(TypeError, match="the run is a str"):
        proposed_commitment("run")


@pytest.mark.parametrize(
    ("family", "setting", "why"),
    [
        ("llada", {"logits_eos_inf": True}, "has logits_eos_inf=True"),
        ("a2d_qwen3", {"suppress_tokens": (62,)}, r"has suppress_tokens=\(62,\)"),
        ("dreamon", {"start_length": 2, "temperature": 0.0}, "inserts and deletes masks"),
    ],
)
def test_proposals_without_some_tokens_say_nothing_alone(family: str, setting: dict[str, Any], why: str) -> None:
    """The end of the text, the likeliest token everywhere, is never proposed; of DreamOn not at its last gap."""
    model = tiny(family)

    def ends(module: Any, args: Any, logits: Tensor) -> Tensor:
        return torch.cat([logits[..., :62], logits[..., 62:63] + 50, logits[..., 63:]], -1)

    model.get_output_embeddings().register_forward_hook(ends)
    run = denoise(model, PROMPTS, gen_length=4, **setting)
    likeliest = commitment(model, run)
    assert bool((likeliest.token[likeliest.predicted] == 62).all())
    assert family == "dreamon" or not bool((run.proposals == 62).any())
    with pytest.raises(ValueError, match=f"the run {why}.* not always its most likely token; commitment"):
        proposed_commitment(run)


def test_the_map_shows_what_each_prediction_became() -> None:
    model = tiny("llada")
    found = commitment(model, denoise(model, PROMPTS, steps=6, gen_length=10, temperature=0.7))
    figure = dl.viz.commitment_map(found, row=1)
    cells = figure.axes[0].collections[0].get_array()
    assert figure.axes[0].get_xticks().tolist() == [step + 0.5 for step in range(6)]  # in the middle of the cells
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [*"012345"]
    where = found.predicted[:, 1].any(0).nonzero().flatten().tolist()
    kinds = set()
    for down, place in enumerate(where):
        for step in range(found.run.steps):
            token, final = int(found.token[step, 1, place]), int(found.run.tokens[1, place])
            rest = [int(t) for t in found.token[step:, 1, place] if t >= 0]
            wanted = 0 if token < 0 else 1 if token != final else 3 if set(rest) == {final} else 2
            assert cells[down, step] == wanted
            kinds.add(wanted)
    assert kinds >= {0, 1, 3}
    accuracy = figure.axes[1].get_lines()[1].get_ydata()
    assert accuracy == pytest.approx(found.calibration().dropna()["accuracy"].to_numpy())
    with pytest.raises(ValueError, match="row"):
        dl.viz.commitment_map(found, row=9)
    with pytest.raises(TypeError, match="give a Commitment"):
        dl.viz.commitment_map(found.run)


def test_the_map_counts_the_prompts_with_a_prediction() -> None:
    run = denoise(tiny("llada"), PROMPTS, steps=6, gen_length=10)
    found = proposed_commitment(run)
    assert f"right: n = {len(run.tokens)}" in dl.viz.commitment_map(found).get_suptitle().splitlines()[0]
    alone = torch.arange(len(run.tokens)) == 1  # as where the other prompts are over before a part of the run
    one = replace(found, token=found.token.masked_fill(~alone[:, None], -1))
    assert one.calibration()["predictions"].tolist() == one.predicted[:, 1].sum(-1).tolist()
    assert dl.viz.commitment_map(one, row=1).get_suptitle().splitlines()[0].endswith("right: n = 1")


def drawn(found: Commitment, row: int) -> tuple[torch.Tensor, list[str]]:
    """The cells of a map at the positions that it shows, [position, step], and its legend."""
    figure = dl.viz.commitment_map(found, row=row)
    axes, (legend,) = figure.axes[0], figure.legends
    cells = torch.as_tensor(axes.collections[0].get_array()).reshape(-1, found.run.steps)
    return cells, [text.get_text() for text in legend.get_texts()]


NOT_KNOWN = "predicts the final token, not known if for good"


def test_the_map_of_a_part_does_not_say_what_a_missing_decision_made_of_a_prediction() -> None:
    whole = dl.record(tiny("llada"), [[5, 9, 11, 3, 17], [4, 8, 2], [1]], steps=8, gen_length=8, block_length=4)
    steps, counts = [1, 3, 4], {3: 0, 4: 0}
    found, part = proposed_commitment(whole), proposed_commitment(whole.select(step=steps))
    for row in range(3):
        (all_cells, all_names), (cells, names) = drawn(found, row), drawn(part, row)
        assert NOT_KNOWN not in all_names
        shown = [one.predicted[:, row].any(0).nonzero().flatten().tolist() for one in (found, part)]
        for down, place in enumerate(shown[1]):
            decided_here = int(whole.run.step_of[row, place]) in steps
            for column, step in enumerate(steps):
                known, cell = int(all_cells[shown[0].index(place), step]), int(cells[down, column])
                counts[cell] = counts.get(cell, 0) + 1
                assert cell == known if decided_here or known < 2 else cell == 4
        assert (NOT_KNOWN in names) == bool((cells == 4).any())
    assert counts[3] > 0
    assert counts[4] > 0


def test_the_map_of_an_editing_run_does_not_say_what_a_rewrite_that_was_not_read_made() -> None:
    model = tiny("llada2", model_type="llada21_moe", seed=2)
    settings: dict[str, Any] = {"block_length": 8, "editing_threshold": 0.02, "temperature": 1.0}
    found = commitment(model, denoise(model, PROMPTS, gen_length=16, **settings))
    unknown = 0
    for row in range(len(PROMPTS)):
        cells, names = drawn(found, row)
        where = found.predicted[:, row].any(0)
        right = (found.token[:, row] == found.run.tokens[row])[:, where].T
        grey = right & found.unknown[row, where][:, None]
        assert (cells == 4).equal(grey)
        assert (NOT_KNOWN in names) == bool(grey.any())
        unknown += int(grey.sum())
    assert unknown


@pytest.mark.parametrize("family", ["duo", "uniform_qwen", "llada2"])
def test_where_steps_rewrite_the_last_one_decides(family: str) -> None:
    if family == "llada2":
        model = tiny("llada2", model_type="llada21_moe", seed=2)
        settings: dict[str, Any] = {"block_length": 8, "editing_threshold": 0.02, "temperature": 1.0}
        run = denoise(model, PROMPTS, gen_length=16, **settings)
    else:
        model = tiny(family)
        run = denoise(model, PROMPTS, steps=6, gen_length=8)
    read, unread = (commitment(model, run, decided=each) for each in (True, False))
    rewritten = settled = 0
    for row, place in run.answer.nonzero().tolist():
        final, line = int(run.tokens[row, place]), run.canvases[:, row, place].tolist()
        written = [t for t in range(run.steps) if run.unmasked[t, row, place] or run.revised[t, row, place]]
        if bool(run.open[-1, row, place]) or not written:
            assert int(read.committed_at[row, place]) == -1
            continue
        last = written[-1]
        assert line[last + 1 :] == [final] * (run.steps - last)
        late = last > int(run.step_of[row, place])
        rewritten += late
        seen = [(t, int(read.token[t, row, place])) for t in range(last + 1) if read.token[t, row, place] >= 0]
        first = last + 1
        for step, token in reversed(seen):
            if token != final:
                break
            first = step
        if late and seen[-1][0] != last:  # the step did not read the position that it rewrote
            first = -1
        assert int(read.committed_at[row, place]) == first
        settled += first >= 0
        if late:
            assert int(unread.committed_at[row, place]) == -1
            assert math.isnan(unread.lead[row, place])
    assert rewritten
    assert settled


@pytest.mark.parametrize(("family", "settings"), [("llada", {"temperature": 0.7}), ("diffusion_gemma", {})])
def test_the_command_line_draws_a_run_whose_proposals_are_drawn(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    recording = dl.record(model, PROMPTS, [dl.ValueNorm()], steps=4, gen_length=8, **settings)
    with pytest.raises(ValueError, match=r"proposed_commitment: the run (has temperature|holds random tokens)"):
        proposed_commitment(recording)
    monkeypatch.setattr(PlotOptions, "network", model)
    options = PlotOptions({"rec": recording}, row=1)
    found, wanted = (
        figure.axes[0].collections[0].get_array()
        for figure in (
            find_plot("commitment-map").draw(options),
            commitment_map(commitment(model, recording.run), row=1),
        )
    )
    assert (found == wanted).all()
    assert write_plot("commitment-map", options, tmp_path / "map.svg").is_file()
