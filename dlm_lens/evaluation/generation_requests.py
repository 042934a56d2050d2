"""Generation requests of the harness: from text to ids, in batches, to text."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.attention import attached_hooks, checked
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.likelihood_requests import Around, together
from dlm_lens.evaluation.settings import GenerationSettings, request_seed
from dlm_lens.placement import execution_device
from dlm_lens.sampling import denoise
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.likelihood.scoring import LOGITS, POSITIONS
from dlm_lens.sampling.settings import SpecialIds


class Cut(NamedTuple):
    """A text, and whether an end token or a stop sequence ended it."""

    text: str
    ended: bool


def end_ids(config: Any) -> frozenset[int]:
    """Ids that end an answer: end of text and end of turn."""
    return frozenset(SpecialIds.of(config).stops)


def cut(tokenizer: Any, ids: Sequence[int], ends: frozenset[int], until: Sequence[str]) -> Cut:
    """The text of `ids` up to the first end token, then up to the first stop sequence.

    Stop sequences are looked for in the raw text, since they may be special tokens, which the result leaves out.
    """
    stop = next((index for index, one in enumerate(ids) if one in ends), None)
    text = str(tokenizer.decode(list(ids[:stop]), skip_special_tokens=False))
    stops = [index for one in until if one and (index := text.find(one)) >= 0]
    text = text[: min(stops)] if stops else text
    for one in set(ids[:stop]).intersection(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        text = text.replace(str(tokenizer.convert_ids_to_tokens(one)), "")
    return Cut(text, stop is not None or bool(stops))


POOL = 4
"""Batches whose rows are decoded block by block together, so that unfinished rows can be regrouped."""
CHECK_EVERY = 8
"""Tokens between two searches for stop sequences in AR decoding."""


class Job(NamedTuple):
    """A generation request in token ids.

    Args:
        place: index of the request.
        prompt: ids.
        seed: of its random numbers.
        until: stop sequences.
        gen_length: tokens of the answer.
        settings: of the sampler.
        whole: whether all ids are needed, also those after the end of the text.
    """

    place: int
    prompt: list[int]
    seed: int
    until: tuple[str, ...]
    gen_length: int
    settings: tuple[tuple[str, Any], ...]
    whole: bool = False

    def within(self, ids: list[int]) -> list[int]:
        """Prompt and answer, without what follows them on a canvas that ends with a whole block."""
        return ids[: len(self.prompt) + self.gen_length]


class Text(NamedTuple):
    """A request's result: the text up to its end, and the ids of the whole canvas."""

    place: int
    text: str
    ids: list[int]


class Generator:
    """Generates texts for requests, longest prompts first.

    Where a run can be continued from its finished blocks (`Sampler.continues`: LLaDA's sampler at temperature 0,
    with low-confidence remasking and without guidance), a row stops after the block in which its text ends: the
    text is the same, and later blocks are not computed. AR rows stop at a stop sequence. Other runs that decode
    blocks in order (`Sampler.decodes_in_order`) stop after the block in which the last of their texts ends.

    With hooks, rows stop early only if all hooks are `stateless`, and prompts of unequal length share a run only if
    all are `padding_safe` and blocks are not counted from the text. Where the number of steps depends on the
    tokens, a row waits for others, and the number of a step depends on them: with hooks that are not `stateless`
    every prompt has a run of its own there. With `around`, only prompts of equal length share a run, and every run
    has all steps.

    Args:
        model: from `dlm_lens.load`.
        batch_size: rows per forward; None for as many as fit into bounded memory.
        hooks: interventions of every run.
        around: returns the context manager of every run.
    """

    def __init__(
        self, model: Any, *, batch_size: int | None = None, hooks: Sequence[Any] = (), around: Around | None = None
    ) -> None:
        self.model, self.batch_size, self.hooks, self.around = model, batch_size, checked(hooks), around
        self.padded, self.leaves = together(model, self.hooks, around), around is None
        self.algorithm = algorithm_of(model.config)
        self.ends = end_ids(model.config)

    def run(self, jobs: Sequence[Job]) -> Iterator[list[Text]]:
        """The results in the order in which they finish."""
        stateful = not all(hook.stateless for hook in (*self.hooks, *attached_hooks(self.model)))

        def kind(job: Job) -> tuple[Any, ...]:
            return job.gen_length, repr(job.settings), 0 if self.padded else len(job.prompt)

        ordered = sorted(jobs, key=lambda job: (kind(job), -len(job.prompt), job.place))
        for _, group in groupby(ordered, key=kind):
            same = list(group)
            settings = dict(same[0].settings)
            given = {"gen_length": same[0].gen_length, **settings}
            rows = 1 if stateful and self._rows_wait(given) else self._rows(same[0], given)
            if self.leaves and not stateful and self._continues(given):
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
        resolved = self._resolved(settings)
        halves = 2 if resolved.get("cfg_scale") else 1
        if self.algorithm.sampler.autoregressive:
            evaluated = 1
        else:
            evaluated = min(resolved.get("block_length") or longest.gen_length, longest.gen_length)
        width = len(longest.prompt) + longest.gen_length
        return max(1, min(most // (halves * width), LOGITS // (halves * evaluated * head.weight.shape[0])))

    def _resolved(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in settings.items() if value is not None}
        return self.algorithm.resolved(self.model.sampler_defaults, given)

    def _rows_wait(self, settings: Mapping[str, Any]) -> bool:
        return bool(self.algorithm.sampler.rows_wait(self._resolved(settings)))

    def _continues(self, settings: Mapping[str, Any]) -> bool:
        return bool(self.algorithm.sampler.continues(self._resolved(settings)))

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
        return [self._finished(job, job.within(row.tolist())) for job, row in zip(jobs, rows, strict=True)]

    def _leaving(self, jobs: Sequence[Job], options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `denoise` that end a run when all its texts have ended."""
        if self.algorithm.sampler.autoregressive:
            return {"on_logits": _Stopper(self, jobs)}
        if not self.algorithm.sampler.decodes_in_order:
            return {}
        block = self._resolved(options)["block_length"] or jobs[0].gen_length
        width = max(len(job.prompt) for job in jobs)
        seen = [0] * len(jobs)

        def leave(step: int, canvas: Tensor) -> None:
            """End the run where the finished blocks of every row hold its end."""
            nonlocal seen
            blocks = ((self._finished_positions(canvas) - width) // block).tolist()
            if blocks == seen:
                return
            seen = blocks
            written = [row[width : width + n * block] for row, n in zip(canvas.tolist(), blocks, strict=True)]
            if all(self._ended(job, [*job.prompt, *ids]) for job, ids in zip(jobs, written, strict=True)):
                raise _LeftError(canvas)

        return {"on_canvas": leave}

    def _blocks(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Tokens per block, and steps per block.

        Raises:
            ValueError: the blocks do not divide the answer or the steps.
        """
        values = self._resolved(options)
        whole = self.algorithm.settings(values["steps"], values["gen_length"], values["block_length"])
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
                blocks = self._block([written[job.place] for job in some], shape, settings)
                for job, ids in zip(some, blocks, strict=True):
                    written[job.place] = ids
            texts = {job.place: self._finished(job, written[job.place]) for job in left}
            done = [job for job in left if start + block == length or self._ended(job, written[job.place])]
            yield [texts[job.place] for job in done]
            left = [job for job in left if job not in done]
            if not left:
                return

    def _block(
        self, prompts: list[list[int]], shape: Mapping[str, int], settings: Mapping[str, Any]
    ) -> list[list[int]]:
        """Every row with its next block, from a run that stops after its first block.

        Masks in the prompts are filled in with the first block.
        """
        stop = max(map(len, prompts)) + shape["block_length"]

        def leave(step: int, canvas: Tensor) -> None:
            """End the run where the first block of every row is decided."""
            if int(self._finished_positions(canvas).min()) >= stop:
                raise _LeftError(canvas)

        try:
            run = denoise(self.model, prompts, on_canvas=leave, hooks=self.hooks, **{**settings, **shape})
            canvas = run.tokens  # only where reference_quirks let the mask token be decided
        except _LeftError as left:
            canvas = left.canvas
        rows = canvas[:, :stop].tolist()
        begins = [stop - shape["block_length"] - len(prompt) for prompt in prompts]
        return [row[begin:] for row, begin in zip(rows, begins, strict=True)]

    def _finished_positions(self, canvas: Int[Tensor, "row position"]) -> Int[Tensor, "row"]:
        """How many positions come before the first mask of every row.

        How many steps a block takes is not known before: with a threshold as many as its confidences need, and
        under a cache the steps that have nothing to decide are left out.
        """
        masks = canvas == self.model.config.mask_token_id
        return torch.where(masks.any(-1), masks.int().argmax(-1), canvas.shape[1])

    def _ended(self, job: Job, ids: Sequence[int]) -> bool:
        return not job.whole and cut(self.model.tokenizer, ids[len(job.prompt) :], self.ends, job.until).ended

    def _finished(self, job: Job, ids: list[int]) -> Text:
        return Text(job.place, cut(self.model.tokenizer, ids[len(job.prompt) :], self.ends, job.until).text, ids)


class _LeftError(Exception):
    """Ends a run early; carries its canvas."""

    def __init__(self, canvas: Tensor) -> None:
        super().__init__()
        self.canvas = canvas


class _Stopper:
    """Ends AR rows whose text holds a stop sequence: their only possible token becomes the end token."""

    def __init__(self, generator: Generator, jobs: Sequence[Job]) -> None:
        self.tokenizer, self.ends, self.jobs = generator.model.tokenizer, generator.ends, jobs
        self.end = SpecialIds.of(generator.model.config).eos
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
"""Tokens of an answer where settings, task and checkpoint give none; the harness's default."""


@dataclass(frozen=True)
class JobMaker:
    """Turns requests into jobs; the evaluation's settings override the task's, and these the model's."""

    model: Any
    encoder: Encoder
    settings: GenerationSettings
    seed: int

    def job(self, place: int, arguments: tuple[str, Mapping[str, Any]], copy: int) -> Job:
        """The job of a request; `copy` numbers repeated draws of the same request.

        Raises:
            ValueError: the prompt leaves no room for an answer, or the task requests none.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        context, given = arguments
        default = self.model.sampler_defaults.get("gen_length", DEFAULT_GEN_LENGTH)
        requested: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), default))
        until = tuple(requested.pop("until")) if self.settings.stop else ()
        length = int(requested.pop("max_gen_toks"))
        supported = sampler_settings(self.model)
        _warn_ignored(tuple(sorted({*requested} - {*supported, "do_sample", "until"})))
        values = {name: value for name, value in requested.items() if name in supported} | self.settings.sampler()
        prompt = self._prompt(context)
        if self.settings.gen_length is None and self.settings.canvas_length is None and length < 1:
            raise ValueError(
                f"a task requests an answer of max_gen_toks={length} tokens; give at least 1, or "
                'generation={"gen_length": ...}'
            )
        length = self._length(prompt, self.settings.gen_length or length)
        seed = request_seed(self.seed, context, copy)
        fitted = self.encoder.fitted(prompt, length)
        whole = self.settings.stages > 1
        return Job(place, fitted, seed, until, length, tuple(sorted(values.items())), whole)

    def second_stage(self, job: Job, text: str) -> Job:
        """The job of the second stage, whose prompt is the whole text of the first stage."""
        prompt, length = self._prompt(text), job.gen_length
        if self.settings.canvas_length is not None:
            length = max(1, self.settings.canvas_length - len(prompt))
        prompt, seed = self.encoder.fitted(prompt, length), request_seed(job.seed, "second stage")
        return job._replace(prompt=prompt, gen_length=length, seed=seed)

    def _prompt(self, text: str) -> list[int]:
        """Ids of a text; of an empty one the first token, as in a likelihood without context."""
        prompt = self.encoder.text(text)
        empty = not prompt and getattr(self.model.config, "empty_prompt", None) is None
        return [self.encoder.prefix] if empty else prompt

    def _length(self, prompt: list[int], length: int) -> int:
        canvas = self.settings.canvas_length
        if canvas is None:
            return length
        if canvas <= len(prompt):
            raise ValueError(f"a prompt of {len(prompt)} tokens fills the canvas_length of {canvas}; choose more")
        return canvas - len(prompt)


def sampler_settings(model: Any) -> frozenset[str]:
    """Names of the settings of the model's sampler, without gen_length."""
    return frozenset(field.name for field in fields(algorithm_of(model.config).settings)) - {"gen_length"}


@cache
def _warn_ignored(ignored: tuple[str, ...]) -> None:
    if ignored:
        logger.warning("a task requests %s, which this sampler does not have; ignored", ", ".join(ignored))
