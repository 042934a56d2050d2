"""Files with a value of another kind than was written, and the right checksums: a sentence, or no effect.

Damage changes checksums (`test_tensor_documents`, `recording/test_damage`); a file that another program wrote has
right ones. Here every value is replaced in turn by one of another kind, a negative or a huge one.
"""

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.evaluation import Evaluation, Score, score_differences
from dlm_lens.evaluation.responses import Responses
from dlm_lens.experiments import find_experiment, render_experiment
from dlm_lens.experiments.runner import load_results
from dlm_lens.features import SparseAutoencoder, load_sae, save_sae
from dlm_lens.files.atomic_writes import write_file
from dlm_lens.files.sealed_json import CHECKSUM, sealed
from dlm_lens.files.tensor_files import metadata_of, read_tensors, write_tensors
from dlm_lens.hooks import MeanActivations
from dlm_lens.probes import DenoisingClock, TunedLens, denoising_clock
from dlm_lens.recording.activation_shards import ActivationShards, write_activations
from dlm_lens.recording.directories import HEADER
from dlm_lens.recording.model_identity import weights_digest
from dlm_lens.recording.shards import MANIFEST, RUN
from dlm_lens.testing import tiny
from dlm_lens.training.checkpoints import check_files, read_run
from dlm_lens.viz.figures.emergence import _entries
from tests.recording.test_hostile_recordings import PART

VALUES: tuple[Any, ...] = ("x", -1, 2**70, 0.5, True, None, [], {}, ["x"], [[-1]], {"x": {}})
"""What stands in place of a value: of every kind of JSON, and numbers that are no counts."""

MODEL = tiny("llada")
Document = dict[str, Any]


@dataclass(frozen=True)
class Reader:
    """A kind of files: how they are made, and read.

    Args:
        make: writes them into a directory.
        documents: the JSON objects that they hold.
        store: writes the objects again, with right checksums.
        read: reads them, and shows what was read.
    """

    make: Callable[[Path], Any]
    documents: Callable[[Path], list[Document]]
    store: Callable[[Path, list[Document]], None]
    read: Callable[[Path], Any]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in a JSON value: its own, and those inside it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*at, name)
        yield from places(one, (*at, name))


def replaced(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    """The value with another one at a place."""
    found = copy.deepcopy(value)
    holder = found
    for name in at[:-1]:
        holder = holder[name]
    holder[at[-1]] = copy.deepcopy(by)
    return found


def plain(text: str | bytes) -> Document:
    return {name: value for name, value in json.loads(text).items() if name != CHECKSUM}


def in_json(*names: str, seal: bool) -> dict[str, Any]:
    """Documents that are whole files."""

    def store(path: Path, documents: list[Document]) -> None:
        for name, one in zip(names, documents, strict=True):
            (path / name).write_text(json.dumps(sealed(one) if seal else one))

    return {"documents": lambda path: [plain((path / name).read_text()) for name in names], "store": store}


def in_lines(name: str, *, seal: bool) -> dict[str, Any]:
    """Documents that are the lines of a file."""

    def store(path: Path, documents: list[Document]) -> None:
        lines = (json.dumps(sealed(one) if seal else one) + "\n" for one in documents)
        (path / name).write_text("".join(lines))

    return {"documents": lambda path: list(map(plain, (path / name).read_text().splitlines())), "store": store}


def in_metadata(name: str, field: str) -> dict[str, Any]:
    """A document in the metadata of a safetensors file."""

    def store(path: Path, documents: list[Document]) -> None:
        file = path / name
        others = {key: value for key, value in metadata_of(file, "").items() if key != CHECKSUM}
        write_tensors(file, read_tensors(file, ""), {**others, field: json.dumps(documents[0])})

    return {"documents": lambda path: [json.loads(metadata_of(path / name, "")[field])], "store": store}


def in_facts(name: str) -> dict[str, Any]:
    """The metadata of a safetensors file, all of them texts."""

    def store(path: Path, documents: list[Document]) -> None:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in documents[0].items()}
        write_tensors(path / name, read_tensors(path / name, ""), texts)

    def documents(path: Path) -> list[Document]:
        return [{key: value for key, value in metadata_of(path / name, "").items() if key != CHECKSUM}]

    return {"documents": documents, "store": store}


def make_recording(path: Path) -> None:
    reducers = [dl.ReceivedAttention(), dl.recording.TopKeys(2)]
    dl.record(MODEL, ["w1 w2", "w3 w4 w5"], reducers, to=path, steps=2, gen_length=4, seed=0)


def recorded(path: Path) -> list[Document]:
    part = path / PART
    whole = [plain((part / name).read_text()) for name in (HEADER, RUN)]
    return [*whole, *in_lines(MANIFEST, seal=True)["documents"](part)]


def store_recorded(path: Path, documents: list[Document]) -> None:
    """With the digests of what is changed, where they are not what is changed."""
    part, (header, run, *lines) = path / PART, documents
    was, (_, before, *_) = sealed(recorded(path)[0])[CHECKSUM], recorded(path)
    (part / HEADER).write_text(json.dumps(sealed(header)))
    lines = [{**line, "of": sealed(header)[CHECKSUM]} if line.get("of") == was else line for line in lines]
    in_lines(MANIFEST, seal=True)["store"](part, lines)
    if run.get("files") == before["files"]:
        digests = {name: hashlib.sha256((part / name).read_bytes()).hexdigest() for name in (HEADER, MANIFEST)}
        run = {**run, "files": {**before["files"], **digests}}
    (part / RUN).write_text(json.dumps(sealed(run)))


def read_recording(path: Path) -> str:
    found = dl.Recording.load(path)
    shown = [repr(found), repr(found.run), str(found.received.shape)]
    return " ".join(shown if found.run.tokenizer is None else [*shown, *found.run.answers])


def make_evaluation(path: Path) -> None:
    scores = (Score("t", "acc", "none", 0.5, 0.1, 2),)
    about = {"filter": "none", "resps": [["w1"]]}
    samples = [{"doc_id": n, "doc_hash": str(n), "acc": n * 1.0, **about} for n in (0, 1)]
    Evaluation(scores, {"samples": {"t": samples}}).save(path)


def make_lens(path: Path) -> None:
    weight = torch.zeros(1, 32, 32)
    lens = TunedLens(weight, weight[:, 0], (0,), "tiny", weights_digest(MODEL), {"steps": 3, "last_loss": 0.5})
    lens.save(path / "lens.safetensors")


def make_clock(path: Path) -> None:
    run = dl.denoise(MODEL, ["w1 w2", "w3 w4 w5"], steps=3, gen_length=4)
    denoising_clock(MODEL, run, shuffles=1, bins=3).save(path / "clock.safetensors")


def make_means(path: Path) -> None:
    MeanActivations("z", torch.zeros(1, 3, 1, 2), torch.ones(3, 1).long()).save(path / "means.safetensors")


def make_results(path: Path) -> None:
    kept = Path(__file__).parents[2] / "experiments/attention_sinks/results/beyond-freezing/results-00000.jsonl"
    shutil.copyfile(kept, path / kept.name)


def make_sae(path: Path) -> None:
    weights = torch.eye(4, 32)
    sae = SparseAutoencoder(
        weights.T.contiguous(), torch.zeros(4), weights, torch.zeros(32), activation="topk", k=2, layer=1
    )
    save_sae(sae, path)


def make_checkpoint(path: Path) -> None:
    record = {
        "step": 3, "total_steps": 9, "cursor": {"epoch": 0}, "settings": {"steps": 9}, "data": {"bytes": {"a": 3}},
        "seconds": 1.5, "open_loss": {"sum": 0.5}, "versions": {"torch": "2"}, "files": {},
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(sealed(record)))


def make_activations(path: Path) -> None:
    write_activations(MODEL, ["w1 w2"], 0, path / "shards", steps=2, gen_length=2)


READERS: dict[str, Reader] = {
    "recording": Reader(make_recording, recorded, store_recorded, read_recording),
    "evaluation": Reader(
        make_evaluation, **in_json("results.json", seal=False), read=lambda path: score_differences(path, path)
    ),
    "samples": Reader(
        make_evaluation, **in_lines("samples.jsonl", seal=False), read=lambda path: score_differences(path, path)
    ),
    "answers": Reader(
        lambda path: Responses(path / "answers.jsonl", {"task": "t"}).append({"a": ["w1", 0.5]}),
        **in_lines("answers.jsonl", seal=True),
        read=lambda path: list(Responses(path / "answers.jsonl", {"task": "t"}).items()),
    ),
    "lens": Reader(
        make_lens, **in_metadata("lens.safetensors", "lens"),
        read=lambda path: repr(TunedLens.load(path / "lens.safetensors", MODEL)),
    ),
    "clock": Reader(
        make_clock, **in_metadata("clock.safetensors", "clock"),
        read=lambda path: DenoisingClock.load(path / "clock.safetensors", MODEL).table(),
    ),
    "means": Reader(
        make_means, **in_facts("means.safetensors"),
        read=lambda path: repr(MeanActivations.load(path / "means.safetensors")),
    ),
    "autoencoder": Reader(
        make_sae, **in_json("cfg.json", seal=False), read=lambda path: repr(load_sae(path, MODEL))
    ),
    "results": Reader(
        make_results, **in_lines("results-00000.jsonl", seal=True),
        read=lambda path: load_results(find_experiment("beyond-freezing"), path).seconds,
    ),
    "tables of results": Reader(
        make_results, **in_lines("results-00000.jsonl", seal=True),
        read=lambda path: render_experiment(find_experiment("beyond-freezing"), path),
    ),
    "history": Reader(
        lambda path: write_file(path / "trainer_state.json", '{"log_history": [{"step": 1, "loss": 0.5}]}'),
        **in_json("trainer_state.json", seal=False), read=_entries,
    ),
    "checkpoint": Reader(
        make_checkpoint, **in_json("run.json", seal=True), read=lambda path: check_files(path, read_run(path))
    ),
    "activations": Reader(
        make_activations, **in_metadata("shards/activations-000000.safetensors", "facts"),
        read=lambda path: [*ActivationShards(path / "shards")] and ActivationShards(path / "shards").finished,
    ),
}  # fmt: skip


def wrong(reader: Reader, kept: Path, path: Path, cases: list[tuple[int, tuple[Any, ...], Any]]) -> list[str]:
    """What is not told in a sentence that names the file or its directory."""
    documents, found = reader.documents(kept), []
    for number, at, by in cases:
        shutil.copytree(kept, path)
        changed = [*documents]
        changed[number] = replaced(documents[number], at, by)
        case = f"{at} = {by!r}"
        try:
            reader.store(path, changed)
            reader.read(path)
        except (ValueError, FileNotFoundError) as error:
            said = str(error)
            if str(path) not in said or "\n" in said or len(said) > 1500:
                found.append(f"{case}: unclear {type(error).__name__}: {said:.300}")
        except Exception as error:
            found.append(f"{case}: {type(error).__name__}: {error!s:.300}")
        shutil.rmtree(path)
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("cases", [80, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", READERS)
def test_a_value_of_another_kind_is_told(kind: str, cases: int, tmp_path: Path) -> None:
    """Some of all cases; 0 for all of them."""
    reader, kept = READERS[kind], tmp_path / "made"
    kept.mkdir()
    reader.make(kept)
    every = [(n, at, by) for n, one in enumerate(reader.documents(kept)) for at in places(one) for by in VALUES]
    if "results" in kind:  # where items are listed, and figures and intervals computed, all cases take many minutes
        cases = (cases or 800) // (8 if "tables" in kind else 1)
    chosen = random.Random(7).sample(every, min(cases or len(every), len(every)))
    found = wrong(reader, kept, tmp_path / "it", chosen)
    assert not found, f"{len(found)} of {len(chosen)}:\n" + "\n".join(found[:40])
