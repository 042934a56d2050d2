"""`lm.scan` of a whole run: real canvases and steps, activations that are shapes only."""

from types import SimpleNamespace
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dlm_lens.sampling import Denoised, denoise


class _Shapes:
    """A model whose forward passes run under a fake-tensor mode and say nothing: every logit is 0."""

    def __init__(self, module: Any, mode: Any) -> None:
        self.module, self.mode = module, mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        with self.mode:
            output = self.module(**inputs)
        logits = torch.zeros(tuple(output.logits.shape), device=output.logits.device)
        return SimpleNamespace(logits=logits, past_key_values=output.past_key_values)


def run_or_scan(module: Any, prompt: Any, attention_mask: Any, **settings: Any) -> Denoised:
    """`denoise` with all logits; inside `lm.scan` the sampler is real and the network is not.

    The schedule, the canvases and the sampler's locations are then those of a run in which every token is equally
    likely.
    """
    mode = detect_fake_mode()
    # All logits: an edit of lm.sampler.unmasked may then write any masked position.
    settings = {**settings, "logits": "all"}
    if mode is None:
        return denoise(module, prompt, attention_mask, **settings)
    with unset_fake_temporarily():
        return denoise(_Shapes(module, mode), prompt, attention_mask, **settings)
