"""Recordings of requests that go on, in one process or in two."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM, RecordSettings, evaluate
from dlm_lens.recording import RecordingSet, ValueNorm
from dlm_lens.testing import tiny
from tests.evaluation.conftest import KilledError, ask, counted, killed_after, texts, words
from tests.evaluation.request_recordings import ARGUMENTS, WITHOUT_MASKS, equal, lines
from tests.preloaded import python


class TestGoingOn:
    @pytest.mark.long
    @pytest.mark.parametrize("kind", [*ARGUMENTS])
    @pytest.mark.parametrize("kept", [False, True], ids=["recordings", "and answers"])
    def test_a_killed_evaluation_asks_no_recorded_request_again(
        self, kind: str, kept: bool, llada: Any, tmp_path: Path
    ) -> None:
        requests = ask(kind, *map(ARGUMENTS[kind], texts(6, 4, 8)))
        to, answers = tmp_path / "recordings", tmp_path / "answers.jsonl"

        def make(**given: Any) -> Any:
            likelihood = {"method": "chain_rule", "is_greedy": False}
            return HarnessLM(llada, batch_size=1, likelihood=likelihood, generation={"steps": 8}, **given)

        expected = getattr(make(), kind)(requests)
        given = {"record_to": to, "responses": answers} if kept else {"record_to": to}
        with counted(llada) as alone:
            getattr(make(record_to=tmp_path / "alone"), kind)(requests)
        handle = killed_after(llada, len(alone) // 2)
        with counted(llada) as before, pytest.raises(KilledError):
            getattr(make(**given), kind)(requests)
        handle.remove()
        done = lines(to)
        assert 0 < len(done) < 6
        with counted(llada) as after:
            found = getattr(make(**given), kind)(requests)
        assert found == (pytest.approx(expected, abs=1e-4) if kind == "loglikelihood_rolling" else expected)
        repeated = len(before) + len(after) - len(alone)
        # A run goes on behind its last step; a likelihood begins again with the request it was in.
        assert repeated == 0 if kind == "generate_until" else 0 <= repeated <= 9
        assert lines(to)[: len(done)] == done
        assert len(lines(to)) == 6
        with counted(llada) as none:
            assert getattr(make(**given), kind)(requests) == found
        assert none == []
        if kept:
            assert len(answers.read_text().splitlines()) == 7

    def test_answers_without_recordings_are_asked_again(self, llada: Any, tmp_path: Path) -> None:
        requests = ask("generate_until", *((one, {"until": []}) for one in texts(2, 4, 8)))
        answers = tmp_path / "answers.jsonl"
        found = HarnessLM(llada, responses=answers).generate_until(requests)
        before = answers.read_text()
        lm = HarnessLM(llada, responses=answers, record_to=tmp_path / "recordings")
        assert lm.generate_until(requests) == found
        assert len(RecordingSet(tmp_path / "recordings/task")) == 2
        assert answers.read_text() == before

    def test_recorded_answers_fill_a_file_of_answers(self, llada: Any, tmp_path: Path) -> None:
        requests = ask("loglikelihood", ("w1 w2", " w3"))
        settings = {"likelihood": {"method": "chain_rule"}, "record_to": tmp_path / "recordings"}
        found = HarnessLM(llada, **settings).loglikelihood(requests)
        with counted(llada) as rows:
            assert HarnessLM(llada, **settings, responses=tmp_path / "a.jsonl").loglikelihood(requests) == found
        assert rows == []
        assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2

    def test_a_recording_that_the_index_does_not_know_is_made_again(self, llada: Any, tmp_path: Path) -> None:
        requests = ask("loglikelihood", ("w1 w2", " w3"), ("w1 w2", " w4 w5"))
        given = {"likelihood": {"method": "chain_rule"}, "record_to": tmp_path}
        found = HarnessLM(llada, **given).loglikelihood(requests)
        index = tmp_path / "requests.jsonl"
        whole = index.read_text()
        index.write_text("".join(whole.splitlines(keepends=True)[:-1]))  # killed between recording and index
        assert HarnessLM(llada, **given).loglikelihood(requests) == found
        assert index.read_text() == whole
        assert len(RecordingSet(tmp_path / "task")) == 2

    def test_two_requests_of_one_name_are_refused(self, llada: Any, tmp_path: Path) -> None:
        lm = HarnessLM(llada, likelihood={"method": "chain_rule"}, record_to=tmp_path)
        lm.loglikelihood(ask("loglikelihood", ("w1 w2", " w3")))
        with pytest.raises(ValueError, match="task/00000-0 holds the recording of another request"):
            lm.loglikelihood(ask("loglikelihood", ("w1 w2", " w4")))

    def test_recordings_of_another_evaluation_are_not_mixed_in(self, llada: Any, tmp_path: Path) -> None:
        (request,) = ask("generate_until", ("w1 w2", {"until": []}))
        HarnessLM(llada, record_to=tmp_path, generation={"steps": 16}).generate_until([request])
        for other, name in (
            ({"seed": 1}, "seed"), ({"hooks": "mask_positions(0)"}, "hooks"),
            ({"record": [ValueNorm()]}, "reducers"), ({"record": RecordSettings(layers=[0])}, "layers"),
            ({"record": {"dtype": "float16"}}, "dtype"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"holds answers with {name}="):
                HarnessLM(llada, record_to=tmp_path, **{"generation": {"steps": 16}, **other})
        lm = HarnessLM(llada, record_to=tmp_path, generation={"steps": 16})
        (other,) = ask("generate_until", ("w1 w2 w3", {"until": []}))
        with pytest.raises(ValueError, match="holds the recording of another request"):
            lm.generate_until([other])


def test_a_recording_whose_header_a_kill_left_hidden_is_made_again(tmp_path: Path) -> None:
    requests = ask("loglikelihood", (words(3, 9, 4, 8), " w2 w5"))
    left = tmp_path / "task" / "00000-0"
    left.mkdir(parents=True)
    (left / ".header.json.partial").write_text("{")
    for directory in (tmp_path, tmp_path / "anew"):
        lm = HarnessLM(tiny("llada"), likelihood={"samples": 2}, record=WITHOUT_MASKS, record_to=directory)
        lm.loglikelihood(requests)
    equal(dl.Recording.load(left), dl.Recording.load(tmp_path / "anew" / "task" / "00000-0"))
    assert not (left / ".header.json.partial").exists()


def test_what_somebody_else_put_there_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "task" / "00000-0" / "thesis.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    lm = HarnessLM(tiny("llada"), likelihood={"samples": 2}, record=WITHOUT_MASKS, record_to=tmp_path)
    with pytest.raises(FileExistsError, match="not empty"):
        lm.loglikelihood(ask("loglikelihood", (words(3, 9, 4, 8), " w2 w5")))
    assert theirs.read_text() == "mine"


@pytest.mark.long
def test_two_evaluations_on_one_directory(tmp_path: Path) -> None:
    given = {"limit": 2, "generation": {"steps": 4}, "record_to": tmp_path / "both"}
    lm = HarnessLM(dl.load("toy"), generation={"steps": 4}, record_to=tmp_path / "both")
    with (
        lm.held(),
        ThreadPoolExecutor(1) as other,
        pytest.raises(ValueError, match=r"another process or thread writes .*both; wait for it"),
    ):
        other.submit(evaluate, dl.load("toy"), "toy_lists", **given).result()
    # One after the other: the second evaluation sees what the first recorded after it was made.
    second = HarnessLM(dl.load("toy"), generation={"steps": 4}, record_to=tmp_path / "both")
    plain = evaluate(lm, "toy_lists", limit=2)
    with counted(second.model) as rows:
        again = evaluate(second, "toy_lists", limit=2)
    assert rows == []
    assert [one.value for one in again.scores] == [one.value for one in plain.scores]
    assert len(lines(tmp_path / "both")) == 2
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


RACING = """
import sys
import torch
from dlm_lens.evaluation import evaluate
torch.set_num_threads(1)
try:
    evaluate("toy", "toy_lists", limit=4, generation={"steps": 8}, record_to=sys.argv[1])
    print("done")
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_evaluations_race_for_one_directory(tmp_path: Path) -> None:
    command = [python(), "-c", RACING, str(tmp_path / "both")]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate()[0].strip().splitlines()[-1] for process in racing]
    assert [process.returncode for process in racing] == [0, 0, 0]
    assert "done" in told
    assert all(one == "done" or "another process or thread writes" in one for one in told)
    given = {"limit": 4, "generation": {"steps": 8}}
    evaluate("toy", "toy_lists", **given, record_to=tmp_path / "both")
    evaluate("toy", "toy_lists", **given, record_to=tmp_path / "alone")
    for one, other in zip(
        RecordingSet(tmp_path / "both/toy_lists"), RecordingSet(tmp_path / "alone/toy_lists"), strict=True
    ):
        equal(one, other)
    assert lines(tmp_path / "both") == lines(tmp_path / "alone")
