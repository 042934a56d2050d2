"""Whole evaluations without a network: the shipped tasks, their numbers, errors and counts."""

import json
import math
import random
import re
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.api import metrics as harness_metrics
from lm_eval.tasks import TaskManager

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM, evaluate, evaluation, shipped_tasks
from dlm_lens.evaluation.evaluation import bootstrap_error, find_tasks, load_tasks, ratio_error, read_scores
from dlm_lens.evaluation.tasks import english
from dlm_lens.evaluation.tasks import toy as shipped
from experiments.toy.language import extract_answer, is_correct, stream
from tests.evaluation.conftest import ask, changed_task


@pytest.fixture(scope="module")
def toy() -> Any:
    return dl.load("toy")


@pytest.mark.long
def test_problems_are_scored_as_the_corpus_scores_them(toy: Any) -> None:
    result = evaluate(toy, "toy_arithmetic", limit=12, generation={"block_length": 32, "steps": 4})
    documents = shipped.documents()[:12]
    answers = dl.denoise(toy, [one["prompt"] for one in documents], block_length=32, steps=4, gen_length=32).answers
    right = [is_correct(text, one["target"]) for text, one in zip(answers, documents, strict=True)]
    assert 0 < sum(right) < 12  # four steps are too few: the number is no foregone conclusion
    (score,) = result.scores
    assert (score.task, score.metric, score.n) == ("toy_arithmetic", "exact_match", 12)
    assert score.value == pytest.approx(np.mean(right))
    assert score.standard_error == pytest.approx(np.std(right, ddof=1) / 12**0.5)


@pytest.mark.long
def test_choices_take_the_likeliest(toy: Any) -> None:
    settings = {"method": "chain_rule"}
    result = evaluate(toy, ["toy_choice"], limit=6, likelihood=settings, hooks="mask_positions(0)")
    right = []
    for one in shipped.choice_documents()[:6]:
        with dl.hooks.attach_hooks(toy, dl.hooks.mask_positions(0)):
            values = dl.log_likelihood(toy, one["prompt"], one["choices"], "chain_rule").value
        right.append(int(values.argmax()) == one["gold"])
    assert result["toy_choice"].value == pytest.approx(np.mean(right))
    assert result["toy_choice"].n == 6
    assert result.settings["hooks"] == ["mask_positions(0)"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["toy", "toy-ar", "toy-sink", "toy-gated"])
def test_every_embedded_model_runs_every_kind_of_task(name: str) -> None:
    tasks = ["toy_lists", "toy_last_word", "toy_choice", "toy_text"]
    result = evaluate(name, tasks, limit=4, likelihood={"samples": 8}, bootstrap_iters=50)
    found = {(one.task, one.metric): one for one in result.scores}
    assert {one.n for one in result.scores} == {4}
    assert found["toy_lists", "exact_match"].value == 1.0
    assert found["toy_last_word", "acc"].value >= 0.75
    assert 1.0 <= found["toy_last_word", "perplexity"].value < 2.0
    assert 1.5 < found["toy_text", "word_perplexity"].value < 4.0
    assert found["toy_text", "word_perplexity"].standard_error > 0
    assert set(result.table().task) == {*tasks}


def test_a_task_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes("task: größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"own\.yaml is not UTF-8 \(byte 8\), the encoding of task files"):
        find_tasks([str(tmp_path / "own.yaml")])


OWN_TASK = """task: own
dataset_path: json
dataset_kwargs: {{data_files: {data}, cache_dir: {cache}}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
"""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "its data hold no document"),
        (b'{"q": "tom", "a": "x"}\n{"q":\n', "ArrowInvalid: JSON parse error"),
        ('{"q": "größe", "a": "x"}\n'.encode("latin-1"), "UnicodeDecodeError: 'utf-8'"),
        (b'{"q": "tom"}\n', "UndefinedError: 'a' is undefined"),
    ],
)
def test_data_that_cannot_be_read_are_named_with_their_task(data: bytes, says: str, tmp_path: Path) -> None:
    task, file = tmp_path / "own.yaml", tmp_path / "data.jsonl"
    task.write_text(OWN_TASK.format(data=file, cache=tmp_path / "cache"))
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"own\.yaml cannot be loaded \({says}.*\); correct the task's file"):
        load_tasks(find_tasks([str(task)]), [str(task)])
    file.write_text('{"q": "größe 日本", "a": "x"}\n', encoding="utf-8")
    (found,) = load_tasks(find_tasks([str(task)]), [str(task)])["tasks"].values()
    assert [found.doc_to_text(doc) for doc in found.eval_docs] == ["größe 日本"]


def test_a_broken_task_file_is_named(tmp_path: Path) -> None:
    task = tmp_path / "own.yaml"
    task.write_text("task: [x\n")
    with pytest.raises(ValueError, match=r"own\.yaml cannot be loaded \(ParserError: .*line 1.*\); correct"):
        load_tasks(find_tasks([str(task)]), [str(task)])


@pytest.mark.long
def test_the_harness_itself_takes_the_model(toy: Any) -> None:
    manager = find_tasks(["toy_lists"])
    results = lm_eval.simple_evaluate(model=HarnessLM(toy), tasks=["toy_lists"], limit=3, task_manager=manager)
    assert results["results"]["toy_lists"]["exact_match,none"] == 1.0
    assert results["config"]["dlm_lens"]["seed"] == 0
    by_name = lm_eval.simple_evaluate(
        model="dlm_lens", model_args={"model": "toy", "seed": 3}, tasks=["toy_lists"], limit=3, batch_size=2,
        task_manager=manager,
    )  # fmt: skip
    assert by_name["results"]["toy_lists"]["exact_match,none"] == 1.0
    assert by_name["config"]["dlm_lens"]["seed"] == 3


@pytest.mark.long
def test_git_is_quiet_outside_a_repository(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = evaluate(HarnessLM(toy, generation={"steps": 1, "block_length": 32}), "toy_lists", limit=1)
    assert "git" not in capfd.readouterr().err
    assert found.results["git_hash"] is None


@pytest.mark.long
def test_the_environment_is_described_once_for_all_evaluations(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []
    monkeypatch.setattr(evaluation.collect_env, "get_env_info", lambda: f"description {len(described)}")
    monkeypatch.setattr(evaluation.collect_env, "pretty_str", lambda info: described.append(info) or info)
    evaluation._environment.cache_clear()
    try:
        few = {"steps": 1, "block_length": 32}
        found = [evaluate(toy, "toy_lists", limit=1, generation=few).results for _ in range(2)]
    finally:
        evaluation._environment.cache_clear()
    assert described == ["description 0"]
    assert [results["pretty_env_info"] for results in found] == described * 2


def test_worked_examples_and_chats_reach_the_prompt(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %} .")
    lm = HarnessLM(toy, max_length=200)
    seen: list[str] = []
    monkeypatch.setattr(lm, "generate_until", lambda requests: [seen.append(one.args[0]) or "" for one in requests])
    evaluate(lm, "toy_lists", limit=1, chat=True)
    assert seen == [shipped.documents()[100]["prompt"] + " ."]


def test_the_ratio_error_is_the_bootstrap_of_the_documents() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(5, 40, 200)
    values = -sizes * generator.normal(0.9, 0.2, 200)
    samples = [{"word_perplexity": pair, "bits_per_byte": pair} for pair in zip(values, sizes, strict=True)]
    perplexity = math.exp(-values.sum() / sizes.sum())
    error = ratio_error("word_perplexity", perplexity, samples)
    draws = generator.integers(0, 200, (4000, 200))
    resampled = np.exp(-values[draws].sum(1) / sizes[draws].sum(1))
    assert error == pytest.approx(resampled.std(), rel=0.1)  # 4000 draws: about 1% noise, and a linearisation
    bits = ratio_error("bits_per_byte", 0.0, samples)
    assert bits == pytest.approx((resampled / perplexity).std() / math.log(2), rel=0.1)
    assert math.isnan(ratio_error("acc", 0.5, samples))


@pytest.mark.parametrize("iters", [2, 700, 2500])
def test_bootstrap_errors_are_the_harness_s_and_of_all_draws(iters: int) -> None:
    cases = np.random.default_rng(0).normal(-2.0, 0.7, 40).tolist()
    error = bootstrap_error(harness_metrics.perplexity, cases, iters)
    drawn = []
    for chunk in range(math.ceil(iters / 1000)):
        generator = random.Random(chunk)
        some = range(min(1000, iters - 1000 * chunk))
        drawn += [math.exp(-np.mean(generator.choices(cases, k=40))) for _ in some]
    assert error == pytest.approx(np.std(drawn, ddof=1))
    if iters <= 1000:  # the harness takes whole thousands of more
        of_harness = harness_metrics._bootstrap_internal_no_mp(harness_metrics.perplexity, cases, iters)
        assert error == pytest.approx(harness_metrics.sample_stddev(of_harness))


@pytest.mark.long
def test_an_evaluation_prints_nothing_and_leaves_the_caller_s_random_numbers(
    toy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    seeds = random.seed, np.random.seed, torch.manual_seed
    for seed in seeds:
        seed(5)
    wanted = drawn()
    for seed in seeds:
        seed(5)
    result = evaluate(toy, "toy_last_word", limit=3, likelihood={"samples": 2}, bootstrap_iters=1500)
    assert drawn() == wanted
    assert capsys.readouterr().out == ""
    losses = [sample["perplexity"] for sample in result.results["samples"]["toy_last_word"]]
    perplexity = next(one for one in result.scores if one.metric == "perplexity")
    wanted_error = bootstrap_error(harness_metrics.perplexity, losses, 1500)
    assert perplexity.standard_error == pytest.approx(wanted_error)


def test_a_group_has_the_documents_of_its_tasks() -> None:
    results = {
        "results": {
            "one": {"alias": "one", "sample_len": 3, "acc,none": 1.0, "acc_stderr,none": 0.0},
            "two": {"alias": "two", "sample_len": 5, "acc,none": 0.2, "acc_stderr,none": 0.2, "f1,none": 0.5},
            "both": {
                "alias": "both", "sample_len": 8, "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": 0.5,
                "f1_stderr,none": "N/A", "sample_count": {"acc,none": 8, "f1,none": 5},
            },
        },
        "n-samples": {"one": {"original": 9, "effective": 3}, "two": {"original": 5, "effective": 5}},
    }  # fmt: skip
    counts = {(one.task, one.metric): one.n for one in read_scores(results)}
    wanted = {("one", "acc"): 3, ("two", "acc"): 5, ("two", "f1"): 5, ("both", "acc"): 8, ("both", "f1"): 5}
    assert counts == wanted


@pytest.mark.long
def test_what_a_task_fixes_is_told(toy: Any, caplog: pytest.LogCaptureFixture) -> None:
    evaluate(toy, "toy_lists", limit=1, num_fewshot=2, generation={"steps": 1, "block_length": 32})
    assert "num_fewshot=2 is ignored by toy_lists" in caplog.text


@pytest.mark.long
def test_exact_match_of_choices_reads_what_greedy_decoding_writes(toy: Any, tmp_path: Path) -> None:
    task = changed_task(tmp_path, "toy_choice", ("metric: acc", "metric: exact_match"))
    (score,) = evaluate(toy, task, limit=5, likelihood={"method": "chain_rule"}).scores
    right = []
    for one in shipped.choice_documents()[:5]:
        greedy = dl.log_likelihood(toy, one["prompt"], one["choices"][one["gold"]], "greedy_completion")
        right.append(bool(greedy.is_greedy))
    assert (score.metric, score.value) == ("exact_match", np.mean(right))
    assert any(right)
    # Only the tasks whose metric reads it pay for it.
    lm = HarnessLM(toy, likelihood={"method": "chain_rule"}, generation={"steps": 1, "block_length": 32})
    evaluate(lm, ["toy_choice", "toy_lists", task], limit=1)
    assert lm.greedy_tasks == {"toy_choice_changed"}


@pytest.mark.parametrize("hooks", ["at_steps(mask_positions(0), 3)", "mask_top_sinks(2, source='previous')"])
def test_hooks_that_need_steps_are_refused_before_any_work(
    toy: Any, hooks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HarnessLM, "generate_until", lambda *_: pytest.fail("work was done"))
    for tasks in (["toy_lists", "toy_choice"], ["toy_last_word"], ["toy_text"]):
        with pytest.raises(ValueError, match=r"(at_steps|previous).*needs the steps of a run.*that generate"):
            evaluate(toy, tasks, limit=1, hooks=hooks)
    # From the harness itself, before the first likelihood.
    lm = HarnessLM(toy, hooks=hooks)
    monkeypatch.setattr(lm, "_likelihoods", lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match="needs the steps of a run"):
        lm.loglikelihood(ask("loglikelihood", ("tom", " has")))
    with pytest.raises(ValueError, match="needs the steps of a run"):
        lm.loglikelihood_rolling(ask("loglikelihood_rolling", ("tom has",)))


@pytest.mark.long
def test_hooks_that_need_none_are_not_refused(toy: Any) -> None:
    hooks = "mask_positions(30), mask_top_sinks(1), at_layers(zero_value(0), 0), at_heads(mask_positions(0), 1)"
    HarnessLM(toy, hooks=hooks).check_likelihoods()
    few = {"steps": 4, "block_length": 32}
    evaluate(toy, "toy_lists", limit=1, hooks="at_steps(mask_positions(0), 3)", generation=few)


@pytest.mark.long
def test_tags_and_groups_keep_their_tasks(toy: Any) -> None:
    few = {"steps": 1, "block_length": 32}
    result = evaluate(toy, ["toy_problems", "toy_text"], limit=1, likelihood={"samples": 4}, generation=few)
    assert {one.task for one in result.scores} == {"toy_arithmetic", "toy_lists", "toy_facts", "toy_text"}


class Named:
    """What stands for a task of the harness."""

    def __init__(self, name: str) -> None:
        self.task_name = name


class Grouped(Named):
    """What stands for a group of them."""

    def __init__(self, name: str, *tasks: Named) -> None:
        super().__init__(name)
        self.tasks = tasks

    def get_all_tasks(self) -> list[Named]:
        return [one for task in self.tasks for one in (task.get_all_tasks() if hasattr(task, "tasks") else [task])]


def test_loaded_groups_are_given_whole() -> None:
    a, b, c = Named("a"), Named("b"), Named("c")
    inner = Grouped("inner", b)
    outer = Grouped("outer", a, inner)
    loaded = {
        "tasks": {"a": a, "b": b, "c": c},
        "groups": {"outer": outer, "inner": inner},
        "group_map": {"outer": ["a", "inner"], "inner": ["b"]},
    }
    assert evaluation._top(loaded) == [outer, c]


def test_code_is_executed_only_if_asked_for(toy: Any, few_tasks: None) -> None:
    with pytest.raises(ValueError, match="confirm_run_unsafe_code=True"):
        evaluate(toy, "humaneval")


def test_unknown_names_are_refused_with_near_ones(toy: Any, few_tasks: None) -> None:
    with pytest.raises(ValueError, match="toy_lists"):
        evaluate(toy, "toy_list")
    with pytest.raises(ValueError, match="no task given"):
        evaluate(toy, [])
    for limit in (0, -2, 2.7, float("inf"), float("nan"), "3", True, [2]):
        with pytest.raises(ValueError, match=re.escape(f"limit is {limit!r}; give a number of documents")):
            evaluate(toy, "toy_lists", limit=limit)
    for iters in (1, -1, 2.5, True, None):
        with pytest.raises(ValueError, match=re.escape(f"bootstrap_iters is {iters!r}; give a whole number of at")):
            evaluate(toy, "toy_lists", bootstrap_iters=iters)
    for shots in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match=re.escape(f"num_fewshot is {shots!r}; give a whole number")):
            evaluate(toy, "toy_lists", num_fewshot=shots)
    for tasks in (None, 3, ["toy_lists", 3]):
        with pytest.raises(ValueError, match=re.escape(f"tasks is {tasks!r}; give the name of a task")):
            evaluate(toy, tasks)
    with pytest.raises(ValueError, match="GenerationSettings has no setting 'lenght'"):
        evaluate(toy, "toy_lists", generation={"lenght": 3})
    with pytest.raises(ValueError, match="given with a HarnessLM"):
        evaluate(HarnessLM(toy), "toy_lists", seed=3)


def test_a_group_in_a_file_has_the_tasks_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bool] = []

    class Manager(TaskManager):
        """Without the harness's own 14,000 files, which take seconds."""

        def __init__(self, include_path: Any, include_defaults: bool) -> None:
            loaded.append(include_defaults)
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Manager)
    changed_task(tmp_path, "toy_lists")
    group = tmp_path / "both.yaml"
    group.write_text("group: both\ntask:\n  - toy_lists_changed\n  - toy_choice\n")
    manager = find_tasks([str(group)])
    assert loaded[-1]  # a member may be one of the harness's own
    assert set(load_tasks(manager, [str(group)])["tasks"]) == {"toy_lists_changed", "toy_choice"}


@pytest.mark.parametrize("named", [False, True])
def test_settings_are_checked_before_the_data_of_the_tasks_are_fetched(
    toy: Any, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*_: Any) -> None:
        raise ConnectionError("the data were fetched")

    monkeypatch.setattr(evaluation, "load_tasks", fetched)
    model = "toy" if named else toy
    for given in ({"likelihood": {"samplez": 1}}, {"generation": {"gen_length": 0}}):
        with pytest.raises(ValueError, match=r"samplez|gen_length is 0"):
            evaluate(model, "toy_lists", **given)
    with pytest.raises(ConnectionError):
        evaluate(model, "toy_lists", responses=tmp_path / "new" / "answers.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_error_that_is_not_known_is_null(toy: Any, tmp_path: Path) -> None:
    tasks = ["toy_last_word", "toy_text"]
    result = evaluate(toy, tasks, limit=2, likelihood={"samples": 2}, bootstrap_iters=0)
    assert all(math.isnan(one.standard_error) for one in result.scores)
    result.save(tmp_path)
    wanted = {"limit": 2, "num_fewshot": None, "chat": False, "multiturn": True}
    assert json.loads((tmp_path / "results.json").read_text())["harness"]["arguments"] == wanted
    kept = json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert None in [one["standard_error"] for one in kept["scores"]]


class TestShippedData:
    def test_the_scorer_is_the_corpus_own(self) -> None:
        rng = random.Random(0)
        words = ["answer", ".", "9", "tom", ":", "answer 9 ."]
        cases = [" ".join(rng.choices(words, k=rng.randint(0, 8))) for _ in range(3000)]
        for text in cases:
            assert shipped.final_answer(text) == extract_answer(text), text

    def test_they_are_those_of_the_published_results(self) -> None:
        """In every version of Python, whose `random` makes the English ones."""
        found = (shipped.documents(), shipped.choice_documents(), english.word_problems(), english.prompts())
        assert [sha256(json.dumps(documents).encode()).hexdigest()[:16] for documents in found] == [
            "93f98721edb592d6", "2dc8da983d7b86e8", "54b1d92eaabda5f0", "ff930b4ac51a494c",
        ]  # fmt: skip

    def test_the_problems_are_the_corpus_own(self) -> None:
        kept = shipped.documents()
        assert [one["task"] for one in kept] == ["A"] * 100 + ["L"] * 100 + ["F"] * 100
        for task in "ALF":
            drawn = [one.text for one in islice(stream("test", 7, [task]), 400)]
            mine = [f"{one['prompt']} {one['answer']}" for one in kept if one["task"] == task]
            assert {*mine} <= {*drawn}
            assert len({*mine}) == 100
        assert all(is_correct(one["answer"], one["target"]) for one in kept)

    def test_exactly_one_choice_is_right(self) -> None:
        for one in shipped.choice_documents():
            assert len({*one["choices"]}) == 4
            facts = one["prompt"].rpartition(" what colour ")[0] or one["prompt"].rpartition(" where ")[0]
            right = [choice for choice in one["choices"] if choice.partition(" answer ")[0] in facts]
            assert right == [one["choices"][one["gold"]]]
            assert len({len(choice.split()) for choice in one["choices"]}) == 1

    def test_they_travel_with_the_package(self) -> None:
        text = (Path(dl.__file__).parents[1] / "pyproject.toml").read_text()
        assert '"evaluation/tasks/*"' in text
        assert shipped_tasks() == [
            "english_arithmetic", "toy_arithmetic", "toy_choice", "toy_facts", "toy_last_word", "toy_lists",
            "toy_text",
        ]  # fmt: skip
