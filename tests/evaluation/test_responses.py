"""Answers are kept: a killed evaluation goes on, and never mixes with another."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention.hook_identity import identity_of
from dlm_lens.evaluation import HarnessLM, evaluate
from dlm_lens.evaluation.responses import Responses, fingerprint
from dlm_lens.hooks import at_layers, mask_positions, mask_top_sinks, steer
from dlm_lens.recording.reducers.base import LayerStep, Reducer
from dlm_lens.testing import tiny
from tests.evaluation.conftest import KilledError, ask, counted, killed_after, texts
from tests.files.damage import damage
from tests.preloaded import python


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_a_killed_evaluation_goes_on(
    kind: str, llada: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlm_lens.evaluation.likelihood_requests.CHUNK", 3)
    given = texts(9, 2, 8)
    arguments: list[tuple[Any, ...]] = {
        "loglikelihood": [(one, " w1 w2") for one in given],
        "loglikelihood_rolling": [(one,) for one in given],
        "generate_until": [(one, {"until": []}) for one in given],
    }[kind]
    requests = ask(kind, *arguments)
    path = tmp_path / "new" / "responses.jsonl"

    def make(file: Path | None) -> Any:
        return HarnessLM(llada, batch_size=2, likelihood={"samples": 4}, responses=file)

    with counted(llada) as whole:
        expected = getattr(make(None), kind)(requests)
    handle = killed_after(llada, len(whole) // 2)
    with pytest.raises(KilledError):
        getattr(make(path), kind)(requests)
    handle.remove()
    kept = len(path.read_text().splitlines()) - 1
    assert 0 < kept < 9
    # The kill tore a line apart.
    with path.open("a") as file:
        file.write('{"key": "half of a li')
    with counted(llada) as rest:
        assert getattr(make(path), kind)(requests) == expected
    assert sum(rest) < sum(whole)
    assert len(path.read_text().splitlines()) == 10
    with counted(llada) as none:
        assert getattr(make(path), kind)(requests) == expected
    assert none == []


def test_answers_of_another_evaluation_are_not_mixed_in(llada: Any, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    HarnessLM(llada, responses=path)
    for other in (
        {"seed": 1},
        {"hooks": "mask_positions(0)"},
        {"likelihood": {"samples": 4}},
        {"generation": {"steps": 4}},
        {"max_length": 64},
    ):
        with pytest.raises(ValueError, match=f"holds answers with {next(iter(other))}="):
            HarnessLM(llada, responses=path, **other)
    model, other = tiny("llada", bos_token_id=5), tmp_path / "other.jsonl"
    HarnessLM(model, responses=other)
    with pytest.raises(ValueError, match="holds answers with add_bos=False"):
        HarnessLM(model, responses=other, add_bos=True)
    with pytest.raises(ValueError, match="fingerprint"):
        HarnessLM(tiny("llada", seed=1), responses=path)
    # A batch size changes no answer.
    HarnessLM(llada, responses=path, batch_size=7)


def test_long_settings_are_told_where_they_differ(tmp_path: Path) -> None:
    same = [f"mask_positions({position})" for position in range(40)]
    cases = (
        ([*same, "first()"], [*same, "second()"], "hooks=...", "first()"),
        ({"same": same, "steps": 3}, {"same": same, "steps": 4}, "hooks.steps=3, this evaluation has 4;", ""),
    )
    for number, (one, other, begins, holds) in enumerate(cases):
        path = tmp_path / f"{number}.jsonl"
        Responses(path, {"hooks": one})
        with pytest.raises(ValueError, match="choose another file, or the same settings") as caught:
            Responses(path, {"hooks": other})
        text = str(caught.value)
        assert f"holds answers with {begins}" in text
        assert holds in text
        assert len(text) < 500


def test_answers_of_other_defaults_and_of_another_tokenizer_are_not_mixed_in(tmp_path: Path) -> None:
    """The weights and the config are the same: generation_config.json and tokenizer.json have changed."""
    path, fixed = tmp_path / "responses.jsonl", tmp_path / "fixed.jsonl"
    model = tiny("llada", sampler_defaults={"steps": 16, "gen_length": 16})
    HarnessLM(model, responses=path)
    HarnessLM(model, responses=fixed, generation={"remasking": "random"})
    model.sampler_defaults = {**model.sampler_defaults, "remasking": "random"}
    with pytest.raises(ValueError, match=r"holds answers with sampler_defaults\.remasking=.*low_confidence"):
        HarnessLM(model, responses=path)
    # What the evaluation sets itself is no default.
    HarnessLM(model, responses=fixed, generation={"remasking": "random"})
    model.tokenizer(["w1 w2", "w1"], padding=True, truncation=True, max_length=2)  # changes the tokenizer's state
    HarnessLM(model, responses=fixed, generation={"remasking": "random"})
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["w9"]})
    with pytest.raises(ValueError, match="holds answers with tokenizer="):
        HarnessLM(model, responses=fixed, generation={"remasking": "random"})


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(ValueError, match="does not hold answers"):
        Responses(path, {})
    assert path.read_text() == '{"mine": 1}\n'


def test_the_first_line_says_what_answered(llada: Any, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    HarnessLM(llada, responses=path, hooks="mask_positions(2)", seed=4)
    head = json.loads(path.read_text().splitlines()[0])["answers_of"]
    assert head["seed"] == 4
    assert head["fingerprint"] == fingerprint(llada)
    assert head["hooks"] == [repr(mask_positions(2))]


def test_a_fingerprint_sees_weights_and_config() -> None:
    same = {fingerprint(tiny("llada")), fingerprint(tiny("llada"))}
    others = {fingerprint(one) for one in (tiny("llada", seed=1), tiny("llada", rope_theta=5.0), tiny("dream"))}
    for share in (0.0, 0.3, 0.5, 1.0):  # one number of one weight
        model = tiny("llada")
        weight = model.model.layers[1].mlp.up_proj.weight.data.view(-1)
        weight[int(share * (len(weight) - 1) + 0.5)] += 1.0
        others.add(fingerprint(model))
    assert len(same) == 1
    assert len(same | others) == 8


def test_the_harness_own_cache_is_filled_too(llada: Any) -> None:
    kept: list[tuple[Any, ...]] = []
    lm = HarnessLM(llada, likelihood={"method": "chain_rule", "is_greedy": False})
    lm.cache_hook.add_partial = lambda *one: kept.append(one)  # type: ignore[method-assign]
    ((value, same),) = lm.loglikelihood(ask("loglikelihood", ("w1", " w2")))
    assert kept == [("loglikelihood", ("w1", " w2"), (value, same))]


@pytest.mark.long
def test_a_process_that_was_killed_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    code = (
        "import os, sys, dlm_lens.evaluation.likelihood_requests as likelihoods\n"
        "from dlm_lens.evaluation import evaluate\n"
        "likelihoods.CHUNK = 2\n"
        "print(os.getpid(), flush=True)\n"
        "print(evaluate('toy', 'toy_choice', limit=16, likelihood={'method': 'chain_rule'},\n"
        "      responses=sys.argv[1])['toy_choice'])\n"
    )
    command = [python(), "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        program = int(running.stdout.readline())
        while running.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") > 8):
            time.sleep(0.01)
        os.kill(program, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    kept = path.read_bytes()
    assert 8 < kept.count(b"\n") < 65
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = path.read_bytes().splitlines()
    assert len(lines) == len({*lines}) == 1 + 4 * 16
    assert path.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    fresh = evaluate("toy", "toy_choice", limit=16, likelihood={"method": "chain_rule"})
    assert done.stdout.splitlines()[1:] == str(fresh["toy_choice"]).splitlines()


@pytest.mark.parametrize("text", ["a letter without an end", '{"answers_of": {"seed": 4', "[1]\n", "no JSON\n"])
def test_a_file_of_somebody_else_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="exists and does not hold answers of an evaluation; choose another file"):
        Responses(path, {"seed": 3})
    assert path.read_text() == text


def test_half_a_line_of_a_killed_process_does_not_join_the_line_of_another(tmp_path: Path) -> None:
    path, identity = tmp_path / "answers.jsonl", {"seed": 0}
    ours = Responses(path, identity)
    ours.append({"a": 1})
    with path.open("a") as file:  # another process, killed while it wrote
        file.write('{"key": "half of a li')
    ours.append({"b": 2})
    ours.append({"c": 3})
    assert dict(Responses(path, identity).items()) == {"a": 1, "b": 2, "c": 3}


def test_a_first_line_that_a_crash_tore_apart_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    Responses(path, {"seed": 3})
    whole = path.read_text()
    path.write_text(whole[:15])
    Responses(path, {"seed": 3}).append({"one": 1})
    added = path.read_text().removeprefix(whole)
    plain = '{"answer":1,"key":"one"}'
    checksum = hashlib.sha256(plain.encode()).hexdigest()[:16]
    assert added == f'{{"key": "one", "answer": 1, "checksum": "{checksum}"}}\n'


def test_hooks_that_read_alike_are_told_apart_by_their_tensors(llada: Any, tmp_path: Path) -> None:
    one, other = torch.eye(32)[3], torch.eye(32)[5]
    assert repr(steer(one)) == repr(steer(other))
    assert identity_of(steer(one)) == identity_of(steer(one.clone())) != identity_of(steer(other))
    assert identity_of(at_layers(steer(one), 1)) != identity_of(at_layers(steer(other), 1))
    assert identity_of(steer(one.double())) != identity_of(steer(one))
    assert identity_of(mask_top_sinks(1)) == "mask_sinks(TopK(k=1))"
    masks = [dl.record(llada, ["w1 w2 w3"], reducers=[dl.ReceivedAttention()], seed=0, steps=4, gen_length=4)]
    masks.append(dl.record(llada, ["w9 w2 w3"], reducers=[dl.ReceivedAttention()], seed=0, steps=4, gen_length=4))
    known = [mask_top_sinks(1, source=recording) for recording in masks]
    assert repr(known[0]) == repr(known[1])
    assert identity_of(known[0]) != identity_of(known[1])

    path = tmp_path / "responses.jsonl"
    HarnessLM(llada, hooks=[steer(one)], responses=path).generate_until(
        ask("generate_until", ("w1", {"until": []}))
    )
    with pytest.raises(ValueError, match="holds answers with hooks="):
        HarnessLM(llada, hooks=[steer(other)], responses=path)


def responses_of(path: Path) -> dict[str, Any]:
    return dict(Responses(path, {"seed": 3}).items())


@pytest.mark.parametrize("cases", [80, pytest.param(2000, marks=pytest.mark.long)])
def test_damaged_answers_are_told_or_read_right(cases: int, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    wanted = {f"key{n}": [-1.5 * n, n % 2 == 0] if n % 3 else f"text {n}\u2028\u0085" for n in range(9)}
    Responses(kept / "a.jsonl", {"seed": 3}).append(wanted)
    draw, told, read = random.Random(7), 0, 0
    for case in range(cases):
        path = tmp_path / f"case{case}"
        shutil.copytree(kept, path)
        how = damage(path, draw)
        try:
            found = responses_of(path / "a.jsonl")
            right = all(wanted[key] == answer for key, answer in found.items())
            read += 1
        except ValueError as error:
            told, how = told + 1, f"{how}: {error}"
            right = str(path) in str(error) and "\n" not in str(error)
        assert right, how
        shutil.rmtree(path)
    assert told > cases / 3
    assert read > 0


def test_answers_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"answers_of": {"seed": 3}}\n{"key": "one", "answer": [-1.5, true]}\n')
    Responses(path, {"seed": 3}).append({"two": "text"})
    assert responses_of(path) == {"one": [-1.5, True], "two": "text"}


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory; give a file"):
        Responses(tmp_path, {})


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("needs the steps of a run", {"tasks": "toy_choice", "hooks": "at_steps(mask_positions(0), 3)"}),
    ("does not divide into blocks", {"tasks": "toy_lists", "generation": {"gen_length": 7, "block_length": 2}}),
    ("no chat template", {"tasks": "toy_lists", "chat": True}),
    ("layer 9 of 4", {"tasks": "toy_lists", "record": {"layers": [9]}}),
    ("no setting .order.", {"tasks": "toy_choice", "likelihood": {"options": {"order": "x"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("says", "given"), REFUSED, ids=[says for says, _ in REFUSED])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_refused_evaluation_leaves_nothing(
    says: str, given: dict[str, Any], recorded: bool, tmp_path: Path
) -> None:
    files: dict[str, Any] = {"responses": tmp_path / "new/out/responses.jsonl"}
    if recorded or "record" in given:
        files["record_to"] = tmp_path / "new/recordings/all"
    with pytest.raises(ValueError, match=says):
        evaluate("toy", limit=1, **given, **files)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_evaluation_leaves_the_answers_and_files_of_others(llada: Any, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    before, after = Responses(path, {"seed": 3}), Responses(path, {"seed": 3})
    after.forget()  # it did not make the file
    assert path.exists()
    before.append({"one": 1})
    before.forget()
    assert responses_of(path) == {"one": 1}
    other = Responses(tmp_path / "new" / "b.jsonl", {"seed": 3})
    (tmp_path / "new" / "thesis.txt").write_text("mine")
    other.forget()
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["thesis.txt"]
    other.append({"two": 2})
    assert responses_of(tmp_path / "new" / "b.jsonl") == {"two": 2}
    # An evaluation whose file was removed does not append to the one that another evaluation made there.
    third, fourth = tmp_path / "new" / "c.jsonl", Responses(tmp_path / "new" / "c.jsonl", {"seed": 4})
    fourth.forget()
    Responses(third, {"seed": 3}).append({"three": 3})
    with pytest.raises(ValueError, match="holds answers with seed=3, this evaluation has 4"):
        fourth.append({"four": 4})
    assert responses_of(third) == {"three": 3}
    # The model of a refused evaluation can be used for another one.
    lm = HarnessLM(llada, responses=tmp_path / "a/b.jsonl", record_to=tmp_path / "recordings")
    with pytest.raises(ValueError, match="no chat template"):
        evaluate(lm, "toy_lists", limit=1, chat=True)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "recordings").exists()
    lm.generate_until(ask("generate_until", ("w1", {"until": []})))
    assert len((tmp_path / "a/b.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "recordings/requests.jsonl").read_text().splitlines()) == 2
    # Where the answers are refused, no directory of recordings is made.
    with pytest.raises(ValueError, match="holds answers with"):
        HarnessLM(llada, responses=path, record_to=tmp_path / "none")
    assert not (tmp_path / "none").exists()


@dataclass(frozen=True, eq=False)
class AlongDirection(Reducer):
    """Keys times a direction, whose repr shows its first and last entries alone."""

    direction: torch.Tensor
    unit = ""
    formula = "k_j . d"

    def reduce(self, layer: LayerStep) -> Any:
        keys, queries = layer.inputs.k.float(), layer.inputs.q
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
        return layer.only_keys(keys @ self.direction[3 : 3 + keys.shape[-1]])


def test_recordings_of_another_reducer_with_the_same_repr_are_refused(llada: Any, tmp_path: Path) -> None:
    def reducer(scale: float) -> AlongDirection:
        direction = torch.zeros(2000)
        direction[3:600] = scale
        return AlongDirection(direction)

    def make(scale: float) -> HarnessLM:
        return HarnessLM(llada, generation={"gen_length": 2}, record=[reducer(scale)], record_to=tmp_path)

    assert repr(reducer(1.0)) == repr(reducer(2.0))
    requests = ask("generate_until", ("w1", {"until": []}))
    expected = make(1.0).generate_until(requests)
    with counted(llada) as rows:
        assert make(1.0).generate_until(requests) == expected
    assert rows == []
    with pytest.raises(ValueError, match=r"requests\.jsonl holds answers with identities=.*choose another file"):
        make(2.0)
    # An index of a reducer that its repr determines has no such entry, as before.
    HarnessLM(llada, record="value-norm", record_to=tmp_path / "plain")
    assert "identities" not in (tmp_path / "plain/requests.jsonl").read_text()


def test_two_evaluations_that_store_answers_in_one_directory(tmp_path: Path) -> None:
    def make(model: Any, **given: Any) -> HarnessLM:
        return HarnessLM(model, generation={"gen_length": 2}, responses=tmp_path / "out/responses.jsonl", **given)

    requests = ask("generate_until", ("w1", {"until": []}))
    first, second = make(tiny("llada")), make(tiny("llada"))
    message = r"another process or thread writes .*out; wait for it, or give another directory"
    with first.held():
        with counted(second.model) as rows, pytest.raises(ValueError, match=message):
            second.generate_until(requests)
        assert rows == []
        expected = first.generate_until(requests)
    # The second one sees what was stored after it was made.
    with counted(second.model) as rows:
        assert second.generate_until(requests) == expected
    assert rows == []
    # Answers and recordings may have one directory.
    both = make(tiny("llada"), record="value-norm", record_to=tmp_path / "out")
    assert both.generate_until(requests) == expected
