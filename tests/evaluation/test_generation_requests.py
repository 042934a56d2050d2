"""Requests for text: every row as it is alone, stop sequences, and no forward behind a text's end."""

from functools import cache
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM, generation_requests
from dlm_lens.evaluation.generation_requests import Generator, Job
from dlm_lens.evaluation.settings import request_seed
from dlm_lens.hooks import (
    ablate,
    at_layers,
    at_progress,
    at_steps,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_tokens,
    mask_top_sinks,
)
from dlm_lens.sampling.likelihood import scoring
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask, counted, ids, texts


def requests(prompts: list[str], **given: Any) -> Any:
    return ask("generate_until", *((prompt, {"until": [], **given}) for prompt in prompts))


def alone(model: Any, prompt: str, **settings: Any) -> list[int]:
    """The answer of one prompt by itself."""
    if "hooks" in settings:
        return answer_of(model, prompt, settings)
    return list(kept_answer(model, prompt, tuple(settings.items())))


@cache
def kept_answer(model: Any, prompt: str, settings: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    """Computed once: tests of other batches, stop sequences and orders ask for the same."""
    return tuple(answer_of(model, prompt, dict(settings)))


def answer_of(model: Any, prompt: str, settings: dict[str, Any]) -> list[int]:
    run = dl.denoise(model, ids(model, prompt), **settings)
    return run.tokens[0, run.prompt_length :].tolist()


small = cache(tiny)


def until(model: Any, tokens: list[int], *stops: str) -> str:
    """What stands in front of the end token and of the stop sequences."""
    if model.config.eos_token_id in tokens:
        tokens = tokens[: tokens.index(model.config.eos_token_id)]
    text = model.tokenizer.decode(tokens)
    for stop in stops:
        text = text.split(stop)[0]
    for special in ("[MASK]", model.tokenizer.pad_token):
        text = text.replace(special, "")
    return text


@pytest.mark.parametrize("sampler", ["llada2", "llada2_editing", "llada2_levenshtein", "dmax"])
def test_texts_end_before_the_whole_block_that_the_canvas_ends_with(sampler: str) -> None:
    model = tiny("llada2", sampler=sampler)
    settings, prompts = {"gen_length": 5, "block_length": 4}, ["w1 w2 w3 w4 w5 w6", "w8 w9"]
    # At random, it would depend on the seed of the request.
    options = {"repeats": "least_confident"} if sampler == "llada2_levenshtein" else {}
    found = HarnessLM(model, generation={**settings, "options": options}).generate_until(requests(prompts))
    answers = [alone(model, prompt, **settings, **options) for prompt in prompts]
    assert answers[0] != answers[0][:5]
    assert found == [until(model, answer[:5]) for answer in answers]


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 3, None])
@pytest.mark.parametrize("family", ["llada", "dream", "diffugpt", "smdm", "causal", "mmada"])
def test_every_text_is_what_its_prompt_gives_alone(family: str, batch: int | None) -> None:
    model = small(family)
    length = {"gen_length": 12} if family == "causal" else {"gen_length": 12, "steps": 6}
    prompts = texts(7, 2, 9)
    lm = HarnessLM(model, generation=length, batch_size=batch)
    found = lm.generate_until(requests(prompts))
    expected = [until(model, alone(model, prompt, **length, seed=request_seed(0, prompt))) for prompt in prompts]
    assert found == expected
    shuffled = [4, 2, 6, 0, 1, 5, 3]
    assert lm.generate_until(requests([prompts[i] for i in shuffled])) == [found[i] for i in shuffled]


@pytest.mark.parametrize("family", ["llada", "dream", "smdm", "causal"])
def test_draws_do_not_depend_on_the_batch(family: str) -> None:
    model, prompts = tiny(family), texts(6, 2, 9)
    length = {"gen_length": 8} if family == "causal" else {"gen_length": 8, "steps": 4}
    settings = {**length, "temperature": 1.0}
    runs = [
        HarnessLM(model, generation=settings, batch_size=batch).generate_until(requests(prompts))
        for batch in (1, 4, None)
    ]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] == [until(model, alone(model, p, **settings, seed=request_seed(0, p))) for p in prompts]
    other = HarnessLM(model, generation=settings, seed=1).generate_until(requests(prompts))
    assert other != runs[0]


def test_copies_of_a_request_are_different_draws(llada: Any) -> None:
    (request,) = requests(["w1 w2 w3"])
    lm = HarnessLM(llada, generation={"temperature": 1.0})
    found = lm.generate_until([request] * 4)
    assert len(set(found)) == 4
    assert lm.generate_until([request] * 2) == found[:2]


def stop_of(model: Any, prompt: str, place: int) -> str:
    """A word that a prompt's text has at `place` for the first time."""
    text = alone(model, prompt)
    assert text[place] not in text[:place]
    return model.tokenizer.decode([text[place]])


def test_a_row_leaves_behind_the_block_its_text_ends_in(llada: Any) -> None:
    prompts = texts(5, 3, 9)
    stop = stop_of(llada, prompts[2], 5)  # in the second block of four tokens
    full = [alone(llada, prompt) for prompt in prompts]
    expected = [until(llada, tokens, stop) for tokens in full]
    with counted(llada) as rows:
        found = HarnessLM(llada).generate_until(requests(prompts, until=[stop]))
    assert found == expected
    blocks = []
    for tokens in full:
        written = [llada.tokenizer.decode(tokens[: 4 * (block + 1)]) for block in range(4)]
        ended = [
            block
            for block in range(4)
            if stop in written[block] or llada.config.eos_token_id in tokens[: 4 * (block + 1)]
        ]
        blocks.append(ended[0] + 1 if ended else 4)
    assert blocks[2] == 2
    assert sum(rows) == 4 * sum(blocks)  # one step per token, four of them a block
    assert sum(rows) < 5 * 16


def block_of_end(model: Any, tokens: list[int], stops: list[str]) -> int:
    """Blocks of four tokens that are written when the text ends."""
    for block in range(1, 5):
        written = tokens[: 4 * block]
        text = model.tokenizer.decode(written)
        if model.config.eos_token_id in written or any(stop in text for stop in stops):
            return block
    return 4


def late(progress: torch.Tensor) -> torch.Tensor:
    """Rows that are a third done."""
    return progress > 0.3


@pytest.mark.long
@pytest.mark.parametrize(
    ("hook", "blocks"),
    [
        # What a row leaves with: its own blocks, or those of the row that goes on longest.
        (mask_top_sinks(2), "own"),
        (mask_top_sinks(2, source="clean", stage="after"), "own"),
        (at_layers(mask_sinks(dl.AboveMean(0.3), per="layer"), -1), "own"),
        (mask_tokens("mask", keep_self=True), "own"),
        (keep_only(2, 4), "own"),
        (mask_positions(-1), "own"),
        (mask_top_sinks(2, source="previous"), "longest"),
        (mask_tokens("prompt"), "longest"),
        (freeze_sinks(dl.TopK(2), step=2), "longest"),
        (mask_random(like=mask_top_sinks(2)), "longest"),
        (at_steps(mask_top_sinks(2), range(3, 9)), "longest"),
        (at_progress(mask_top_sinks(2), (0.2, 0.6)), "longest"),
        (ablate("z", positions="masked"), "alone"),
        (at_progress(mask_top_sinks(2), late), "alone"),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_hooked_rows_share_runs_and_leave_early_where_the_hook_allows_it(
    llada: Any, hook: Any, blocks: str
) -> None:
    prompts = texts(5, 2, 9)
    lengths = {len(ids(llada, prompt)) for prompt in prompts}
    assert len(lengths) > 1
    full = [alone(llada, prompt, hooks=[hook]) for prompt in prompts]
    stops = [llada.tokenizer.decode([tokens[place]]) for tokens, place in zip(full, (1, 5, 2, 3, 6), strict=True)]
    expected = [until(llada, tokens, *stops) for tokens in full]
    with counted(llada) as rows:
        found = HarnessLM(llada, hooks=[hook]).generate_until(requests(prompts, until=stops))
    assert found == expected
    ended = [block_of_end(llada, tokens, stops) for tokens in full]
    assert max(ended) < 4
    passes = 2 if getattr(hook, "needs_clean_pass", False) else 1
    if blocks == "own":
        assert sum(rows) == 4 * sum(ended) * passes
    elif blocks == "longest":
        assert rows == [5] * 4 * max(ended)
    else:
        assert len(rows) >= 4 * len(lengths)


@pytest.mark.long
def test_no_padding_stands_beside_a_hook_that_counts_from_the_beginning(llada: Any) -> None:
    prompts = [*texts(3, 4, 4), *texts(2, 7, 7)]
    hook, padded = mask_positions(1), []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        padded.append("attention_mask" in kwargs)

    handle = llada.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        found = HarnessLM(llada, hooks=[hook]).generate_until(requests(prompts))
        assert not any(padded)
        HarnessLM(llada, hooks=[mask_positions(-1)]).generate_until(requests(prompts))
        assert any(padded)
    finally:
        handle.remove()
    assert found == [until(llada, alone(llada, prompt, hooks=[hook])) for prompt in prompts]
    assert found != HarnessLM(llada).generate_until(requests(prompts))


def test_an_ar_row_stops_at_its_stop_sequence(causal: Any) -> None:
    prompts = texts(3, 3, 9)
    settings = {"gen_length": 60}
    full = [alone(causal, prompt, **settings) for prompt in prompts]
    stops = [causal.tokenizer.decode(tokens[3:4]) for tokens in full]
    with counted(causal) as rows:
        found = HarnessLM(causal, generation=settings).generate_until(requests(prompts, until=stops))
    assert found == [until(causal, tokens, *stops) for tokens in full]
    assert len(rows) < 20  # looked for every eight tokens


def test_an_ar_row_whose_text_goes_on_is_not_ended_by_another(causal: Any) -> None:
    prompts, settings = texts(6, 3, 9), {"gen_length": 40}
    full = [alone(causal, prompt, **settings) for prompt in prompts]
    pairs = [(one, other) for one in range(6) for other in range(6)]
    early, late, stop = next(
        (one, other, stop)
        for one, other in pairs
        for stop in map(causal.tokenizer.decode, [[token] for token in full[one][:4]])
        if stop in until(causal, full[one]) and stop not in until(causal, full[other]) and len(full[other]) > 24
    )
    found = HarnessLM(causal, generation=settings, batch_size=2).generate_until(
        requests([prompts[early], prompts[late]], until=[stop])
    )
    assert found == [until(causal, full[early], stop), until(causal, full[late])]


def test_the_settings_win_over_the_task_and_the_task_over_the_model(llada: Any) -> None:
    prompt = "w1 w2 w3"
    given = {"max_gen_toks": 8, "do_sample": False, "num_beams": 3}
    assert HarnessLM(llada).generate_until(requests([prompt], **given)) == [
        until(llada, alone(llada, prompt, gen_length=8))
    ]
    lm = HarnessLM(llada, generation={"gen_length": 12, "block_length": 12, "remasking": "random"})
    expected = alone(
        llada, prompt, gen_length=12, block_length=12, remasking="random", seed=request_seed(0, prompt)
    )
    assert lm.generate_until(requests([prompt], **given)) == [until(llada, expected)]


def test_unknown_wishes_of_a_task_are_told(llada: Any, caplog: pytest.LogCaptureFixture) -> None:
    HarnessLM(llada).generate_until(requests(["w1"], repetition_penalty=1.2))
    assert "repetition_penalty" in caplog.text


def test_the_canvas_length_leaves_the_rest_to_the_answer(llada: Any) -> None:
    lm = HarnessLM(llada, generation={"canvas_length": 12, "block_length": 1})
    prompts = ["w1 w2 w3 w4", "w5 w6"]
    found = lm.generate_until(requests(prompts))
    expected = [alone(llada, p, gen_length=n, block_length=1) for p, n in zip(prompts, (8, 10), strict=True)]
    assert found == [until(llada, tokens) for tokens in expected]
    with pytest.raises(ValueError, match="fills the canvas_length"):
        HarnessLM(llada, generation={"canvas_length": 3}).generate_until(requests(["w1 w2 w3"]))


def test_two_stages_read_the_first_text_as_a_prompt() -> None:
    model = tiny("smdm")
    settings = {"canvas_length": 20, "steps": 5, "temperature": 0.5, "remasking": "greedy", "stages": 2}
    lm = HarnessLM(model, generation=settings)
    prompt = "w1 w2 w3"
    (found,) = lm.generate_until(requests([prompt]))
    common = {"steps": 5, "temperature": 0.5, "remasking": "greedy"}
    seed = request_seed(0, prompt)
    first = dl.denoise(model, [1, 2, 3], gen_length=17, seed=seed, **common).tokens[0].tolist()
    text = model.tokenizer.decode(first, skip_special_tokens=True)
    second = ids(model, text)
    left = max(1, 20 - len(second))
    run = dl.denoise(model, second, gen_length=left, seed=request_seed(seed, "second stage"), **common)
    assert found == model.tokenizer.decode(run.tokens[0].tolist(), skip_special_tokens=True)


def test_the_first_of_two_stages_heeds_no_stop(llada: Any) -> None:
    prompt = "w1 w2 w3"
    first = alone(llada, prompt)
    stop = llada.tokenizer.decode(first[1:2])
    (found,) = HarnessLM(llada, generation={"stages": 2}).generate_until(requests([prompt], until=[stop]))
    text = llada.tokenizer.decode([*ids(llada, prompt), *first], skip_special_tokens=True)
    second = [*ids(llada, text), *alone(llada, text)]
    assert found == llada.tokenizer.decode(second, skip_special_tokens=True)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_two_stages_read_what_stands_behind_an_end_too_whoever_is_in_the_batch(temperature: float) -> None:
    settings = {"steps": 16, "gen_length": 16, "block_length": 4}
    model = tiny("llada", sampler_defaults=settings)
    prompts, common = texts(3, 3, 9), {**settings, "temperature": temperature}
    firsts = [alone(model, prompt, seed=request_seed(0, prompt), **common) for prompt in prompts]
    model.config.eos_token_id = firsts[0][1]  # in the first of four blocks
    expected = []
    for prompt, first in zip(prompts, firsts, strict=True):
        text = model.tokenizer.decode([*ids(model, prompt), *first], skip_special_tokens=True)
        seed = request_seed(request_seed(0, prompt), "second stage")
        whole = [*ids(model, text), *alone(model, text, seed=seed, **common)]
        expected.append(model.tokenizer.decode(whole, skip_special_tokens=True))
    for batch in (1, None):
        lm = HarnessLM(model, batch_size=batch, generation={"stages": 2, "temperature": temperature})
        assert lm.generate_until(requests(prompts)) == expected


def test_a_block_that_draws_is_never_left_early(llada: Any) -> None:
    generator = Generator(llada)
    assert generator._continues({})
    for settings in ({"temperature": 0.5}, {"cfg_scale": 1.0}, {"remasking": "random"}):
        assert not generator._continues(settings)
    assert not Generator(tiny("dream"))._continues({})
    drawing = tiny("llada")
    drawing.sampler_defaults = {**drawing.sampler_defaults, "temperature": 0.5}
    assert not Generator(drawing)._continues({"temperature": None})  # the model's own, as in `denoise`
    assert Generator(tiny("mmada"))._continues({"remasking": "low_confidence"})
    assert not Generator(tiny("mmada"))._continues({"remasking": "low_confidence", "eot_token": 5})


def test_both_halves_of_the_models_own_guidance_take_memory() -> None:
    generator, job = Generator(tiny("smdm")), Job(0, [3, 4, 5], 0, (), 8, ())
    own, none, without = (generator._rows(job, given) for given in ({}, {"cfg_scale": None}, {"cfg_scale": 0.0}))
    assert own == none == without // 2


def test_a_default_block_that_does_not_divide_the_answer_takes_the_memory_of_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("llada")
    monkeypatch.setattr(generation_requests, "LOGITS", 100 * model.get_output_embeddings().weight.shape[0])
    model.sampler_defaults = {**model.sampler_defaults, "block_length": 8}  # `denoise` makes one block of 20
    job = Job(0, [3, 4, 5], 0, (), 20, ())
    default, whole, short = (
        Generator(model)._rows(job, {"gen_length": 20, **given})
        for given in ({}, {"block_length": 20}, {"block_length": 4})
    )
    assert (default, whole, short) == (5, 5, 25)  # 100 positions of logits


def test_what_tasks_ask_for_is_not_mixed(llada: Any) -> None:
    prompts = texts(2, 4, 4)
    both = [*requests(prompts[:1], temperature=1.0, do_sample=True), *requests(prompts[1:])]
    expected = [
        until(llada, alone(llada, prompts[0], temperature=1.0, seed=request_seed(0, prompts[0]))),
        until(llada, alone(llada, prompts[1])),
    ]
    assert HarnessLM(llada).generate_until(both) == expected
    assert HarnessLM(llada).generate_until(both[::-1]) == expected[::-1]


def test_stop_sequences_may_be_left_alone(llada: Any) -> None:
    prompt = "w1 w2 w3"
    full = alone(llada, prompt)
    stop = llada.tokenizer.decode(full[1:2])
    request = requests([prompt], until=[stop])
    assert HarnessLM(llada, generation={"stop": False}).generate_until(request) == [until(llada, full)]
    assert HarnessLM(llada).generate_until(request) == [until(llada, full, stop)] != [until(llada, full)]


@pytest.mark.parametrize("value", ["0", "x", -1, 0])
def test_a_batch_size_that_is_none(llada: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        HarnessLM(llada, batch_size=value)


def test_auto_batches_keep_within_the_budget(llada: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scoring.POSITIONS, "cpu", 80)
    with counted(llada) as rows:
        HarnessLM(llada).generate_until(requests([*texts(6, 4, 4)]))
    assert max(rows) == 80 // (4 + 16)
    with counted(llada) as rows:
        HarnessLM(llada, generation={"cfg_scale": 1.0}).generate_until(requests([*texts(6, 4, 4)]))
    assert max(rows) == 80 // (4 + 16)  # both halves


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"gen_length": 10, "block_length": 4, "steps": 10}, "10 does not divide into blocks of block_length 4"),
     ({"gen_length": 16, "block_length": 4, "steps": 10}, "10 steps do not divide into 4 blocks")],
)  # fmt: skip
def test_lengths_that_do_not_divide_are_refused_before_any_forward(settings: Any, said: str, llada: Any) -> None:
    lm = HarnessLM(llada, generation=settings)
    with counted(llada) as rows, pytest.raises(ValueError, match=said):
        lm.generate_until(ask("generate_until", (texts(1, 3, 4)[0], {"until": []})))
    assert rows == []


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 4, "options": {"threshold": 0.95}},
        {"steps": 4, "options": {"factor": 0.5}},
        {"steps": 4, "temperature": 0.8, "options": {"threshold": 0.95}},
        {"steps": 4, "cfg_scale": 0.7, "options": {"factor": 0.5}},
        {"steps": 4, "options": {"cache": "dual", "threshold": 0.5}},
        {"steps": 32, "options": {"cache": "dual"}},
        {"steps": 32, "temperature": 0.8, "options": {"cache": "prefix"}},
        {"steps": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [[], ["w5", "w2 w"]], ids=["no stop", "stops"])
def test_blocks_of_any_number_of_steps(settings: dict[str, Any], stop: list[str], llada: Any) -> None:
    # A threshold takes as many steps as it needs, and a cache leaves out those with nothing to decide.
    settings, prompts = {"gen_length": 16, "block_length": 8, **settings}, texts(5, 1, 12)
    lm = HarnessLM(llada, generation=settings, batch_size=3)
    found = lm.generate_until(ask("generate_until", *((prompt, {"until": stop}) for prompt in prompts)))
    given = {**settings, **settings.get("options", {})}
    given.pop("options", None)
    for prompt, text in zip(prompts, found, strict=True):
        answer = alone(llada, prompt, **given, seed=request_seed(0, prompt))
        assert text == until(llada, answer, *stop)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"options": {"threshold": 0.9}}], ids=str)
def test_masks_in_a_prompt_are_filled_in_once(settings: dict[str, Any], llada: Any) -> None:
    settings = {"gen_length": 12, "steps": 12, "block_length": 4, **settings}
    prompts = ["w4 [MASK] w5 w6 [MASK] w7", "w8 w9 w1", "[MASK] w8"]
    found = HarnessLM(llada, generation=settings, batch_size=3).generate_until(requests(prompts))
    given = {**settings, **settings.get("options", {})}
    given.pop("options", None)
    for prompt, text in zip(prompts, found, strict=True):
        answer = alone(llada, prompt, **given, seed=request_seed(0, prompt))
        assert text == until(llada, answer)


@pytest.mark.parametrize("family", ["llada", "causal"])
def test_an_empty_context_begins_with_the_end_of_text(family: str) -> None:
    model, settings = tiny(family), {"gen_length": 6}
    (text, other) = HarnessLM(model, generation=settings).generate_until(requests(["", "w3 w4"]))
    run = dl.denoise(model, [[model.config.eos_token_id]], **settings, seed=request_seed(0, ""))
    assert text == until(model, run.tokens[0, 1:].tolist())
    assert other == until(model, alone(model, "w3 w4", **settings, seed=request_seed(0, "w3 w4")))


def test_a_second_stage_after_a_text_of_special_tokens_begins_with_the_end_of_text(llada: Any) -> None:
    """It had no prompt, and the evaluation ended with an error."""
    jobs = HarnessLM(llada, generation={"stages": 2, "gen_length": 4}).jobs
    assert jobs.second_stage(jobs.job(0, ("w1", {}), 0), "").prompt == [llada.config.eos_token_id]


def test_an_answer_that_grows_by_blocks_ends_with_its_text() -> None:
    """dLLM-Var has no number of steps, which was looked for."""
    model, settings = tiny("llada", sampler="dllm_var"), {"gen_length": 12, "block_length": 4}
    prompts = texts(3, 2, 9)
    answers = [alone(model, prompt, **settings) for prompt in prompts]
    lm = HarnessLM(model, generation=settings, batch_size=2)
    for stop in ([], [model.tokenizer.decode([answers[0][1]])]):
        with counted(model) as rows:
            found = lm.generate_until(requests(prompts[:1], until=stop))
        assert len(rows) == 4 if stop else len(rows) > 8  # a block has four steps at most
        assert found == [until(model, answers[0], *stop)]
        every = [until(model, answer, *stop) for answer in answers]
        assert lm.generate_until(requests(prompts, until=stop)) == every


@pytest.mark.parametrize("length", [0, -3])
def test_an_answer_of_no_tokens_is_refused(length: int, llada: Any) -> None:
    with pytest.raises(ValueError, match=f"max_gen_toks={length} tokens; give at least 1"):
        HarnessLM(llada).generate_until(requests(["w1"], max_gen_toks=length))
    settings = {"gen_length": 4, "steps": 4}
    assert HarnessLM(llada, generation=settings).generate_until(requests(["w1"], max_gen_toks=length))


@pytest.mark.parametrize("stop", [[], ["w7"]], ids=["no stop", "stops"])
def test_masks_that_reference_quirks_decide_are_left_in_their_block(stop: list[str]) -> None:
    model, settings = tiny("llada"), {"gen_length": 8, "block_length": 4, "steps": 8}
    with torch.no_grad():
        model.get_output_embeddings().weight[model.config.mask_token_id] *= 6  # often the likeliest token
    prompts = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w3 w1"]
    lm = HarnessLM(model, generation={**settings, "options": {"reference_quirks": True}})
    found = lm.generate_until(requests(prompts, until=stop))
    answers = [alone(model, prompt, **settings, reference_quirks=True) for prompt in prompts]
    assert sum(model.config.mask_token_id in answer for answer in answers) > 1
    assert found == [until(model, answer, *stop) for answer in answers]
