"""d3LLM: the authors' decoding token for token, its rule and entropies in float64, ends, batches, reruns, hosts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.adapters.registry import family_of
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.recording import rerun
from tests.adapters.golden import GOLDEN
from tests.reference import forward64
from tests.sampling.block_families import PROMPTS, check_hosts, check_received_attention, sharp
from tests.sampling.interrupted import resumed_as_unbroken
from tests.sampling.test_multi_block import running_by_hand

CASES = json.loads((GOLDEN / "d3llm" / "sampling.json").read_text())
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])
RUN: dict[str, Any] = {
    "gen_length": 18,
    "block_length": 4,
    "add_block_threshold": 0.25,
    "entropy_threshold": 1.4,
}


def model_of(family: str = "dream", end: int | None = None) -> Any:
    model: Any = sharp(family, sampler="d3llm")
    model.config.eos_token_id, model.config.eot_token_id = end, None
    return model


def network_of(case: dict[str, Any]) -> Any:
    model: Any = dl.load(GOLDEN / case["family"], sampler="d3llm", check=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(case["head"])
    model.config.eos_token_id, model.config.eot_token_id = case["eos"], None
    return model


def until_end(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@BY_NAME
def test_the_run_is_the_original(case: dict[str, Any]) -> None:
    start, end, theirs = len(case["prompt"]), case["eos"], case["canvases"]
    model = network_of(case)
    run = dl.denoise(model, [case["prompt"]], reference_quirks=True, **case["settings"])
    assert run.canvases[:-1, 0, start:].tolist() == theirs
    # Their last step may overwrite what is after the end, and nothing reads it.
    assert until_end(run.tokens[0, start:].tolist(), end) == until_end(case["final"], end)
    plain = dl.denoise(model, [case["prompt"]], **case["settings"]).canvases[:, 0, start:].tolist()
    ended = [end in canvas for canvas in theirs]
    alike = ended.index(True) + 1 if True in ended else len(theirs)
    assert plain[:alike] == theirs[:alike]


def test_the_stored_runs_have_ends_that_move_and_what_is_written_after_them() -> None:
    assert {case["family"] for case in CASES} == {"llada", "dream"}
    ends = [(case["eos"], case["canvases"], case["final"]) for case in CASES if case["eos"] is not None]
    places = [[canvas.index(end) for canvas in canvases if end in canvas] for end, canvases, _ in ends]
    assert any(first > last for first, *_, last in filter(lambda each: len(each) > 1, places))
    assert any(set(final[final.index(end) :]) != {end} for end, _, final in ends)


def test_masks_that_an_end_has_filled_delay_others_in_the_authors_code() -> None:
    """By default the step after it decides what waited there."""
    case = next(case for case in CASES if case["name"] == "dream_20")
    plain = dl.denoise(network_of(case), [case["prompt"]], **case["settings"])
    assert (plain.steps, len(case["canvases"])) == (13, 14)
    found, end = plain.tokens[0, len(case["prompt"]) :].tolist(), case["eos"]
    assert until_end(found, end) == until_end(case["final"], end)


def logits64(model: Any, run: dl.DenoisingRun, step: int, row: int) -> Tensor:
    """Of a row's content; in Dream the output at i - 1 predicts position i."""
    logits = forward64(model, run.canvases[step, row][run.attention_mask[row]][None])["logits"][0]
    return torch.cat([logits[:1], logits[:-1]]) if model.config.model_type == "Dream" else logits


@FAMILIES
@pytest.mark.parametrize("given", [{}, {"add_block_threshold": 1.0}, {"entropy_threshold": 0.0}, {"lowest": True}])
def test_the_rule_by_hand(family: str, given: dict[str, Any]) -> None:
    """Every step of every row from its canvas, its proposals and entropies, which are those of float64."""
    model, settings = model_of(family), {"lowest": family == "llada"} | RUN | given
    run, written, several, others = dl.denoise(model, PROMPTS, **settings), 0, 0, 0
    begin, mask = run.prompt_length, model.config.mask_token_id
    for step in range(run.steps):
        for row in range(3):
            opened = run.masked[step, row, begin:].tolist()
            bounds = running_by_hand(opened, [True] * 18, 4, 18, settings["add_block_threshold"])
            found, x0 = run.confidence[step, row], run.proposals[step, row]
            if bounds is None:
                assert run.row_steps[row] <= step
                continue
            places = [begin + at for at in range(bounds[0], bounds[1] + 1) if opened[at]]
            several += len({(place - begin) // 4 for place in places}) > 1
            assert found.isfinite().nonzero().flatten().tolist() == places
            first = [place for place in places if (place - begin) // 4 == (places[0] - begin) // 4]
            entropy = {place: -float(found[place]) for place in places}
            chosen = {place for place in places if entropy[place] < settings["entropy_threshold"]}
            if not chosen.intersection(first):
                chosen.add(min(first, key=entropy.__getitem__))
            if settings["lowest"]:
                others += min(places, key=entropy.__getitem__) not in chosen
                chosen.add(min(places, key=entropy.__getitem__))
            wanted = run.canvases[step, row].clone()
            wanted[list(chosen)] = x0[list(chosen)]
            assert run.canvases[step + 1, row].equal(wanted)
            written += len(chosen)
            keep = run.attention_mask[row]
            logits = logits64(model, run, step, row)[found[keep].isfinite()]
            likely = logits.softmax(-1)
            expected = torch.special.entr(likely).sum(-1)
            torch.testing.assert_close(-found[places].double(), expected, rtol=1e-4, atol=1e-4)
            likely[:, mask] = -1
            assert x0[places].equal(likely.argmax(-1))
    assert written == 54
    assert (several > 0) == (given != {"add_block_threshold": 1.0})
    assert (others > 0) == (several > 0 and settings["lowest"])


@FAMILIES
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_is_what_it_is_alone(family: str, temperature: float) -> None:
    model = model_of(family, end=7)
    given = RUN | {"temperature": temperature}
    together = dl.denoise(model, PROMPTS, **given)
    for row, prompt in enumerate(PROMPTS):
        alone, content = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        assert together.row_steps[row] == alone.steps
        for name in ("canvases", "unmasked", "proposals", "revised"):
            theirs = getattr(together, name)[: alone.steps, row][:, content]
            assert theirs.equal(getattr(alone, name)[: alone.steps, 0]), name
    assert len(set(together.row_steps.tolist())) > 1
    if temperature:
        assert not together.tokens.equal(dl.denoise(model, PROMPTS, seed=1, **given).tokens)


def test_an_end_closes_the_rest_of_its_row() -> None:
    model = model_of()
    free = dl.denoise(model, PROMPTS, **RUN)
    end = int(free.tokens[0, free.prompt_length + 9])
    model.config.eos_token_id = end
    run, closed, rewritten = dl.denoise(model, PROMPTS, **RUN), 0, 0
    answer = run.tokens[:, run.prompt_length :]
    assert bool((answer == end).any())
    for step in range(run.steps):
        for row in range(3):
            after = run.canvases[step + 1, row, run.prompt_length :].tolist()
            if end not in after:
                continue
            rest = slice(run.prompt_length + after.index(end) + 1, None)
            assert set(after[after.index(end) :]) == {end}
            lost = run.masked[step, row, rest] & ~run.unmasked[step, row, rest]
            closed += int(lost.sum())
            rewritten += int(run.revised[step, row, rest].sum())
    assert closed
    assert run.masks_left.tolist() == [0, 0, 0]
    assert int((run.step_of[:, run.prompt_length :] == -1).sum()) == closed
    assert not rewritten or run.revised.any()
    assert [len(text.split()) for text in run.answers] == [[*row.tolist(), end].index(end) for row in answer]
    kept = dl.denoise(model, PROMPTS, early_stop=False, **RUN)
    assert kept.canvases.equal(free.canvases)


def test_masks_in_the_prompt_are_filled_in() -> None:
    model = model_of("llada")
    run = dl.denoise(model, [[1, 2, model.config.mask_token_id, 4, 5], [3, 4]], **RUN)
    assert run.masks_left.tolist() == [0, 0]
    assert run.confidence[0, 0].isfinite()[2]


def test_received_attention_is_that_of_the_whole_canvas() -> None:
    model = model_of("llada")

    def alone(run: dl.DenoisingRun, step: int, row: int) -> tuple[slice, Tensor, dict[str, Tensor]]:
        canvas = run.canvases[step, row]
        inside = slice(int(run.padding[row]), len(canvas))
        count = int(run.attention_mask[row].sum())
        return inside, torch.ones(1, 1, count, count, dtype=torch.bool), forward64(model, canvas[inside][None])

    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    check_received_attention(model, recording, alone)
    check_hosts(model, model_of("llada"), RUN, alone)


@FAMILIES
def test_passes_over_a_finished_run_predict_all_masks(family: str) -> None:
    model = model_of(family)
    run = dl.denoise(model, PROMPTS, **RUN)
    read, running = probes.commitment(model, run), run.confidence.isfinite()
    assert read.predicted.equal(run.masked[:-1])
    assert bool((read.predicted & ~running).any())
    assert read.token[running].equal(run.proposals[running])
    alone = probes.proposed_commitment(run)
    assert alone.token[running].equal(run.proposals[running])
    assert alone.confidence.isnan().all()  # an entropy is no probability


@pytest.mark.parametrize("quirks", [False, True])
def test_a_run_is_resumed_and_passed_over_again(quirks: bool, tmp_path: Path) -> None:
    case = next(case for case in CASES if case["name"] == "llada_2")
    model, given = network_of(case), {**case["settings"], "reference_quirks": quirks}
    for passes in (4, len(case["canvases"])):
        whole = resumed_as_unbroken(model, [case["prompt"]], tmp_path / f"{passes}", passes=passes, **given)
    again = rerun(model, whole.run, [dl.ReceivedAttention(min_viewers=1)])
    torch.testing.assert_close(again.received, whole.received, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_hooks_act_in_every_row_as_alone() -> None:
    model = model_of("llada", end=7).double()  # so that a batch's rounding chooses no other sinks
    together = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **RUN)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], hooks=[mask_top_sinks(1)], **RUN)
        assert together.tokens[row][together.attention_mask[row]].equal(alone.tokens[0])
    assert not together.confidence.equal(dl.denoise(model, PROMPTS, **RUN).confidence[: together.steps])


@FAMILIES
def test_the_released_checkpoints_have_this_sampler(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of the hub's name is found before the hub; its files are LLaDA's and Dream's."""
    names = [
        name for name in family_of({"dream": "Dream"}.get(family, family)).hub_names if name.startswith("d3LLM/")
    ]
    assert len(names) == (2 if family == "dream" else 1)
    monkeypatch.chdir(tmp_path)
    for name in names:
        shutil.copytree(GOLDEN / family, tmp_path / name, ignore=shutil.ignore_patterns("variants"))
        model: Any = dl.load(name, check=False)
        run = dl.denoise(model, [[1, 2]], gen_length=4)
        assert run.settings["sampler"] == "d3llm"
        assert run.settings.get("lowest", False) == (family == "llada")
        assert (run.settings["block_length"], run.settings["entropy_threshold"]) == (32, 0.5)


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        (PROMPTS, {"reference_quirks": True}, "reference_quirks with 3 prompts, gen_length 16 and temperature 0.0"),
        ([[1, 63, 3]], {"reference_quirks": True}, "the authors' code decodes one prompt without masks"),
        ([[1, 2]], {"reference_quirks": True, "gen_length": 18}, "gen_length 18 .* whole blocks of 4"),
        ([[1, 2]], {"reference_quirks": True, "temperature": 0.5}, "temperature 0.5: .* at temperature 0"),
        ([[1, 2]], {"add_block_threshold": 0.0}, "add_block_threshold is 0.0; it must be above 0 and at most 1"),
        ([[1, 2]], {"entropy_threshold": -1.0}, r"entropy_threshold is -1.0; it must be 0 \(one mask a step\)"),
        ([[1, 2]], {"block_length": 0}, "block_length is 0; it must be at least 1"),
        ([[1, 2]], {"gen_length": 0}, "gen_length is 0; it must be at least 1"),
        ([[1, 2]], {"threshold": 0.4}, r"has no setting 'threshold' \(threshold is entropy_threshold here\)"),
        ([[1, 2]], {"block_add_threshold": 0.1}, "block_add_threshold is add_block_threshold here"),
    ],
)
def test_what_cannot_be(prompts: Any, given: dict[str, Any], message: str) -> None:
    model = model_of()
    assert model.config.mask_token_id == 63
    with pytest.raises(ValueError, match=message):
        dl.denoise(model, prompts, **{**RUN, "gen_length": 16, **given})
