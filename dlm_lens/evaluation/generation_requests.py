"""Generation requests of the harness: from text to ids, in batches, to text."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.attention import checked
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.likelihood_requests import Around, together
from dlm_lens.evaluation.settings import GenerationSettings, request_seed
from dlm_lens.placement import execution_device
from dlm_lens.sampling import algorithms, denoise
from dlm_lens.sampling.likelihood.scoring import LOGITS, POSITIONS
from dlm_lens.sampling.samplers.llada import LLaDASettings
from dlm_lens.sampling.settings import block_settings


class Cut(NamedTuple):
    """A text, and whether something ended it."""

    text: str
    ended: bool


def end_ids(config: Any) -> frozenset[int]:
    """Ids that end an answer: end of text and end of turn."""
    eos = config.eos_token_id
    found = [*(eos if isinstance(eos, list | tuple) else [eos]), getattr(config, "eot_token_id", None)]
    return frozenset(int(one) for one in found if one is not None)


def cut(tokenizer: Any, ids: Sequence[int], ends: frozenset[int], until: Sequence[str]) -> Cut:
    """The text of `ids` up to the first end token, then up to the first stop sequence.

    Stop sequences are looked for in the raw text, since they may be special tokens, which the result leaves out.
    """
    stop = next((place for place, one in enumerate(ids) if one in ends), None)
    text = str(tokenizer.decode(list(ids[:stop]), skip_special_tokens=False))
    places = [place for one in until if one and (place := text.find(one)) >= 0]
    text = text[: min(places)] if places else text
    for one in set(ids[:stop]).intersection(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        text = text.replace(str(tokenizer.convert_ids_to_tokens(one)), "")
    return Cut(text, stop is not None or bool(places))


POOL = 4
"""Batches whose rows go through their blocks together, so that rows which go on fill up the batches."""
CHECK_EVERY = 8
"""AR decoding looks for stop sequences every so many tokens."""


class Job(NamedTuple):
    """A request in ids: where it belongs, its seed, its stop sequences, and how many tokens its answer has.

    `whole`: its ids are wanted to the last one, also those behind its text's end.
    """

    place: int
    prompt: list[int]
    seed: int
    until: tuple[str, ...]
    gen_length: int
    settings: tuple[tuple[str, Any], ...]
    whole: bool = False


class Text(NamedTuple):
    """A request's result: the text up to its end, and the ids of the whole canvas."""

    place: int
    text: str
    ids: list[int]


class Generator:
    """Generates texts for requests, in an order of its own.

    Where a block, once written, never changes and depends on no random number (LLaDA's sampler at temperature 0,
    with low-confidence remasking and no guidance), a row leaves behind the block in which its text ends. What
    stands in front of the end is the same; the blocks behind it are never computed. AR rows end at a stop sequence.

    Other runs of that sampler end behind the block in which the last of their texts ends. With hooks a row leaves
    early only if all of them are `stateless`, and prompts of unequal length share a run only if all of them are
    `padding_safe`. With `around` only prompts of equal length do, and every run has all its steps.

    Args:
        model: from `dlm_lens.load`.
        batch_size: rows per forward; None for as many as fit into bounded memory.
        hooks: interventions, in force in every run.
        around: makes the context that every run is computed in.
    """

    def __init__(
        self, model: Any, *, batch_size: int | None = None, hooks: Sequence[Any] = (), around: Around | None = None
    ) -> None:
        self.model, self.batch_size, self.hooks, self.around = model, batch_size, checked(hooks), around
        self.padded, self.leaves = together(self.hooks, around), around is None
        self.algorithm = algorithms()[family_of(model.config.model_type).sampler_of(model.config)]
        self.ends = end_ids(model.config)

    def run(self, jobs: Sequence[Job]) -> Iterator[list[Text]]:
        """The results, as they finish, the longest prompts first."""
        memory = not all(hook.stateless for hook in self.hooks)

        def kind(job: Job) -> tuple[Any, ...]:
            return job.gen_length, repr(job.settings), 0 if self.padded else len(job.prompt)

        ordered = sorted(jobs, key=lambda job: (kind(job), -len(job.prompt), job.place))
        for _, group in groupby(ordered, key=kind):
            same = list(group)
            settings = dict(same[0].settings)
            rows = self._rows(same[0], settings)
            if self.leaves and not memory and self._settled(settings):
                for start in range(0, len(same), POOL * rows):
                    yield from self._by_blocks(same[start : start + POOL * rows], settings, rows)
            else:
                for start in range(0, len(same), rows):
                    yield self._whole(same[start : start + rows], settings)

    def _rows(self, longest: Job, settings: Mapping[str, Any]) -> int:
        if self.batch_size is not None:
            return self.batch_size
        head = self.model.get_output_embeddings()
        most = POSITIONS.get(execution_device(head).type, max(POSITIONS.values()))
        halves = 2 if settings.get("cfg_scale", self.model.sampler_defaults.get("cfg_scale")) else 1
        if self.algorithm.sampler.autoregressive:
            evaluated = 1
        else:
            evaluated = settings.get("block_length") or self.model.sampler_defaults.get("block_length")
            evaluated = min(evaluated or longest.gen_length, longest.gen_length)
        width = len(longest.prompt) + longest.gen_length
        return max(1, min(most // (halves * width), LOGITS // (halves * evaluated * head.weight.shape[0])))

    def _settled(self, settings: Mapping[str, Any]) -> bool:
        """Whether a written block is final and the next one depends on nothing but the canvas."""
        if self.algorithm.name != "llada":
            return False
        values = {**self.model.sampler_defaults, **settings}
        plain = not values.get("temperature") and not values.get("cfg_scale")
        return plain and values.get("remasking") == "low_confidence" and values.get("eot_token") is None

    def _whole(self, jobs: Sequence[Job], settings: Mapping[str, Any]) -> list[Text]:
        options: dict[str, Any] = {"gen_length": jobs[0].gen_length, **settings, "hooks": self.hooks}
        if self.leaves:
            options |= self._leaving(jobs, options)
        with ExitStack() as stack:
            if self.around is not None:
                stack.enter_context(self.around(self.model))
            try:
                run = denoise(self.model, [job.prompt for job in jobs], seed=[job.seed for job in jobs], **options)
            except _LeftError as left:
                lengths = [len(job.prompt) + job.gen_length for job in jobs]
                rows = [row[len(row) - length :] for row, length in zip(left.canvas, lengths, strict=True)]
            else:
                rows = [row[keep] for row, keep in zip(run.tokens, run.attention_mask, strict=True)]
        return [self._finished(job, row.tolist()) for job, row in zip(jobs, rows, strict=True)]

    def _leaving(self, jobs: Sequence[Job], options: Mapping[str, Any]) -> dict[str, Any]:
        """What ends a run when all its texts have ended."""
        if self.algorithm.sampler.autoregressive:
            return {"on_logits": _Stopper(self, jobs)}
        if self.algorithm.name != "llada":
            return {}
        block, each = self._blocks(options)
        width = max(len(job.prompt) for job in jobs)

        def leave(step: int, canvas: Tensor) -> None:
            if step == 0 or step % each:
                return
            written = canvas[:, width : width + step // each * block].tolist()
            if all(self._ended(job, [*job.prompt, *ids]) for job, ids in zip(jobs, written, strict=True)):
                raise _LeftError(canvas)

        return {"on_canvas": leave}

    def _blocks(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Tokens of a block, and steps in each.

        Raises:
            ValueError: they do not divide the answer and the steps.
        """
        values = block_settings(self.model.sampler_defaults, options, masks=0)
        whole = LLaDASettings(values["steps"], values["gen_length"], values["block_length"])
        return whole.block_length, whole.steps // whole.blocks

    def _by_blocks(self, jobs: Sequence[Job], settings: Mapping[str, Any], rows: int) -> Iterator[list[Text]]:
        length = jobs[0].gen_length
        block, each = self._blocks({**settings, "gen_length": length})
        written = {job.place: list(job.prompt) for job in jobs}
        left = list(jobs)
        for start in range(0, length, block):
            for first in range(0, len(left), rows):
                some = left[first : first + rows]
                rest = (length - start) // block
                shape = {"gen_length": rest * block, "block_length": block, "steps": rest * each}
                blocks = self._block([written[job.place] for job in some], shape, each, settings)
                for job, ids in zip(some, blocks, strict=True):
                    written[job.place] += ids
            texts = {job.place: self._finished(job, written[job.place]) for job in left}
            done = [job for job in left if start + block == length or self._ended(job, written[job.place])]
            yield [texts[job.place] for job in done]
            left = [job for job in left if job not in done]
            if not left:
                return

    def _block(
        self, prompts: list[list[int]], shape: Mapping[str, int], steps: int, settings: Mapping[str, Any]
    ) -> list[list[int]]:
        """The next block of every row: a run that is left when its first block is written."""

        def leave(step: int, canvas: Tensor) -> None:
            if step == steps:
                raise _LeftError(canvas)

        try:
            denoise(self.model, prompts, on_canvas=leave, hooks=self.hooks, **{**settings, **shape})
        except _LeftError as left:
            width = left.canvas.shape[1] - shape["gen_length"]
            return [[int(i) for i in row] for row in left.canvas[:, width : width + shape["block_length"]].tolist()]
        raise RuntimeError(f"a run ended before step {steps}")

    def _ended(self, job: Job, ids: Sequence[int]) -> bool:
        return not job.whole and cut(self.model.tokenizer, ids[len(job.prompt) :], self.ends, job.until).ended

    def _finished(self, job: Job, ids: list[int]) -> Text:
        return Text(job.place, cut(self.model.tokenizer, ids[len(job.prompt) :], self.ends, job.until).text, ids)


class _LeftError(Exception):
    """Leaves a run from inside, with its canvas."""

    def __init__(self, canvas: Tensor) -> None:
        super().__init__()
        self.canvas = canvas


class _Stopper:
    """Ends the AR rows whose text holds a stop sequence, by leaving them nothing but the end token."""

    def __init__(self, generator: Generator, jobs: Sequence[Job]) -> None:
        self.tokenizer, self.ends, self.jobs = generator.model.tokenizer, generator.ends, jobs
        eos = generator.model.config.eos_token_id
        self.end = eos[0] if isinstance(eos, list) else eos
        self.width = max(len(job.prompt) for job in jobs)
        self.stopped = [False] * len(jobs)

    def __call__(self, step: int, canvas: Tensor, logits: Tensor) -> Tensor | None:
        if self.end is None or not any(job.until for job in self.jobs):
            return None
        if step and step % CHECK_EVERY == 0:
            for row, job in enumerate(self.jobs):
                written = canvas[row, self.width : self.width + step].tolist()
                self.stopped[row] = self.stopped[row] or cut(self.tokenizer, written, self.ends, job.until).ended
        if not any(self.stopped):
            return None
        only = torch.full_like(logits, torch.finfo(logits.dtype).min)
        only[:, self.end] = 0.0
        return torch.where(torch.tensor(self.stopped, device=logits.device)[:, None], only, logits)


logger = logging.getLogger(__name__)

DEFAULT_GEN_LENGTH = 256
"""Tokens of an answer where neither settings, task nor checkpoint say; the harness's own default."""


@dataclass(frozen=True)
class JobMaker:
    """Turns requests into jobs; the evaluation's settings win over the task's, the task's over the model's."""

    model: Any
    encoder: Encoder
    settings: GenerationSettings
    seed: int

    def job(self, place: int, arguments: tuple[str, Mapping[str, Any]], copy: int) -> Job:
        """The job of a request; `copy` counts the draws that were asked for of the same one.

        Raises:
            ValueError: the prompt leaves no room for an answer.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        context, given = arguments
        usual = self.model.sampler_defaults.get("gen_length", DEFAULT_GEN_LENGTH)
        wished: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), usual))
        until = tuple(wished.pop("until")) if self.settings.stop else ()
        length = int(wished.pop("max_gen_toks"))
        known = sampler_settings(self.model)
        _tell(tuple(sorted({*wished} - {*known, "do_sample", "until"})))
        values = {name: value for name, value in wished.items() if name in known} | self.settings.sampler()
        prompt = self.encoder.text(context)
        length = self._length(prompt, self.settings.gen_length or length)
        seed = request_seed(self.seed, context, copy)
        fitted = self.encoder.fitted(prompt, length)
        whole = self.settings.stages > 1
        return Job(place, fitted, seed, until, length, tuple(sorted(values.items())), whole)

    def second(self, job: Job, text: str) -> Job:
        """The job of the second stage, whose prompt is everything that the first one's canvas said."""
        prompt = self.encoder.text(text)
        length = job.gen_length
        if self.settings.canvas_length is not None:
            length = max(1, self.settings.canvas_length - len(prompt))
        prompt, seed = self.encoder.fitted(prompt, length), request_seed(job.seed, "second stage")
        return job._replace(prompt=prompt, gen_length=length, seed=seed)

    def _length(self, prompt: list[int], length: int) -> int:
        canvas = self.settings.canvas_length
        if canvas is None:
            return length
        if canvas <= len(prompt):
            raise ValueError(f"a prompt of {len(prompt)} tokens fills the canvas_length of {canvas}; choose more")
        return canvas - len(prompt)


def sampler_settings(model: Any) -> frozenset[str]:
    """Names of the settings that the model's sampler has, but its length."""
    algorithm = family_of(model.config.model_type).sampler_of(model.config)
    return frozenset(field.name for field in fields(algorithms()[algorithm].settings)) - {"gen_length"}


@cache
def _tell(ignored: tuple[str, ...]) -> None:
    """Once for each set of names."""
    if ignored:
        logger.warning("a task asks for %s, which this sampler does not have; ignored", ", ".join(ignored))
