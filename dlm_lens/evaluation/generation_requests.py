"""What a task asks of a generation, and what the evaluation's settings make of it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from dlm_lens.adapters import family_of
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.generation import Job
from dlm_lens.evaluation.settings import GenerationSettings, request_seed
from dlm_lens.sampling.denoising import ALGORITHMS
from dlm_lens.sampling.samplers.causal import CausalSettings

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
    kind = CausalSettings if algorithm == "causal" else ALGORITHMS[algorithm][0]
    return frozenset(field.name for field in fields(kind)) - {"gen_length"}


@cache
def _tell(ignored: tuple[str, ...]) -> None:
    """Once for each set of names."""
    if ignored:
        logger.warning("a task asks for %s, which this sampler does not have; ignored", ", ".join(ignored))
