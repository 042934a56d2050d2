"""Recording during an evaluation: every request as `dlm_lens.record` records it, and none asked again."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import dlm_lens as dl
from dlm_lens.attention import MIN_VIEWERS
from dlm_lens.evaluation import HarnessLM, RecordSettings, evaluate
from dlm_lens.evaluation.request_recordings import RequestBatch
from dlm_lens.evaluation.settings import request_seed
from dlm_lens.hooks import attach_hooks, mask_positions, mask_top_sinks
from dlm_lens.recording import ReceivedAttention, RecordingSet, TopKeys
from dlm_lens.sampling.samplers.wedlm import WeDLMSampler
from dlm_lens.testing import tiny
from tests.adapters.test_sdlm import visible_to
from tests.evaluation.conftest import ask, counted, ids, texts, words
from tests.evaluation.request_recordings import ARGUMENTS, WITHOUT_MASKS, equal, lines
from tests.reference import forward64
from tests.sampling.test_likelihood_blocks import block_model, blocks_of_4, causal_context, whole_prompt

SEEN: dict[str, Any] = {
    "a2d_qwen3": blocks_of_4,
    "nemotron_labs_diffusion": causal_context,
    "efficient_dlm": whole_prompt,
    "sdar": lambda query, key, start: key // 4 <= query // 4,
    "wedlm": None,
}
"""Families that are scored in blocks, and whether a query sees a key, where it is the same for all canvases."""


class TestGeneration:
    @pytest.mark.long
    @pytest.mark.parametrize("hooks", [(), (mask_top_sinks(2), mask_positions(1))], ids=["plain", "hooks"])
    @pytest.mark.parametrize("family", ["llada", "dream", "smdm", "causal", "mmada", "sink_qwen"])
    def test_a_recording_is_the_one_of_record(self, family: str, hooks: Any, tmp_path: Path) -> None:
        model, prompts = tiny(family), [*texts(2, 9, 12), texts(1, 3, 4)[0]]
        settings = {"gen_length": 8, "temperature": 0.5} | ({} if family == "causal" else {"steps": 4})
        reducers = (
            WITHOUT_MASKS if family == "causal" else (*WITHOUT_MASKS, ReceivedAttention("masked", min_viewers=1))
        )
        requests = ask("generate_until", *((prompt, {"until": ["w7"]}) for prompt in prompts))
        lm = HarnessLM(model, generation=settings, hooks=hooks, record=reducers, record_to=tmp_path, seed=3)
        found = lm.generate_until(requests)
        assert found == HarnessLM(model, generation=settings, hooks=hooks, seed=3).generate_until(requests)
        for number, prompt in enumerate(prompts):
            recording = dl.Recording.load(tmp_path / f"task/{number:05d}-0")
            seed = request_seed(3, prompt)
            wanted = dl.record(model, ids(model, prompt), reducers, hooks=hooks, seed=seed, **settings)
            equal(recording, wanted)
            assert recording.rows == (number,)
            assert recording.seeds == (seed,)
        assert [line["doc_id"] for line in lines(tmp_path)] == [0, 1, 2]
        assert [line["answer"] for line in lines(tmp_path)] == found

    def test_further_draws_and_equal_requests(self, llada: Any, tmp_path: Path) -> None:
        (request,) = ask("generate_until", ("w1 w2 w3", {"until": []}))
        lm = HarnessLM(llada, generation={"temperature": 1.0, "gen_length": 4, "steps": 4}, record_to=tmp_path)
        found = lm.generate_until([request] * 3)
        assert len({*found}) == 3
        assert [line["recordings"] for line in lines(tmp_path)] == [
            ["task/00000-0"], ["task/00000-0-r1"], ["task/00000-0-r2"],
        ]  # fmt: skip
        assert [llada.tokenizer.decode(one.run.tokens[0, 3:]) for one in RecordingSet(tmp_path / "task")] == found

    def test_both_stages_are_recorded(self, tmp_path: Path) -> None:
        model = tiny("smdm")
        settings = {"canvas_length": 20, "steps": 5, "temperature": 0.5, "remasking": "greedy", "stages": 2}
        requests = ask("generate_until", ("w1 w2 w3", {"until": []}))
        (found,) = HarnessLM(model, generation=settings, record_to=tmp_path).generate_until(requests)
        assert found == HarnessLM(model, generation=settings).generate_until(requests)[0]
        assert lines(tmp_path)[0]["recordings"] == ["task/00000-0", "task/00000-0-p1"]
        first, second = RecordingSet(tmp_path / "task")
        text = model.tokenizer.decode(first.run.tokens[0], skip_special_tokens=True)
        assert second.run.tokens[0, : second.prompt_length].tolist() == ids(model, text)


def relative64(pattern: torch.Tensor) -> torch.Tensor:
    """r_j / e_j of a full bidirectional pattern [head, query, key], where e_j is 1."""
    return pattern.sum(-2)


class TestLikelihoods:
    def test_the_canvases_of_the_chain_rule_in_float64(self, llada: Any, tmp_path: Path) -> None:
        context, answer, mask = [*range(1, 10)], [11, 12, 13], llada.config.mask_token_id
        lm = HarnessLM(llada, likelihood={"method": "chain_rule"}, record_to=tmp_path)
        requests = ask("loglikelihood", (words(*context), f" {words(*answer)}"))
        found = lm.loglikelihood(requests)
        recording = dl.Recording.load(tmp_path / "task/00000-0")
        wanted = [context + answer[:number] + [mask] * (3 - number) for number in range(3)]
        assert recording.tokens[:, 0].tolist() == wanted
        assert recording.masked[:, 0].sum(-1).tolist() == [3, 2, 1]
        assert recording.progress[:, 0].tolist() == pytest.approx([0, 1 / 3, 2 / 3])
        assert recording.answer[0].tolist() == [False] * 9 + [True] * 3
        for step, canvas in enumerate(wanted):
            kept = forward64(llada, torch.tensor([canvas]))
            for layer in recording.layers:
                sums = relative64(kept[f"pattern{layer}"][0]).float()
                # float32 attention against float64
                assert torch.allclose(recording.received[step, 0, layer], sums, atol=1e-5)
        assert found == HarnessLM(llada, likelihood={"method": "chain_rule"}).loglikelihood(requests)

    def test_the_chain_rule_of_an_sdlm_is_recorded_with_its_window(self, tmp_path: Path) -> None:
        model, context, answer = tiny("sdlm"), [*range(1, 10)], [11, 12, 13]
        requests = ask("loglikelihood", (words(*context), f" {words(*answer)}"))
        ((value, greedy),) = HarnessLM(model, record_to=tmp_path).loglikelihood(requests)
        wanted = dl.log_likelihood(model, context, answer)
        assert value == pytest.approx(float(wanted.value), rel=1e-5)
        same = dl.log_likelihood(model, context, answer, "greedy_completion").is_greedy
        assert greedy is bool(same[0])
        recording = dl.Recording.load(tmp_path / "task/00000-0")
        for step in range(3):
            ids = recording.tokens[step]
            visible = visible_to((ids[0] == model.config.mask_token_id).tolist(), 4)
            seen = visible[0, 0].double()
            even = (seen / seen.sum(-1, keepdim=True)).sum(0)
            torch.testing.assert_close(recording.expected()[step, 0].double(), even, atol=1e-5, rtol=1e-5)
            sums = forward64(model, ids, visible=visible)["pattern1"][0].sum(-2)
            found = recording.received[step, 0, 1]
            said = found.isfinite()
            assert said.equal((seen.sum(0) >= MIN_VIEWERS).expand_as(said))
            torch.testing.assert_close(found[said].double(), (sums / even)[said], atol=1e-5, rtol=1e-4)

    # Every method of every family, in turn plain and with a hook: each family and each method has both.
    @pytest.mark.parametrize(
        ("family", "method", "hooks"),
        [
            pytest.param(family, method, ((), (mask_positions(1),))[turn % 2], id=f"{family}-{method}")
            for turn, (family, method) in enumerate(product(SEEN, ("chain_rule", "mc", "greedy_completion")))
        ],
    )
    def test_a_model_that_is_scored_in_blocks_has_a_step_for_each(
        self, family: str, method: str, hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blocks of 4 after a prompt of 3, or from its first token, against float64 with what each sees."""
        sees = SEEN[family]
        monkeypatch.setattr(WeDLMSampler, "training_block_length", 4)
        model = block_model() if family == "a2d_qwen3" else tiny(family)
        model.config.sampler_defaults = {"block_length": 4}
        text, mask = torch.tensor([5, 9, 11, 12, 13, 14, 15, 16, 17]), model.config.mask_token_id
        requests = ask("loglikelihood", (words(*text[:3].tolist()), f" {words(*text[3:].tolist())}"))
        reducers = [ReceivedAttention(("all", "masked", "block"), min_viewers=1)]
        settings = {"method": method, **({"samples": 8} if method == "mc" else {})}
        lm = HarnessLM(model, likelihood=settings, hooks=hooks, record=reducers, record_to=tmp_path)
        ((value, _),) = lm.loglikelihood(requests)
        ((plain, _),) = HarnessLM(model, likelihood=settings, hooks=hooks).loglikelihood(requests)
        assert value == pytest.approx(plain, rel=1e-5)
        recording = dl.Recording.load(tmp_path / "task/00000-0")
        run, from_text = recording.run, family in ("sdar", "wedlm")
        spans = [(0, 4), (4, 8), (8, 9)] if from_text else [(3, 7), (7, 9)]
        if family == "wedlm" and method == "greedy_completion":  # its passes see the whole canvas
            spans = [(start, 9) for start, _ in spans]
        assert {*run.spans} == {*spans}
        assert run.blocks == tuple(map(spans.index, run.spans))
        if method == "chain_rule":
            assert run.masked[:-1, 0].sum(-1).tolist() == [6, 5, 4, 3, 2, 1]
        for step, (start, stop) in enumerate(run.spans):
            ids = run.canvases[step, 0, :stop]
            assert (run.canvases[step, 0, stop:] == mask).all()
            if method != "greedy_completion":
                assert ids[ids != mask].equal(text[:stop][ids != mask])
            if family == "wedlm":
                order = torch.tensor(
                    sorted(range(stop), key=lambda i, ids=ids: (bool(ids[i] == mask), i))
                ).argsort()
                seen = order <= order[:, None]
            else:
                seen = torch.tensor([[sees(q, k, start) for k in range(stop)] for q in range(stop)])
            hidden = seen & (torch.arange(stop) != 1) if hooks else seen
            kept = forward64(model, ids[None], visible=hidden[None, None])
            classes = {"all": torch.ones_like(ids) > 0, "masked": ids == mask, "block": torch.arange(stop) >= start}
            for name, queries in classes.items():
                even = (seen[queries].double() / seen[queries].sum(-1, keepdim=True)).sum(0)
                expected = recording.expected(name)[step, 0]
                torch.testing.assert_close(expected[:stop].double(), even, atol=1e-5, rtol=1e-5)
                assert not expected[stop:].any()
                found = (recording.received if name == "all" else getattr(recording, f"received_{name}"))[step, 0]
                said = even > 0
                assert found.isfinite().equal(pad(said, (0, 9 - stop)).expand_as(found))
                for layer in range(2):
                    sums = kept[f"pattern{layer}"][0][:, queries].sum(-2)
                    got = found[layer][:, :stop][:, said].double() * even[said]
                    torch.testing.assert_close(got, sums[:, said], atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("hooks", [(), (mask_positions(2),)], ids=["plain", "hooks"])
    def test_random_masks_are_each_a_step(self, llada: Any, hooks: Any, tmp_path: Path) -> None:
        context, answer = [*range(1, 9)], [11, 12, 13, 14]
        settings = {"samples": 16, "cfg_scale": 0.5, "is_greedy": True}
        requests = ask("loglikelihood", (words(*context), f" {words(*answer)}"), ("w1", " w2 w3"))
        reducers = [ReceivedAttention(("masked", "all", "prompt"), min_viewers=1)]
        lm = HarnessLM(llada, likelihood=settings, hooks=hooks, record=reducers, record_to=tmp_path, batch_size=3)
        found = lm.loglikelihood(requests)
        plain = HarnessLM(llada, likelihood=settings, hooks=hooks).loglikelihood(requests)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in plain], abs=1e-4)
        assert [same for _, same in found] == [same for _, same in plain]
        recording = dl.Recording.load(tmp_path / "task/00000-0")
        canvases = recording.tokens[:, 0]
        # Different masks of the answer; neither the unconditional half nor the greedy completion is among them.
        assert len({*map(tuple, canvases.tolist())}) == len(canvases) > 3
        assert (canvases[:, :8] == torch.tensor(context)).all()
        masked = canvases[:, 8:] == llada.config.mask_token_id
        assert masked.any(-1).all()
        assert masked.sum(-1).tolist() == sorted(masked.sum(-1).tolist(), reverse=True)
        assert torch.equal(canvases[:, 8:][~masked], torch.tensor(answer).expand(masked.shape)[~masked])
        for step, canvas in enumerate(canvases):
            with dl.record_forward(llada, reducers) as alone, attach_hooks(llada, *hooks):
                llada(input_ids=canvas[None])
            for name in ("received_masked", "received"):
                a, b = getattr(recording, name)[step, 0], getattr(alone, name)[0, 0]
                assert torch.allclose(a, b, atol=1e-5, equal_nan=True), name
            if not hooks:
                # The prompt is the context, also where a part of the answer is not masked.
                pattern = forward64(llada, canvas[None])["pattern0"][0]
                wanted = (pattern[:, :8].sum(-2) / (8 / 12)).float()
                assert torch.allclose(recording.received_prompt[step, 0, 0], wanted, atol=1e-5)

    def test_greedy_completions_are_recorded_where_they_are_the_method(self, llada: Any, tmp_path: Path) -> None:
        requests = ask("loglikelihood", ("w1 w2 w3", " w4 w5"))
        lm = HarnessLM(llada, likelihood={"method": "greedy_completion"}, record_to=tmp_path)
        found = lm.loglikelihood(requests)
        assert found == HarnessLM(llada, likelihood={"method": "greedy_completion"}).loglikelihood(requests)
        assert dl.Recording.load(tmp_path / "task/00000-0").masked[:, 0].sum(-1).tolist() == [2, 1]

    def test_greediness_is_asked_without_the_methods_own_settings(self, tmp_path: Path) -> None:
        model = tiny("dream")
        requests = ask("loglikelihood", ("w1 w2 w3", " w4 w5"))
        given = {"likelihood": {"samples": 8, "is_greedy": True, "options": {"eps": 0.1, "protect_ends": False}}}
        (found,) = HarnessLM(model, **given, record_to=tmp_path).loglikelihood(requests)
        (value,) = dl.log_likelihood(
            model, [1, 2, 3], [4, 5], samples=8, seed=request_seed(0, "w1 w2 w3"), eps=0.1, protect_ends=False
        ).value
        (greedy,) = dl.log_likelihood(model, [1, 2, 3], [4, 5], "greedy_completion").is_greedy
        assert found == (pytest.approx(float(value), abs=1e-4), bool(greedy))

    def test_an_ar_model_has_one_step(self, causal: Any, tmp_path: Path) -> None:
        requests = ask("loglikelihood", (words(*range(1, 10)), " w11 w12"))
        with counted(causal) as rows:
            found = HarnessLM(causal, record_to=tmp_path).loglikelihood(requests)
        assert rows == [1]
        assert found == HarnessLM(causal).loglikelihood(requests)
        recording = dl.Recording.load(tmp_path / "task/00000-0")
        whole = [*range(1, 10), 11, 12]
        assert recording.tokens.tolist() == [[whole]]
        pattern = forward64(causal, torch.tensor([whole]), causal=True)["pattern1"][0]
        even = (torch.ones(11, 11).tril() / torch.arange(1, 12)[:, None]).sum(0)
        few = torch.arange(11, 0, -1) < 8  # viewers
        wanted = (relative64(pattern) / even).float().masked_fill(few, torch.nan)
        assert torch.allclose(recording.received[0, 0, 1], wanted, atol=1e-5, equal_nan=True)

    def test_windows_of_a_long_text_lie_side_by_side(self, causal: Any, tmp_path: Path) -> None:
        requests = ask("loglikelihood_rolling", (words(*range(1, 21)),), ("w1 w2",))
        lm = HarnessLM(causal, max_length=8, record_to=tmp_path)
        found = lm.loglikelihood_rolling(requests)
        assert found == pytest.approx(HarnessLM(causal, max_length=8).loglikelihood_rolling(requests), abs=1e-4)
        assert [line["recordings"] for line in lines(tmp_path)] == [
            ["task/00000-0", "task/00000-0-p1", "task/00000-0-p2"], ["task/00001-0"],
        ]  # fmt: skip
        again = HarnessLM(causal, max_length=8, record_to=tmp_path)
        with counted(causal) as rows:
            assert again.loglikelihood_rolling(requests) == found
        assert rows == []

    def test_a_request_of_two_documents_is_recorded_once(self, llada: Any, tmp_path: Path) -> None:
        requests = ask("loglikelihood", *[("w1 w2", " w3 w4")] * 2)
        lm = HarnessLM(llada, likelihood={"method": "chain_rule"}, record_to=tmp_path)
        first, second = lm.loglikelihood(requests)
        assert first == second
        (line,) = lines(tmp_path)
        assert (line["doc_id"], line["also"]) == (0, [["task", 1, 0]])
        assert len(RecordingSet(tmp_path / "task")) == 1


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return found


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
def test_no_pattern_is_materialised(kind: str, llada: Any, tmp_path: Path) -> None:
    long = words(*[number % 60 for number in range(600)])
    settings = {"likelihood": {"method": "chain_rule", "is_greedy": False}, "generation": {"steps": 4}}
    reducers = [ReceivedAttention(("all", "masked")), TopKeys(3)]
    lm = HarnessLM(
        llada,
        **settings,
        batch_size=1,
        max_length=700,
        record=reducers,
        record_to=tmp_path,
        hooks=mask_top_sinks(2),
    )
    with Largest() as seen:
        getattr(lm, kind)(ask(kind, ARGUMENTS[kind](long)))
    assert dl.Recording.load(tmp_path / "task/00000-0").received.shape[-1] >= 602
    assert 0 < seen.numel < llada.config.num_attention_heads * 600 * 600


def test_what_cannot_be_recorded_is_refused_before_any_work(llada: Any, causal: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with counted(llada) as rows:
        for wrong, says in (
            ({"record": [ReceivedAttention()]}, "record_to is missing"),
            ({"record": ["recieved"], "record_to": tmp_path}, "reducers 'recieved'"),
            ({"record": {"reducer": []}, "record_to": tmp_path}, "RecordSettings has no setting 'reducer'"),
            ({"record": RecordSettings(layers=[9]), "record_to": tmp_path}, "layer 9 of"),
            ({"record_to": tmp_path / "file"}, "which is a file"),
        ):
            with pytest.raises(ValueError, match=says):
                HarnessLM(llada, **wrong)
        with pytest.raises(ValueError, match="no masked queries"):
            HarnessLM(causal, record=ReceivedAttention("masked"), record_to=tmp_path)
    assert rows == []
    assert {one.name for one in tmp_path.iterdir()} == {"file"}


@pytest.mark.long
def test_a_whole_evaluation_with_hooks_and_its_sinks(tmp_path: Path) -> None:
    model = dl.load("toy")
    tasks = ["toy_lists", "toy_choice"]
    given = {"limit": 2, "likelihood": {"samples": 4}, "hooks": [mask_top_sinks(1)]}
    given["generation"] = {"steps": 8, "block_length": 32}
    plain = evaluate(model, tasks, **given)
    result = evaluate(model, tasks, **given, record=[ReceivedAttention()], record_to=tmp_path)
    assert [(one.task, one.value) for one in result.scores] == [(one.task, one.value) for one in plain.scores]
    lists, choices = RecordingSet(tmp_path / "toy_lists"), RecordingSet(tmp_path / "toy_choice")
    assert [one.rows for one in lists] == [(0,), (1,)]
    assert [path.name for path in choices.paths] == [f"0000{doc}-{idx}" for doc in (0, 1) for idx in range(4)]
    sinks = dl.find_sinks(dl.Recording.load(tmp_path / "toy_lists"), dl.AboveMean(eps=3.0))
    assert len(sinks.table()) > 0


def test_a_text_without_a_token_has_an_answer_and_no_recording(tmp_path: Path) -> None:
    model = tiny("llada")
    requests = ask("loglikelihood_rolling", ("",), (words(3, 9, 4, 8),))
    lm = HarnessLM(model, likelihood={"samples": 2}, record=WITHOUT_MASKS, record_to=tmp_path)
    found = lm.loglikelihood_rolling(requests)
    assert found == HarnessLM(model, likelihood={"samples": 2}).loglikelihood_rolling(requests)
    assert found[0] == 0
    told = {line["doc_id"]: line["recordings"] for line in lines(tmp_path)}
    assert told == {0: [], 1: ["task/00001-0"]}


def test_a_request_of_which_no_draw_masks_anything_has_an_answer_and_no_recording(tmp_path: Path) -> None:
    # Dream spares the last token and masks the other one in half of the draws, of which each request has one.
    model, settings = tiny("dream"), {"samples": 1, "is_greedy": False}
    requests = ask("loglikelihood", *((words(*range(1, n + 2)), " w4 w7") for n in range(12)))
    lm = HarnessLM(model, likelihood=settings, record=WITHOUT_MASKS, record_to=tmp_path)
    found = [value for value, _ in lm.loglikelihood(requests)]
    alone = [value for value, _ in HarnessLM(model, likelihood=settings).loglikelihood(requests)]
    assert found == pytest.approx(alone, abs=1e-5)  # batched with others
    told = {line["doc_id"]: line["recordings"] for line in lines(tmp_path)}
    assert {number for number, names in told.items() if not names} == {n for n in range(12) if found[n] == 0}
    assert 0 < sum(map(bool, told.values())) < 12
    with counted(model) as none:
        again = HarnessLM(model, likelihood=settings, record=WITHOUT_MASKS, record_to=tmp_path)
        assert [value for value, _ in again.loglikelihood(requests)] == found
    assert none == []


@pytest.mark.parametrize(
    ("task", "directory"),
    [("..", "_../00002-1"), (".", "_./00002-1"), ("a/..", "a__../00002-1"), ("v1.5", "v1.5/00002-1")],
)
def test_no_task_has_a_directory_above_the_others(task: str, directory: str) -> None:
    request = SimpleNamespace(task_name=task, doc_id=2, idx=1)
    assert RequestBatch([request], ["key"]).directory(0) == directory
