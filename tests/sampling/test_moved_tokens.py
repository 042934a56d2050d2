"""Where the tokens of a DreamOn run were at its steps, and what is read there, against lists of tokens."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import ablate, mask_positions
from dlm_lens.probes import class_readability, commitment, decision_order, replay, sink_mechanism
from dlm_lens.sampling.moved_tokens import decisions_of
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks.analysis.enrichment import sink_steps
from tests.reference import forward64
from tests.sampling.interrupted import resumed_recording
from tests.sampling.test_dreamon import DELETE, EXPAND, GREEDY, MASK, PROMPTS, resizing


class Element(NamedTuple):
    """A token of a text: its index in the text of each step so far, what each read there, when it was decided."""

    token: int
    places: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    decided: int = -1


def by_hand(model: Any, prompt: list[int]) -> list[list[Element]]:
    """The text before each greedy step and at the end."""
    text, grown, budget = [Element(token) for token in prompt], GREEDY["gen_length"], GREEDY["expand_budget"]
    if MASK not in prompt:
        text, grown = text + [Element(MASK)] * 4, grown - 4
    texts = [text]
    while any(one.token == MASK for one in text):
        step, tokens = len(texts) - 1, torch.tensor([[one.token for one in text]])
        logits = forward64(model, tokens)["logits"][0]
        logits = torch.cat([logits[:1], logits[:-1]])
        likely = logits.index_fill(-1, torch.tensor([MASK]), -torch.inf).argmax(-1).tolist()
        if grown <= 0 or budget <= 0:
            logits[:, EXPAND] = -torch.inf
        chances = logits.softmax(-1)
        entropy = -(chances * torch.log(chances + 1e-10)).sum(-1)
        at = int(entropy.masked_fill(tokens[0] != MASK, torch.inf).argmin())
        logits[:, MASK] = -torch.inf
        token = int(logits[at].argmax())
        text = [
            Element(
                one.token, (*one.places, i), (*one.read, likely[i]) if one.token == MASK else one.read, one.decided
            )
            for i, one in enumerate(text)
        ]
        made = {EXPAND: [text[at], text[at]], DELETE: []}.get(token, [text[at]._replace(token=token, decided=step)])
        text = [*text[:at], *made, *text[at + 1 :]]
        grown -= len(made) - 1
        budget -= token == EXPAND
        texts.append(text)
    return texts


@pytest.fixture(scope="module")
def model() -> Any:
    """A network whose texts grow and shrink."""
    return resizing(seed=4)


@pytest.fixture(scope="module")
def run(model: Any) -> dl.DenoisingRun:
    found = dl.denoise(model, PROMPTS, **GREEDY)
    assert found.origins is not None
    return found


@pytest.fixture(scope="module")
def texts(model: Any) -> list[list[list[Element]]]:
    return [by_hand(model, prompt) for prompt in PROMPTS]


def placed(run: dl.DenoisingRun, row: int, step: int) -> list[int]:
    """The canvas positions of a row's text at a step, or (-1) of the result."""
    seen = run.attention_mask[row] & ~run.masked[-1, row] if step == -1 else run.seen_content[step, row]
    return seen.nonzero().flatten().tolist()


def test_places_and_decisions_are_those_of_lists(run: dl.DenoisingRun, texts: list[list[list[Element]]]) -> None:
    moved = 0
    decided, tokens = decisions_of(run)
    for row, history in enumerate(texts):
        expected = set()
        for one, position in zip(history[-1], placed(run, row, -1), strict=True):
            places = [placed(run, row, step)[at] for step, at in enumerate(one.places)]
            assert run.token_places[: len(places), row, position].tolist() == places
            assert run.token_places[-1, row, position] == position
            assert int(run.step_of[row, position]) == int(run.last_written[row, position]) == one.decided
            if one.decided >= 0:
                expected.add((one.decided, places[one.decided], one.token))
                moved += places[-1] != position or len(set(places[one.decided :])) > 1
        where = decided[:, row].nonzero().tolist()
        assert {(step, at, int(tokens[step, row, at])) for step, at in where} == expected
    assert moved > 1


def test_progress_is_the_decided_share_of_the_text(run: dl.DenoisingRun, texts: list[list[list[Element]]]) -> None:
    for row, (prompt, history) in enumerate(zip(PROMPTS, texts, strict=True)):
        given = len(prompt) - prompt.count(MASK) if MASK in prompt else len(prompt)
        holes = [place for place, token in enumerate(prompt) if token == MASK]
        given -= 0 if not holes else sum(token != MASK for token in prompt[holes[0] : holes[-1]])
        for step, text in enumerate(history):
            inside = [one for one in text if one.token == MASK or one.decided >= 0]
            share = sum(one.decided >= 0 for one in inside) / max(1, len(inside))
            assert float(run.progress[step, row]) == pytest.approx(share, abs=1e-6)
        assert run.masks_left[row] == 0
    part = run.first_steps(3)
    torch.testing.assert_close(part.progress, run.progress[:4])
    assert part.masks_left.equal((run.masked[3] & run.seen_content[3]).sum(-1))


def test_hooks_and_traces_have_the_progress_of_the_run(model: Any, run: dl.DenoisingRun) -> None:
    found: list[torch.Tensor] = []

    def schedule(share: float) -> float:
        found.append(torch.tensor(share))
        return 0.0

    vector = torch.zeros(model.config.hidden_size)
    hook = dl.hooks.at_layers(dl.hooks.steer(vector, schedule=schedule), [0])
    dl.denoise(model, PROMPTS, hooks=[hook], **GREEDY)
    torch.testing.assert_close(torch.stack(found).reshape(run.steps, -1), run.progress[:-1])
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **GREEDY) as tracer:
        shares = [].save()
        for step in tracer.steps[:]:
            shares.append(step.progress.clone())
    torch.testing.assert_close(torch.stack(shares), run.progress[:-1])


def test_predictions_settle_along_the_path_of_a_token(
    model: Any, run: dl.DenoisingRun, texts: list[list[list[Element]]]
) -> None:
    found, order = commitment(model, run), decision_order(run)
    for row, history in enumerate(texts):
        steps = []
        for one, position in zip(history[-1], placed(run, row, -1), strict=True):
            if one.decided < 0:
                assert int(found.committed_at[row, position]) == -1
                continue
            steps.append(one.decided)
            settled = one.decided + 1
            while settled and one.read[settled - 1] == one.token:
                settled -= 1
            assert int(found.committed_at[row, position]) == settled
            changes = sum(a != b for a, b in zip(one.read, one.read[1:], strict=False))
            assert int(found.flips[row, position]) == changes
        pairs = [(a, b) for i, a in enumerate(steps) for b in steps[i + 1 :] if a != b]
        tau = sum(1 if a < b else -1 for a, b in pairs) / len(pairs) if pairs else float("nan")
        assert float(order.tau[row]) == pytest.approx(tau, nan_ok=True)
    assert not order.rewrites.any()


def test_tables_name_the_token_that_a_mask_became(
    model: Any, run: dl.DenoisingRun, texts: list[list[list[Element]]]
) -> None:
    text, wanted = TokenTexts(model.tokenizer), {}
    for row, history in enumerate(texts):
        for step in range(len(history) - 1):
            ends = Counter(one.places[step] for one in history[-1])
            for one in history[-1]:
                if ends[one.places[step]] == 1:  # a mask that became several has no token of its own
                    wanted[step, row, placed(run, row, step)[one.places[step]]] = text(one.token)
    lens = dl.logit_lens(model, run).table(layer=1)
    replayed = replay(model, run, [ablate("resid", dims=[0])], attention=False).table()
    for table, column in ((lens, "predicts"), (replayed, "position")):
        places = zip(table["step"], table["batch"], table[f"canvas_{column}"].fillna(-1), strict=True)
        assert table["written"].tolist() == [wanted.get(place, "") for place in places]
        likeliest = "top" if column == "predicts" else "token"
        first = table[table["rank"] == 0]
        assert len(first) > 2
        assert [one[0] if column == "predicts" else one for one in first[likeliest]] == first["written"].tolist()


def test_a_token_depends_on_sinks_as_its_mask_did(model: Any, texts: list[list[list[Element]]]) -> None:
    found = sink_mechanism(model, PROMPTS, dl.TopK(1), controls=[0], **GREEDY)
    moved = 0
    for row, history in enumerate(texts):
        for one, position in zip(history[-1], placed(found.run, row, -1), strict=True):
            if one.decided < 0:
                continue
            places = [placed(found.run, row, step)[at] for step, at in enumerate(one.places[: one.decided + 1])]
            wanted = sum(float(found.dependence[step, row, at]) for step, at in enumerate(places)) / len(places)
            assert float(found.mean_dependence[row, position]) == pytest.approx(wanted, rel=1e-5)
            moved += {*places} != {position}
    assert moved > 2


def test_a_token_is_late_where_the_first_step_with_its_mask_predicts_another() -> None:
    model = resizing(seed=2)  # a text that grows to where nothing was on the first canvases
    run = dl.denoise(model, PROMPTS, **GREEDY)
    found = class_readability(model, run, layers=[1], held_out=0.6, seed=1)
    settled, late = found.class_at(1), []
    for row in found.held_out.nonzero().flatten().tolist():
        final = by_hand(model, PROMPTS[row])[-1]
        for one, position in zip(final, placed(run, row, -1), strict=True):
            if one.decided >= 0:
                committed = int(found.settled.committed_at[row, position])
                assert (committed == 0) == (set(one.read) == {one.token})
                late += [committed - int(settled[row, position])] * (committed > 0)
    assert len(late) > 2
    assert found.earlier(1).value == pytest.approx(sum(late) / len(late))


def test_the_class_by_place_is_that_of_the_place_where_the_token_ends() -> None:
    model = resizing(seed=2)
    prompts = [[*prompt[:1], 20 + i, *prompt[2:]] if i else prompt for i in range(3) for prompt in PROMPTS]
    run, texts = dl.denoise(model, prompts, **GREEDY), [by_hand(model, prompt) for prompt in prompts]
    found = class_readability(model, run, layers=[1], held_out=0.5, seed=1)
    held = found.held_out.nonzero().flatten().tolist()
    classes: dict[int, Counter[int]] = {}
    for row in (~found.held_out).nonzero().flatten().tolist():
        for one, position in zip(texts[row][-1], placed(run, row, -1), strict=True):
            if one.decided >= 0:
                classes.setdefault(position, Counter())[int(found.wanted[row, position])] += 1
    right, moved, settled = [], 0, found.class_at(1, "place")
    for row in held:
        final = texts[row][-1]
        sharing = Counter((step, place) for one in final for step, place in enumerate(one.places))
        for one, position in zip(final, placed(run, row, -1), strict=True):
            if one.decided < 0:
                continue
            counts = classes.get(position, Counter())
            best = min((each for each in counts if counts[each] == max(counts.values())), default=-1)
            same = best == int(found.wanted[row, position])
            for step, place in list(enumerate(one.places))[: one.decided + 1]:
                if sharing[step, place] == 1:  # of a mask that became several, no token is the final one
                    right.append(same)
                    moved += placed(run, row, step)[place] != position
            assert int(settled[row, position]) == (-1 if best < 0 else 0 if same else one.decided + 1)
    assert moved
    assert found.accuracy(1, "place").value == pytest.approx(sum(right) / len(right))


def prompts_by_hand(run: dl.DenoisingRun, texts: list[list[list[Element]]]) -> torch.Tensor:
    """The positions of the prompt's tokens at every step of a row."""
    found = torch.zeros(run.unmasked.shape, dtype=torch.bool)
    for row, steps in enumerate(texts):
        for step, text in enumerate(steps[: run.steps]):
            for one, position in zip(text, placed(run, row, step), strict=True):
                found[step, row, position] = one.decided < 0 and one.token != MASK
    found &= run.running[..., None]
    return found


@pytest.fixture(scope="module")
def between_gaps() -> tuple[Any, Any, torch.Tensor]:
    """A run in which a token of the prompt between two gaps moves, and the places of the prompt's tokens."""
    model = resizing(seed=2)
    run = dl.denoise(model, PROMPTS, **GREEDY)
    expected = prompts_by_hand(run, [by_hand(model, prompt) for prompt in PROMPTS])
    assert len({tuple(each.tolist()) for each in expected[:, 1]}) > 3
    return model, run, expected


def test_the_prompt_is_its_tokens_wherever_they_move(
    between_gaps: tuple[Any, Any, torch.Tensor], tmp_path: Path
) -> None:
    model, run, expected = between_gaps
    found: list[torch.Tensor] = []

    class Sees:
        site, layers = "resid", (0,)

        def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
            found.append(hook.run.prompt.clone())
            return tensor

    recorder = dl.Recorder(model, [dl.ReceivedAttention("prompt", min_viewers=1)])
    dl.denoise(model, PROMPTS, hooks=[Sees()], observers=recorder, **GREEDY)
    running = run.running[..., None]
    assert (torch.stack(found) & running).equal(expected)
    recording = recorder.recording(run)
    assert recording.facts.positions("prompt").equal(expected)
    # What was counted in the run is what the classes of the finished run say: column sums are as many as queries.
    received = recording.received_prompt
    sums = received.nan_to_num() * recording.expected("prompt")[:, :, None, None]
    counted = (expected & running).sum(-1).float()
    torch.testing.assert_close(
        sums.sum(-1), counted[:, :, None, None].expand(sums.shape[:-1]), atol=1e-3, rtol=1e-3
    )
    reducers = [dl.ReceivedAttention("prompt", min_viewers=1)]
    resumed = resumed_recording(model, tmp_path / "stored", 6, PROMPTS, reducers, **GREEDY)
    torch.testing.assert_close(resumed.received_prompt, received, equal_nan=True)
    found.clear()
    replay(model, run, [Sees()], attention=False)
    assert (torch.stack(found) & running).equal(expected)
    steps = [2, 5, 6]
    part = recording.select(step=steps)
    assert part.facts.positions("prompt").equal(expected[steps])
    later = part.select(step=[1, 2])
    assert later.facts.positions("prompt").equal(expected[steps[1:]])
    assert (later.run.by_token.answer & run.attention_mask).equal(run.by_token.answer & run.attention_mask)
    lens = dl.logit_lens(model, run, "prompt", steps=[5], layers=[1])
    at = {(row, position) for row, position in lens.table()[["batch", "canvas_position"]].itertuples(index=False)}
    assert at == {(row, position) for row, position in expected[5].nonzero().tolist()}


def test_sinks_are_compared_with_the_prompt_and_the_masks_where_they_are(
    between_gaps: tuple[Any, dl.DenoisingRun, torch.Tensor],
) -> None:
    model, run, _ = between_gaps
    paths = dl.trajectories(dl.received_over_steps(model, run, min_viewers=1), dl.AboveMean(1.0))
    steps, pattern, position = (each.tolist() for each in sink_steps(paths))
    rows = np.unravel_index(pattern, paths.static_share.shape)[0].tolist()
    found: dict[str, list[int]] = {"leftmost mask": [], "rightmost mask": [], "written now": []}
    sinks = Counter[str]()
    for row, text in enumerate(by_hand(model, prompt) for prompt in PROMPTS):
        for step, elements in enumerate(text[:-1]):
            places, masks, kinds = placed(run, row, step), [], {}
            for one, place in zip(elements, places, strict=True):
                kinds[place] = "masked" if one.token == MASK else "prompt" if one.decided < 0 else "written"
                masks += [place] * (one.token == MASK)
            sinks.update(kinds[at] for s, r, at in zip(steps, rows, position, strict=True) if (s, r) == (step, row))
            if step > max(one.decided for one in text[-1]):
                continue
            now = [places[one.places[step]] for one in text[-1] if one.decided == step]
            for main in (at for at in paths.main[step, row].flatten().tolist() if at >= 0):
                found["leftmost mask"].append(abs(main - masks[0]))
                found["rightmost mask"].append(abs(main - masks[-1]))
                found["written now"] += [abs(main - at) for at in now]
    assert len(sinks) == 3
    enriched = dl.sinks.position_enrichment(paths, answer=run.answer).set_index("class")
    assert {name: enriched.loc[name, "sinks"] for name in enriched.index} == sinks
    for given in (None, run.unmasked):
        table = dl.sinks.frontier_alignment(paths, unmasked=given).set_index("reference")
        for name, distances in found.items():
            assert table.loc[name, "n"] == len(distances), name
            assert table.loc[name, "distance"] == pytest.approx(sum(distances) / len(distances)), name


def test_parts_and_files_keep_where_tokens_were(model: Any, run: dl.DenoisingRun, tmp_path: Path) -> None:
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], to=tmp_path / "stored", **GREEDY)
    stored = dl.Recording.load(tmp_path / "stored").run
    assert run.origins is not None
    assert stored.origins is not None
    assert stored.origins.equal(run.origins)
    steps = [1, 4, 7]
    part = recording.select(step=steps, batch=[0, 2]).run
    assert part.token_places.equal(run.token_places[[*steps, run.steps]][:, [0, 2]])
    assert run.first_steps(4).token_places[-1].equal(torch.arange(run.tokens.shape[1]).expand(3, -1))
    torch.testing.assert_close(part.progress, run.progress[[*steps, run.steps]][:, [0, 2]])


def test_joined_rows_keep_where_tokens_were(model: Any, run: dl.DenoisingRun) -> None:
    joined = dl.record(model, PROMPTS[::-1], [dl.recording.ValueNorm()], batch_size=1, **GREEDY).run
    for row, together in enumerate((2, 1, 0)):
        ran = int(joined.row_steps[row])
        assert joined.texts[row] == run.texts[together]
        own, other = joined.attention_mask[row], run.attention_mask[together]
        assert joined.step_of[row, own].equal(run.step_of[together, other])
        torch.testing.assert_close(joined.progress[: ran + 1, row], run.progress[: ran + 1, together])


def test_runs_of_one_prompt_pair_where_its_tokens_move(model: Any) -> None:
    """Tokens of the prompt between two gaps are elsewhere at the end of each run: the prompts "differed"."""
    prompt = [4, MASK, MASK, 6, 9, MASK, 8]
    moved = 0
    for position in (0, 1, 2):
        found = dl.compare(model, [prompt], hooks=[mask_positions(position)], **GREEDY)
        ends = [run.tokens[0][~run.masked[-1, 0]].tolist() for run in (found.plain, found.hooked)]
        moved += ends[0].index(6) != ends[1].index(6)
    assert moved
    for place, other in ((0, 5), (4, 7), (6, 7)):  # before, between and after the gaps
        run = dl.denoise(model, [[*prompt[:place], other, *prompt[place + 1 :]]], **GREEDY)
        with pytest.raises(ValueError, match="do not pair: their prompts differ"):
            dl.sampling.Comparison(found.plain, run, ())
