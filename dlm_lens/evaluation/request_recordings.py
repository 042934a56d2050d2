"""Recordings of an evaluation: every request is computed alone and recorded into its own directory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dlm_lens.adapters import family_of
from dlm_lens.evaluation.canvas_recorder import CanvasRecorder
from dlm_lens.evaluation.generation_requests import Job, Text, cut, end_ids
from dlm_lens.evaluation.likelihood_requests import Answer, Item, Likelihoods, check_items, greedy_settings
from dlm_lens.evaluation.responses import Responses
from dlm_lens.evaluation.settings import LikelihoodSettings, read_settings
from dlm_lens.files.locks import held
from dlm_lens.files.sealed_json import Document, fitted
from dlm_lens.recording import Recorder
from dlm_lens.recording.record_runs import DEFAULT, stored_batch
from dlm_lens.recording.recorder import Storage, StoringRecorder, reducer_identities
from dlm_lens.recording.reducer_registry import named_reducers
from dlm_lens.recording.storage import save_recording
from dlm_lens.sampling.likelihood.estimates import likelihood_method

INDEX = "requests.jsonl"
"""The index file in the directory of the recordings: every recorded request with its recordings and answer."""


@dataclass(frozen=True)
class RecordSettings:
    """The statistics that an evaluation records of every request.

    Args:
        reducers: as `dlm_lens.record` takes them.
        layers: indices of the layers, negative from the end; None for all.
        dtype: how floating-point statistics are stored, "float32" or "float16".
    """

    reducers: Sequence[Any] = DEFAULT
    layers: Sequence[int] | None = None
    dtype: Storage = "float32"


def read_record(record: Any, to: str | Path | None) -> RecordSettings | None:
    """Settings from an instance, a mapping of their names, one or several reducers, their names, or None.

    Raises:
        ValueError: an unknown reducer, reducers without a directory, or an unknown setting.
    """
    if isinstance(record, Sequence) and not record:
        record = None
    if to is None and record is not None:
        raise ValueError(
            f"record is {record!r:.120}, and record_to is missing; give the directory of the recordings"
        )
    if to is None:
        return None
    if isinstance(record, str):
        return RecordSettings(named_reducers(record, option="record"))
    if record is None or isinstance(record, RecordSettings | Mapping):
        return read_settings(RecordSettings, record)
    # One reducer, or several.
    return RecordSettings(tuple(record) if isinstance(record, Sequence) else (record,))


class IndexLine(Document):
    """The line of one request in the index."""

    kind: str
    task: str | None
    doc_id: int | None
    request: int | None
    recordings: list[str]
    also: list[list[str | int | None]]
    answer: Any


@dataclass(frozen=True)
class RequestBatch:
    """The requests of one call of the harness, with their keys, and the number of each repeated draw."""

    requests: Sequence[Any]
    keys: Sequence[str]
    copies: Sequence[int] | None = None

    def directory(self, place: int) -> str:
        """TASK/DOCUMENT-REQUEST of a request, with -rN for its N-th further draw."""
        request, copy = self.requests[place], self.copies[place] if self.copies else 0
        if request.task_name is None or request.doc_id is None:
            return f"requests/{self.keys[place][:16]}"
        task = str(request.task_name).replace("/", "__")
        task = task if task.strip(".") else f"_{task}"  # ".." is the directory above
        return f"{task}/{request.doc_id:05d}-{request.idx}" + (f"-r{copy}" if copy else "")

    def document(self, place: int) -> int:
        """The document number of a request."""
        found = self.requests[place].doc_id
        return place if found is None else int(found)

    @cached_property
    def same(self) -> Mapping[str, Sequence[Any]]:
        """The requests by their key."""
        found: dict[str, list[Any]] = {}
        for key, request in zip(self.keys, self.requests, strict=True):
            found.setdefault(key, []).append(request)
        return found

    def at(self, places: Sequence[int]) -> "RequestBatch":
        """The requests with these indices."""
        return RequestBatch([self.requests[place] for place in places], [self.keys[place] for place in places])


class RequestRecordings:
    """The recordings of an evaluation: TASK/DOCUMENT-REQUEST, each a `Recording`, and the index of them all.

    A request is complete when the index has its line, which also holds its answer. Complete requests are not
    computed again.

    Args:
        model: from `dlm_lens.load`.
        settings: reducers, layers and dtype.
        to: the directory.
        identity: what the answers depend on.
        index: the index's file name.

    Raises:
        ValueError: reducers that the model does not support, or a directory with recordings of another evaluation.
    """

    def __init__(
        self, model: Any, settings: RecordSettings, to: Path, identity: Mapping[str, Any], index: str = INDEX
    ) -> None:
        self.model, self.settings, self.to = model, settings, to
        recorder = Recorder(
            model, settings.reducers, **self.options
        )  # raises where the model does not support a reducer
        if to.exists() and not to.is_dir():
            raise ValueError(f"record_to is {to}, which is a file; give a directory")
        recorded = {
            "reducers": [spec.reducer for spec in recorder.arrays.specs],
            "layers": list(recorder.tap.layers),
            "dtype": settings.dtype,
            **reducer_identities(recorder),
        }
        self._index = Responses(to / index, {**identity, **recorded})
        self._written: dict[str, list[str]] = {}
        self._settled: dict[str, str] = {}
        self._holders = 0
        self._read()

    @contextmanager
    def held(self, *, shared: bool) -> Iterator[None]:
        """Lock the directory against other evaluations; nested locks have no effect.

        Args:
            shared: with the other processes of this evaluation.

        Raises:
            ValueError: another process or thread records there.
        """
        with ExitStack() as stack:
            if not self._holders:
                stack.enter_context(held(self.to, shared=shared))
                self._index.refresh()
                self._read()
            self._holders += 1
            try:
                yield
            finally:
                self._holders -= 1

    def _read(self) -> None:
        where = self._index.path
        for key, line in self._index.items():
            entry = fitted(IndexLine, line if isinstance(line, dict) else {}, where, "choose another directory")
            self._settled |= dict.fromkeys(entry.recordings, key)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a recorder besides the reducers."""
        return {"layers": self.settings.layers, "dtype": self.settings.dtype}

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def __getitem__(self, key: str) -> Any:
        return self._index[key]["answer"]

    def begin(self, directory: str) -> Path:
        """The directory of a request's next recording; the second and later ones get the suffix -pN.

        Raises:
            ValueError: the directory holds the recording of another request.
        """
        written = self._written.setdefault(directory, [])
        name = f"{directory}-p{len(written)}" if written else directory
        if name in self._settled:
            raise ValueError(
                f"{self.to / name} holds the recording of another request (another prompt?); choose another "
                "directory for record_to"
            )
        written.append(name)
        return self.to / name

    def forget(self) -> None:
        """Remove the index, and the directory made for it, if nothing was recorded."""
        self._index.forget()

    def discard(self, directory: str) -> None:
        """Discard the last `begin`: no canvas was computed, since no draw masked a position."""
        self._written[directory].pop()

    def settle(self, batch: RequestBatch, place: int, kind: str, answer: Any) -> None:
        """Write the line of a request, which completes it."""
        # An empty text has no recording.
        names, key = self._written.pop(batch.directory(place), []), batch.keys[place]
        first, *others = batch.same[key]
        line = {
            "kind": kind,
            "task": first.task_name,
            "doc_id": first.doc_id,
            "request": first.idx,
            "recordings": names,
            # The harness pads the shares of processes with copies of requests.
            "also": [[one.task_name, one.doc_id, one.idx] for one in others if one is not first],
            "answer": answer,
        }
        self._index.append({key: line})
        self._settled |= dict.fromkeys(names, key)


@dataclass(frozen=True)
class RecordedLikelihoods:
    """Computes likelihoods one request at a time, and records the canvases of its value, one step each.

    Args:
        recordings: the directory of all recordings.
        batch: the requests.
        settings: the method and its settings.
        batch_size: canvases per forward; None for as many as fit into bounded memory.
        hooks: interventions of every forward pass.
    """

    recordings: RequestRecordings
    batch: RequestBatch
    settings: LikelihoodSettings
    batch_size: int | None
    hooks: Sequence[Any]

    def run(self, items: Sequence[Item]) -> Iterator[list[Answer]]:
        """The results, one by one.

        Raises:
            ValueError: a request that has no likelihood, before anything is computed.
        """
        model = self.recordings.model
        check_items(model, items, self.settings)
        for item in items:
            directory = self.batch.directory(item.place)
            path = self.recordings.begin(directory)
            recorder = CanvasRecorder(
                model,
                self.recordings.settings.reducers,
                context=len(item.context),
                length=len(item.context) + len(item.continuation),
                halves=2 if self.settings.cfg_scale else 1,
                **self.recordings.options,
            )
            # Greedy decoding comes after the recording: its canvases do not belong to the value.
            (answer,) = self._answers(item._replace(greedy=False), self.settings, recorder.listening)
            if recorder.canvases:
                recording = recorder.canvases_of(self._described(item))
                # Replaces a recording that a killed run left.
                save_recording(replace(recording, rows=(self.batch.document(item.place),)), path, replace=True)
            else:
                self.recordings.discard(directory)
            yield [self._greedy(item, answer)]

    def _answers(self, item: Item, settings: LikelihoodSettings, around: Any = None) -> list[Answer]:
        model = self.recordings.model
        likelihoods = Likelihoods(model, settings, batch_size=self.batch_size, hooks=self.hooks, around=around)
        return [answer for answers in likelihoods.run([item]) for answer in answers]

    def _greedy(self, item: Item, answer: Answer) -> Answer:
        # The exact pass of an AR model and a greedy completion have computed it already.
        if (
            not item.greedy
            or self._method == "greedy_completion"
            or (self._causal and self._method == "chain_rule")
        ):
            return answer
        (checked,) = self._answers(item, greedy_settings(self.settings))
        return answer._replace(is_greedy=checked.is_greedy)

    def _described(self, item: Item) -> dict[str, Any]:
        found = {"sampler": "likelihood", "method": self._method, "cfg_scale": self.settings.cfg_scale}
        hooks = {"hooks": tuple(map(repr, self.hooks))} if self.hooks else {}
        return {**found, "seeds": (item.seed,), **hooks}

    @property
    def _causal(self) -> bool:
        return family_of(self.recordings.model.config.model_type).causal

    @property
    def _method(self) -> str:
        return likelihood_method(self.recordings.model, self.settings.method)


@dataclass(frozen=True)
class RecordedGenerator:
    """Generates texts one request at a time with `dlm_lens.record`, which resumes a killed run.

    Args:
        recordings: the directory of all recordings.
        batch: the requests.
        hooks: interventions of every run.
    """

    recordings: RequestRecordings
    batch: RequestBatch
    hooks: Sequence[Any]

    def run(self, jobs: Sequence[Job]) -> Iterator[list[Text]]:
        """The results, one by one."""
        model, settings = self.recordings.model, self.recordings.settings
        for job in jobs:
            path = self.recordings.begin(self.batch.directory(job.place))
            recorder = StoringRecorder(model, settings.reducers, path, **self.recordings.options)
            given = {**dict(job.settings), "gen_length": job.gen_length}
            rows = (self.batch.document(job.place),)
            run = stored_batch(recorder, [tuple(job.prompt)], rows, [job.seed], self.hooks, given, False).run
            ids = job.within(run.tokens[0][run.attention_mask[0]].tolist())
            text = cut(model.tokenizer, ids[len(job.prompt) :], end_ids(model.config), job.until).text
            yield [Text(job.place, text, ids)]
