"""Likelihoods under attached hooks."""

from typing import Any

import dlm_lens as dl
from dlm_lens.hooks import attach_hooks, mask_top_sinks
from tests.tasks.solutions import PROMPTS, toy

ANSWERS = ["18 + 2 = 20 . 20 + 5 = 25 . answer 25 .", "18 + 2 = 20 . 20 + 5 = 24 . answer 24 ."]
WRONG: tuple[dict[str, Any], ...] = (
    {"method": "mc"},
    {"top": 2},
    {"stage": "after"},
    {"per": "layer"},
    {"order": "right_to_left"},
)


def solve(
    method: Any = "chain_rule", top: int = 1, stage: Any = "before_softmax", per: Any = "head", order: Any = None
) -> dict[str, Any]:
    model = toy()
    more = {} if order is None else {"order": order}
    plain = dl.log_likelihood(model, PROMPTS[5], ANSWERS, method, **more).value.tolist()
    with attach_hooks(model, mask_top_sinks(top, stage=stage, per=per)):
        hidden = dl.log_likelihood(model, PROMPTS[5], ANSWERS, method, **more).value.tolist()
    return {
        "plain": plain,
        "hidden": hidden,
        "margin_plain": plain[0] - plain[1],
        "margin_hidden": hidden[0] - hidden[1],
    }
