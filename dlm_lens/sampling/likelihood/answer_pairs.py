"""Prompts and given answers, from the forms that `log_likelihood` accepts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.adapters.registry import excluded_id
from dlm_lens.printable import shown
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.prompts import as_list, check_id_range, check_text, is_id, read_prompts

_ACCEPTED = "give text, token ids, or a list of them"


@dataclass(frozen=True)
class Pair:
    """One item: a prompt and the answer whose likelihood is computed, on the CPU."""

    prompt: Int[Tensor, "prompt"]
    answer: Int[Tensor, "answer"]

    @property
    def tokens(self) -> Int[Tensor, "position"]:
        """Prompt and answer in one."""
        return torch.cat([self.prompt, self.answer])

    @property
    def in_answer(self) -> Bool[Tensor, "position"]:
        """Which positions are the answer's."""
        return torch.arange(len(self.prompt) + len(self.answer)) >= len(self.prompt)


def read_pairs(model: Any, prompt: Any, answer: Any) -> list[Pair]:
    """Pair every prompt with its answer; a single prompt that is not in a list serves every answer.

    Text is tokenised by itself, the answer without special tokens: the space before it is part of the answer. An
    empty list or text as prompt is no prompt: a DLM then gives the answer's likelihood by itself. (Of a model that
    writes without a prompt, `empty_prompt` of its config, an empty text is what `denoise` makes of it.)

    Raises:
        ValueError: what `read_prompts` refuses, no prompt for an AR model, an empty answer, one with the mask token
            or with ids that have no logit, or another number of answers than of prompts.
    """
    prompts = _read_prompts(model, prompt)
    answers = _read_answers(model, answer)
    if len(prompts) == 1 and (not len(prompts[0]) or _is_single(prompt)):
        prompts *= len(answers)
    if len(prompts) != len(answers):
        raise ValueError(
            f"{len(prompts)} prompts, but {len(answers)} answers; give one answer for every prompt, or one prompt "
            "(not in a list) for all answers"
        )
    pairs = [Pair(*both) for both in zip(prompts, answers, strict=True)]
    for item, pair in enumerate(pairs):
        _check(model, item, pair.answer)
    return pairs


def _read_prompts(model: Any, prompt: Any) -> list[Tensor]:
    """Ids of every prompt, without padding; of a DLM an empty list or text is no prompt, also beside others."""
    if isinstance(prompt, str | list | tuple) and not algorithm_of(model.config).sampler.autoregressive:
        no_prompt = (str, list, tuple) if getattr(model.config, "empty_prompt", None) is None else (list, tuple)
        if isinstance(prompt, no_prompt) and not prompt:
            return [torch.zeros(0, dtype=torch.long)]
        nothing = [isinstance(one, no_prompt) and not one for one in prompt]
        if any(nothing) and not any(map(is_id, prompt)):
            rows = zip(prompt, nothing, strict=True)
            return [ids for one, empty in rows for ids in _read_prompts(model, [] if empty else [one])]
    read = read_prompts(model, prompt)
    return [ids[keep].cpu() for ids, keep in zip(read.ids, read.attention_mask, strict=True)]


def _is_single(value: Any) -> bool:
    if isinstance(value, Mapping) and "input_ids" in value:
        value = value["input_ids"]
    if isinstance(value, Tensor):
        return value.ndim == 1
    value = as_list(value)
    return isinstance(value, str) or (len(value) > 0 and (is_id(value[0]) or isinstance(value[0], Mapping)))


def _read_answers(model: Any, answer: Any) -> list[Tensor]:
    answer = as_list(answer)
    if not isinstance(answer, str | Tensor) and isinstance(answer, Sequence) and not len(answer):
        raise ValueError(f"the answer is {shown(answer)}; give at least one answer, of at least one token")
    if isinstance(answer, bytes) or not isinstance(answer, str | Tensor | Sequence):
        raise ValueError(f"the answer is of an unknown kind: {shown(answer)}; {_ACCEPTED}")
    if isinstance(answer, Tensor) and answer.ndim == 2:
        return [_ids(model, row) for row in answer]
    several = not isinstance(answer, str | Tensor) and len(answer) and not isinstance(answer[0], int | float)
    if several and not is_id(answer[0]):
        return [_ids(model, one) for one in answer]
    return [_ids(model, answer)]


def _ids(model: Any, answer: Any) -> Tensor:
    if isinstance(answer, str):
        if model.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it takes token ids only; or set model.tokenizer")
        check_text(answer, "the answer")
        answer = model.tokenizer(answer, add_special_tokens=False)["input_ids"]
    if not isinstance(answer, Tensor):
        answer = as_list(answer)
        if isinstance(answer, bytes) or not isinstance(answer, Sequence) or not all(map(is_id, answer)):
            raise ValueError(f"the answer {shown(answer)} holds no whole-number ids; {_ACCEPTED}")
        check_id_range([[int(i) for i in answer]])
        answer = torch.tensor([int(i) for i in answer], dtype=torch.long)
    if answer.numel() and (
        answer.is_floating_point() or answer.is_complex() or answer.dtype == torch.bool or answer.ndim != 1
    ):
        raise ValueError(f"answer ids must be integers [position], got {answer.dtype} {list(answer.shape)}")
    return answer.long().cpu().flatten()


def _check(model: Any, item: int, answer: Tensor) -> None:
    if not len(answer):
        raise ValueError(f"answer {item} is empty; the likelihood of nothing is 1, give at least one token")
    columns = model.get_output_embeddings().weight.shape[0]
    outside = answer[(answer < 0) | (answer >= columns)]
    # Also where no noise is masks: an id without probability has no finite loss.
    mask = excluded_id(model.config)
    if mask is not None and bool((answer == mask).any()):
        raise ValueError(f"answer {item} holds the mask token {mask}; the answer is what the masks stand for")
    if len(outside):
        raise ValueError(
            f"answer {item} holds token id {int(outside[0])}, but the model's logits have {columns} columns; was "
            "it tokenized for another model?"
        )
