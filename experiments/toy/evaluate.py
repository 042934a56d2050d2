"""Exact-match accuracy of a checkpoint on prompts that it was not trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

import dlm_lens
from experiments.toy.corpus import HeldOut
from experiments.toy.language import Example, is_correct
from experiments.toy.statistics import Estimate, wilson

BATCH = 64


@dataclass(frozen=True)
class Accuracy:
    """Exact match of one task under one way of decoding; `failures` are a few (prompt, answer, target)."""

    task: str
    decoding: str
    correct: Estimate
    failures: tuple[tuple[str, str, str], ...]


def decodings(model: Any) -> dict[str, dict[str, int]]:
    """Settings to evaluate: greedy for a baseline; block-wise and as one block for a diffusion model."""
    defaults = model.sampler_defaults
    if "block_length" not in defaults:
        return {"greedy": {}}
    block, length = defaults["block_length"], defaults["gen_length"]
    return {f"block {block}": {"block_length": block}, "full": {"block_length": length}}


def answers(model: Any, examples: Sequence[Example], **settings: Any) -> list[str]:
    """The model's answers, in batches."""
    texts: list[str] = []
    for start in range(0, len(examples), BATCH):
        prompts = [example.prompt for example in examples[start : start + BATCH]]
        texts += dlm_lens.denoise(model, prompts, seed=0, **settings).answers
    return texts


def accuracy(model: Any, tests: Mapping[str, HeldOut]) -> list[Accuracy]:
    """Exact match on every task, for every way of decoding."""
    results = []
    cases = [
        (task, test, name, settings) for task, test in tests.items() for name, settings in decodings(model).items()
    ]
    for task, test, name, settings in tqdm(cases, desc="exact match", unit="task"):
        texts = answers(model, test.examples, **settings)
        graded = [
            (e.prompt, text, e.target, is_correct(text, e.target))
            for e, text in zip(test.examples, texts, strict=True)
        ]
        wrong = [case[:3] for case in graded if not case[3]]
        results.append(Accuracy(task, name, wilson(len(graded) - len(wrong), len(graded)), tuple(wrong[:3])))
    return results
