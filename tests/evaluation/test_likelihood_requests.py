"""Likelihood requests: against float64 references, whatever the order and the batch."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM
from dlm_lens.evaluation.likelihood_requests import greedy_settings
from dlm_lens.evaluation.settings import LikelihoodSettings, request_seed
from dlm_lens.hooks import (
    at_encoder,
    at_layers,
    attach_hooks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_top_sinks,
)
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import RateCorruption
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask, counted, ids, texts, words
from tests.reference import forward64


def mixed(count: int = 9) -> list[tuple[str, str]]:
    return list(zip(texts(count, 2, 9), (f" {text}" for text in texts(count, 1, 5, seed=1)), strict=True))


def valued(lm: Any, pairs: list[tuple[str, str]]) -> list[float]:
    return [value for value, _ in lm.loglikelihood(ask("loglikelihood", *pairs))]


def chain64(model: Any, context: list[int], answer: list[int]) -> float:
    """sum_i ln p(token i | context, answer before i, the rest masked), one forward per token, in float64."""
    total = 0.0
    for number, token in enumerate(answer):
        canvas = context + answer[:number] + [model.config.mask_token_id] * (len(answer) - number)
        logits = forward64(model, torch.tensor([canvas]))["logits"][0]
        total += float(logits[len(context) + number].log_softmax(-1)[token])
    return total


def test_chain_rule_is_the_float64_sum(llada: Any) -> None:
    requests = ask("loglikelihood", *mixed())
    lm = HarnessLM(llada, likelihood={"method": "chain_rule", "is_greedy": False})
    for (value, _), request in zip(lm.loglikelihood(requests), requests, strict=True):
        context, answer = (ids(llada, text) for text in request.args)
        assert value == pytest.approx(chain64(llada, context, answer), abs=2e-4)  # float32 against float64


def test_greedy_decoding_has_the_blocks_of_the_likelihood() -> None:
    model = tiny("sdar")
    contexts = texts(12, 2, 9)
    with pytest.warns(UserWarning, match="trained with blocks of 4"):
        runs = [
            dl.denoise(model, context, gen_length=4, block_length=2, temperature=0, stop_tokens=())
            for context in contexts
        ]
    written = [run.tokens[0, run.prompt_length :][:4] for run in runs]
    pairs = [(text, " " + model.tokenizer.decode(answer)) for text, answer in zip(contexts, written, strict=True)]
    found = {
        length: [
            same
            for _, same in HarnessLM(
                model, likelihood={"is_greedy": True, "samples": 2, "options": {"block_length": length}}
            ).loglikelihood(ask("loglikelihood", *pairs))
        ]
        for length in (2, 4)
    }
    assert all(found[2])
    assert not all(found[4])  # other blocks write other tokens


def test_greedy_is_what_one_by_one_decoding_writes(llada: Any) -> None:
    contexts = texts(6, 2, 9)
    written = []
    for context in contexts:
        canvas = ids(llada, context) + [llada.config.mask_token_id] * 3
        for _ in range(3):
            likely = forward64(llada, torch.tensor([canvas]))["logits"][0].softmax(-1)
            likely[:, llada.config.mask_token_id] = 0.0
            best, token = likely.max(-1)
            left = torch.tensor([one == llada.config.mask_token_id for one in canvas])
            place = int(best.masked_fill(~left, -1).argmax())
            canvas[place] = int(token[place])
        written.append(canvas[-3:])
    right = [
        (context, " " + llada.tokenizer.decode(answer)) for context, answer in zip(contexts, written, strict=True)
    ]
    wrong = [
        (context, " " + llada.tokenizer.decode([*answer[:2], (answer[2] + 1) % 60]))
        for context, answer in zip(contexts, written, strict=True)
    ]
    lm = HarnessLM(llada, likelihood={"samples": 4})
    assert [same for _, same in lm.loglikelihood(ask("loglikelihood", *right))] == [True] * 6
    assert [same for _, same in lm.loglikelihood(ask("loglikelihood", *wrong))] == [False] * 6


def test_an_ar_model_scores_value_and_greediness_in_one_forward(causal: Any) -> None:
    requests = ask("loglikelihood", *mixed())
    expected = []
    for request in requests:
        context, answer = (ids(causal, text) for text in request.args)
        logits = forward64(causal, torch.tensor([context + answer]), causal=True)["logits"][0]
        rows = logits[len(context) - 1 : -1].log_softmax(-1)
        expected.append((float(rows[range(len(answer)), answer].sum()), rows.argmax(-1).tolist() == answer))
    # One continuation that greedy decoding does write.
    context = ids(causal, requests[0].args[0])
    best = int(forward64(causal, torch.tensor([context]), causal=True)["logits"][0, -1].argmax())
    requests += ask("loglikelihood", (requests[0].args[0], f" w{best}"))
    with counted(causal) as rows:
        found = HarnessLM(causal).loglikelihood(requests)
    assert len(rows) == 1
    assert rows == [len(requests)]
    for (value, same), (reference, greedy) in zip(found, expected, strict=False):
        assert value == pytest.approx(reference, abs=1e-4)
        assert same == greedy
    assert found[-1][1] is True


@pytest.mark.parametrize("method", ["mc", "chain_rule"])
def test_neither_order_nor_batch_changes_a_value(llada: Any, method: str) -> None:
    pairs = mixed()

    def run(batch: int | None, order: list[int]) -> dict[int, tuple[float, bool]]:
        lm = HarnessLM(llada, likelihood={"method": method, "samples": 8}, batch_size=batch)
        found = lm.loglikelihood(ask("loglikelihood", *(pairs[number] for number in order)))
        return dict(zip(order, found, strict=True))

    usual = run(None, list(range(9)))
    for batch, order in ((1, list(range(9))), (3, [8, 2, 5, 0, 1, 7, 3, 6, 4]), (None, [4])):
        for number, (value, same) in run(batch, order).items():
            assert value == pytest.approx(usual[number][0], abs=1e-4)  # rounding of other matrix shapes
            assert same == usual[number][1]


def test_continuations_of_one_context_share_their_masks(llada: Any) -> None:
    pairs = [("w1 w2 w3", " w4 w5 w6"), ("w1 w2 w3", " w7 w8 w9")]
    values = [
        value
        for value, _ in HarnessLM(llada, likelihood={"samples": 8}, seed=5).loglikelihood(
            ask("loglikelihood", *pairs)
        )
    ]
    seed = request_seed(5, "w1 w2 w3")
    direct = dl.log_likelihood(llada, [1, 2, 3], [[4, 5, 6], [7, 8, 9]], samples=8, seed=[seed, seed]).value
    assert values == pytest.approx(direct.tolist(), abs=1e-5)
    other = [
        value
        for value, _ in HarnessLM(llada, likelihood={"samples": 8}, seed=6).loglikelihood(
            ask("loglikelihood", *pairs)
        )
    ]
    assert values != pytest.approx(other, abs=1e-3)


def test_a_document_with_choices_is_not_decoded_greedily(llada: Any) -> None:
    pairs = [("w1 w2", " w3 w4"), ("w1 w2", " w5 w6")]
    settings = {"method": "chain_rule"}
    with counted(llada) as rows:
        HarnessLM(llada, likelihood=settings).loglikelihood(ask("loglikelihood", *pairs, same_document=True))
    assert sum(rows) == 3  # two tokens each, and the fully masked canvas in common
    with counted(llada) as rows:
        HarnessLM(llada, likelihood=settings).loglikelihood(ask("loglikelihood", *pairs))
    assert sum(rows) == 5  # and the two canvases of the completion, which is the same for both
    with counted(llada) as rows:
        HarnessLM(llada, likelihood={**settings, "is_greedy": False}).loglikelihood(ask("loglikelihood", *pairs))
    assert sum(rows) == 3
    # One that a metric of the task reads.
    lm = HarnessLM(llada, likelihood=settings)
    lm.greedy_tasks = frozenset(["task"])
    with counted(llada) as rows:
        lm.loglikelihood(ask("loglikelihood", *pairs, same_document=True))
    assert sum(rows) == 5


def test_a_greedy_completion_as_the_value(llada: Any) -> None:
    (written,) = dl.log_likelihood(llada, [1, 2, 3], [4, 5], "greedy_completion").completions
    right = f" {llada.tokenizer.decode(written)}"
    wrong = f" {llada.tokenizer.decode([written[0], (written[1] + 1) % 60])}"
    lm = HarnessLM(llada, likelihood={"method": "greedy_completion", "is_greedy": False})
    found = lm.loglikelihood(ask("loglikelihood", ("w1 w2 w3", right), ("w1 w2 w3", wrong)))
    assert found == [(0.0, True), (-float("inf"), False)]


def test_what_greedy_decoding_writes_is_kept_apart(llada: Any) -> None:
    context = "w1 w2 w3"
    (written,) = dl.log_likelihood(llada, [1, 2, 3], [4], "greedy_completion").completions
    pair = (context, f" {llada.tokenizer.decode(written)}")
    requests = [*ask("loglikelihood", (context, " w4"), pair, same_document=True), *ask("loglikelihood", pair)]
    requests[-1].doc_id = 1
    lm = HarnessLM(llada, likelihood={"method": "chain_rule"})
    assert [same for _, same in lm.loglikelihood(requests)] == [False, False, True]


def test_equal_requests_are_computed_once(llada: Any) -> None:
    lm = HarnessLM(llada, likelihood={"method": "chain_rule", "is_greedy": False})
    with counted(llada) as rows:
        found = lm.loglikelihood(ask("loglikelihood", *[("w1", " w2 w3")] * 5))
    assert sum(rows) == 2
    assert len(set(found)) == 1
    assert len(found) == 5


def test_hooks_are_in_force_and_no_padding_stands_beside_them(llada: Any) -> None:
    pairs = mixed()
    hook = mask_positions(0)
    lm = HarnessLM(llada, hooks="mask_positions(0)", likelihood={"method": "chain_rule", "is_greedy": False})
    assert lm.hooks == (hook,)
    values = [value for value, _ in lm.loglikelihood(ask("loglikelihood", *pairs))]
    plain = [
        value for value, _ in HarnessLM(llada, likelihood=lm.likelihood).loglikelihood(ask("loglikelihood", *pairs))
    ]
    for value, other, (context, answer) in zip(values, plain, pairs, strict=True):
        with attach_hooks(llada, hook):
            alone = dl.log_likelihood(llada, ids(llada, context), ids(llada, answer), "chain_rule")
        assert value == pytest.approx(float(alone), abs=1e-4)
        assert abs(value - other) > 1e-3  # far above rounding: the hook did something


@pytest.mark.parametrize(
    "hook",
    [
        mask_top_sinks(2),
        mask_sinks(dl.AboveMean(0.3), stage="after", keep_self=True),
        mask_random(3, seed=4),
        mask_random(like=mask_top_sinks(1), match="mass"),
        keep_only(1, 4),
        mask_positions(-1, stage="after"),
    ],
    ids=repr,
)
def test_hooked_requests_of_unequal_length_share_forwards(llada: Any, hook: Any) -> None:
    pairs = mixed()
    lm = HarnessLM(llada, hooks=[hook], likelihood={"method": "chain_rule", "is_greedy": False})
    with counted(llada) as rows:
        values = [value for value, _ in lm.loglikelihood(ask("loglikelihood", *pairs))]
    assert len(rows) < len({len(ids(llada, context + answer)) for context, answer in pairs})
    for value, (context, answer) in zip(values, pairs, strict=True):
        with attach_hooks(llada, hook):
            alone = dl.log_likelihood(llada, ids(llada, context), ids(llada, answer), "chain_rule", batch_size=1)
        # float32 sums in another order.
        assert value == pytest.approx(float(alone), abs=1e-4)


def test_around_is_entered_for_every_chunk(llada: Any) -> None:
    from contextlib import contextmanager

    entered = []

    @contextmanager
    def listening(model: Any) -> Any:
        entered.append(model)
        yield

    lm = HarnessLM(llada, around=listening, likelihood={"method": "chain_rule", "is_greedy": False})
    lm.loglikelihood(ask("loglikelihood", ("w1", " w2"), ("w1 w3", " w2"), ("w4", " w5")))
    lm.generate_until(ask("generate_until", ("w1", {"until": []})))
    assert entered == [llada] * 3  # two lengths, one generation


class TestRolling:
    def test_an_ar_text_is_the_float64_sum_behind_the_prefix(self, causal: Any) -> None:
        text = words(3, 1, 4, 1, 5)
        (value,) = HarnessLM(causal).loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
        whole = [causal.config.eos_token_id, 3, 1, 4, 1, 5]
        rows = forward64(causal, torch.tensor([whole]), causal=True)["logits"][0, :-1].log_softmax(-1)
        assert value == pytest.approx(float(rows[range(5), whole[1:]].sum()), abs=1e-4)

    def test_windows_cover_every_token_once(self, causal: Any) -> None:
        numbers = [int(i) for i in torch.randint(0, 60, (23,), generator=torch.Generator().manual_seed(3))]
        text = words(*numbers)
        lm = HarnessLM(causal, max_length=8)
        windows = lm.items.windows(0, text)
        assert [token for item in windows for token in item.continuation] == numbers
        assert all(item.length <= 8 for item in windows)
        assert len({item.seed for item in windows}) == len(windows) > 2
        (value,) = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
        whole, expected = [causal.config.eos_token_id, *numbers], 0.0
        # Windows of 7 predicted tokens, the last with as much context as fits.
        for start, stop in ((0, 7), (7, 14), (14, 21)):
            expected += span64(causal, whole[start : stop + 1], 7)
        expected += span64(causal, whole[23 - 7 : 24], 2)
        assert value == pytest.approx(expected, abs=1e-4)

    def test_a_diffusion_model_is_scored_too(self, llada: Any) -> None:
        lm = HarnessLM(llada, likelihood={"method": "chain_rule"})
        values = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (words(3, 1, 4),), (words(5, 9),)))
        assert values == pytest.approx(
            [chain64(llada, [llada.config.eos_token_id], one) for one in ([3, 1, 4], [5, 9])], abs=1e-4
        )

    @pytest.mark.parametrize("append_eos", [False, True])
    @pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16])
    def test_dreams_windows_score_every_token_once(self, count: int, append_eos: bool) -> None:
        """By hand: the mean over the masks of each window of the losses over their rates, none of them spared."""
        model = tiny("dream")
        settings = {"samples": 8, "strata": 8, "append_eos": append_eos}
        lm = HarnessLM(model, max_length=8, likelihood=settings, seed=1)
        numbers = [1 + place % 50 for place in range(count)]
        text = words(*numbers)
        windows = lm.items.windows(0, text)
        ids = [*numbers, model.config.eos_token_id] if append_eos else numbers
        assert [token for item in windows for token in item.continuation] == ids
        expected = 0.0
        for number, item in enumerate(windows):
            draw = torch.Generator().manual_seed(request_seed(1, text, number))
            whole = torch.tensor([*item.context, *item.continuation])
            masks = RateCorruption(eps=1e-3).draw(
                Pair(whole[: len(item.context)], whole[len(item.context) :]), 8, draw
            )
            for masked, rate in zip(masks.masked, masks.rate, strict=True):
                logits = forward64(model, whole.masked_fill(masked, model.config.mask_token_id)[None])["logits"][0]
                logits = torch.cat([logits[:1], logits[:-1]])
                logs = logits.log_softmax(-1)[range(len(whole)), whole]
                expected += float(logs[masked].sum()) / float(rate) / 8
        (value,) = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
        assert value == pytest.approx(expected, rel=1e-4)

    def test_the_authors_settings_of_dream_are_scored_too(self) -> None:
        settings = {"samples": 4, "append_eos": True, "options": {"protect_ends": True, "scope": "answer"}}
        lm = HarnessLM(tiny("dream"), max_length=8, likelihood=settings)
        given = HarnessLM(tiny("dream"), max_length=8, likelihood={"samples": 4, "append_eos": True})
        requests = ask("loglikelihood_rolling", (words(*range(1, 9)),))
        assert lm.loglikelihood_rolling(requests) == given.loglikelihood_rolling(requests)


def span64(model: Any, tokens: list[int], scored: int) -> float:
    """Log-likelihood of the last `scored` tokens, given those before."""
    rows = forward64(model, torch.tensor([tokens]), causal=True)["logits"][0, :-1].log_softmax(-1)
    return float(rows[range(len(tokens) - 1), tokens[1:]][-scored:].sum())


def test_dreams_continuation_ends_with_the_end_token(llada: Any) -> None:
    model = tiny("dream")
    settings = {"method": "mc", "samples": 8, "append_eos": True, "is_greedy": False}
    ((value, _),) = HarnessLM(model, likelihood=settings, seed=1).loglikelihood(
        ask("loglikelihood", ("w1 w2", " w3"))
    )
    seed = request_seed(1, "w1 w2")
    direct = dl.log_likelihood(model, [1, 2], [3, model.config.eos_token_id], samples=8, seed=seed)
    assert value == pytest.approx(float(direct), abs=1e-5)
    assert value < 0  # without the end token, a single token would be refused: its masks spare the last position
    with pytest.raises(ValueError, match="protect_ends never masks"):
        HarnessLM(model, likelihood={"samples": 8}).loglikelihood(ask("loglikelihood", ("w1 w2", " w3")))


def test_a_context_that_is_too_long_loses_its_beginning(llada: Any, caplog: pytest.LogCaptureFixture) -> None:
    lm = HarnessLM(llada, max_length=6, likelihood={"method": "chain_rule", "is_greedy": False})
    ((value, _),) = lm.loglikelihood(ask("loglikelihood", (words(*range(10)), " w11 w12")))
    assert value == pytest.approx(chain64(llada, [6, 7, 8, 9], [11, 12]), abs=1e-4)
    assert "cut from the left" in caplog.text


def test_nobody_who_stops_reading_leaves_hooks_behind(llada: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlm_lens.evaluation.likelihood_requests.CHUNK", 2)
    canvas = torch.tensor([[3, 9, 27, 14, 1, 40, 33, 8, 20]])
    plain = llada(input_ids=canvas).logits
    lm = HarnessLM(llada, hooks=mask_top_sinks(3), likelihood={"samples": 2, "is_greedy": False})
    read = lm._likelihoods(None).run([lm.items.item(n, pair, False) for n, pair in enumerate(mixed(4))])
    assert len(next(read)) == 2
    # The generator waits between two chunks, as it does for ever where writing the answers fails.
    assert llada(input_ids=canvas).logits.equal(plain)
    assert len(next(read)) == 2


class Far:
    """Edits key 20, which the short canvas of the trial does not have."""

    site = "pattern"

    def __call__(self, tensor: Any, hook: Any = None) -> Any:
        tensor = tensor.clone()
        tensor[..., 20] = 0
        return tensor


class Scaled:
    """Multiplies by a tensor with an axis of 26 positions."""

    site = "pattern"

    def __call__(self, tensor: Any, hook: Any = None) -> Any:
        return tensor * torch.linspace(0, 1, 26)


@pytest.mark.parametrize("hook", [Far(), Scaled(), mask_positions(20)], ids=["index", "shape", "position"])
def test_a_hook_of_longer_canvases_than_the_trial_is_for_the_requests_to_refuse(
    llada: Any, hook: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (pair,) = [(words(*range(24)), " w1 w2")]
    settings = {"method": "chain_rule", "is_greedy": False}
    (plain,) = valued(HarnessLM(llada, likelihood=settings), [pair])
    assert not caplog.records
    (hooked,) = valued(HarnessLM(llada, hooks=[hook], likelihood=settings), [pair])
    assert abs(hooked - plain) > 1e-3
    assert "needs the steps of a run, which likelihoods do not have, is not known beforehand" in caplog.text
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        valued(HarnessLM(llada, hooks=[hook], likelihood={"method": "chain_rule"}), [("w1", " w2")])


def test_what_is_wrong_on_every_canvas_is_raised_by_the_trial(llada: Any) -> None:
    class Broken:
        site = "pattern"

        def __call__(self, tensor: Any, hook: Any = None) -> Any:
            return tensor + None

    with pytest.raises(TypeError, match="unsupported operand"):
        HarnessLM(llada, hooks=[Broken()]).check_likelihoods()
    with pytest.raises(ValueError, match="layer 7 of 2"):
        HarnessLM(llada, hooks=[at_layers(mask_positions(0), 7)]).check_likelihoods()
    with pytest.raises(ValueError, match="has no encoder"):
        HarnessLM(llada, hooks=[at_encoder(mask_positions(0))]).check_likelihoods()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("family", "continuation", "says"),
    [
        ("llada", " w2 [MASK]", r"the continuation 'w2 \[MASK\]' holds the mask token 63"),
        ("dream", " w2", "the continuation 'w2' has a single token, and protect_ends never"),
    ],
)
def test_a_request_without_a_likelihood_is_named_before_the_others_are_computed(
    family: str, continuation: str, says: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlm_lens.evaluation.likelihood_requests.CHUNK", 1)
    model = tiny(family)
    given = {"record_to": tmp_path / "recordings"} if recorded else {}
    lm = HarnessLM(model, likelihood={"samples": 2, "is_greedy": False}, responses=tmp_path / "a.jsonl", **given)
    # The longest request would be computed first.
    requests = ask("loglikelihood", (" ".join(["w1"] * 9), " w3 w4"), ("w1", continuation))
    with counted(model) as rows, pytest.raises(ValueError, match=says):
        lm.loglikelihood(requests)
    assert rows == []
    with pytest.raises(ValueError, match=says):
        lm.loglikelihood(requests)
    rolling = ask("loglikelihood_rolling", ("w5",))
    assert len(lm.loglikelihood_rolling(rolling)) == 1


def test_the_mask_token_of_a_model_of_random_tokens_is_refused_too() -> None:
    lm = HarnessLM(tiny("gidd"), likelihood={"samples": 2})
    with pytest.raises(ValueError, match="the continuation 'w2 w3' holds the mask token 3"):
        lm.loglikelihood(ask("loglikelihood", ("w1", " w2 w3"), same_document=True))
    (found,) = lm.loglikelihood(ask("loglikelihood", ("w1", " w2 w4")))
    assert math.isfinite(found[0])


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("method", [None, "mc"])
def test_uniform_noise_has_a_value_and_no_greedy_completion(
    method: str | None, recorded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A document with a single request, whose greedy completion is computed for other models."""
    model, requests = tiny("duo"), ask("loglikelihood", ("w1 w2", " w3 w4"))
    given: dict[str, Any] = {"record_to": tmp_path} if recorded else {}
    ((value, same),) = HarnessLM(model, likelihood={"samples": 8, "method": method}, **given).loglikelihood(
        requests
    )
    seed = request_seed(0, "w1 w2")
    assert value == pytest.approx(float(dl.log_likelihood(model, [1, 2], [3, 4], samples=8, seed=seed)), abs=1e-5)
    assert same is False
    assert "has no greedy completion" in caplog.text
    caplog.clear()
    HarnessLM(model, likelihood={"samples": 8, "is_greedy": False}).loglikelihood(requests)
    assert "has no greedy completion" not in caplog.text


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("family", "likelihood", "says"),
    [
        ("duo", {"is_greedy": True}, "is_greedy is True, and DuoForDiffusion .* give is_greedy=False"),
        ("duo", {"method": "chain_rule"}, "method='chain_rule' hides tokens with"),
        ("duo", {"cfg_scale": 1.0}, r"cfg_scale=1\.0 hides tokens with"),
        ("causal", {"cfg_scale": 1.0}, r"cfg_scale is 1\.0, but an AR model has no mask token to guide with"),
        ("causal", {"method": "mc"}, "an AR model has no masks to draw, its likelihood is exact"),
        ("sdlm", {"method": "mc"}, "the sampler 'sdlm' has no mc likelihood"),
        ("i_dlm", {"method": "mc"}, "the sampler 'i_dlm' has no mc likelihood"),
    ],
)
def test_settings_that_a_model_does_not_have_are_refused_before_any_work(
    family: str, likelihood: dict[str, Any], says: str, recorded: bool, tmp_path: Path
) -> None:
    """In `log_likelihood`'s words, whichever way the requests are computed."""
    model = tiny(family)
    given: dict[str, Any] = {"record_to": tmp_path} if recorded else {}
    lm = HarnessLM(model, likelihood={"samples": 8, **likelihood}, **given)
    requests = ask("loglikelihood", ("w1 w2", " w3 w4"), ("w1 w2", " w5 w6"), same_document=True)
    with counted(model) as rows, pytest.raises(ValueError, match=says):
        lm.loglikelihood(requests)
    assert rows == []
    rolling = ask("loglikelihood_rolling", ("w5 w6",))
    if "is_greedy" in likelihood:  # which whole texts do not read
        assert len(lm.loglikelihood_rolling(rolling)) == 1
    else:
        with pytest.raises(ValueError, match=says):
            lm.loglikelihood_rolling(rolling)


def test_greedy_decoding_is_checked_in_the_blocks_of_the_estimate() -> None:
    estimate = LikelihoodSettings("mc", 4, cfg_scale=0.5, options={"block_length": 4, "protect_ends": False})
    checked = LikelihoodSettings("greedy_completion", cfg_scale=0.5, options={"block_length": 4})
    assert greedy_settings(estimate) == checked
