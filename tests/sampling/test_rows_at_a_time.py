"""Samplers hold few rows of float64 numbers and probabilities: LLaDA's vocabulary takes 1 MB for each position."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dlm_lens as dl
from dlm_lens.sampling import network
from dlm_lens.testing import tiny

PROMPTS = ["w1 w2 w3", "w4"]
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llada": ({"family": "llada"}, {"temperature": 0.8, "block_length": 12}),
    "dream": ({"family": "dream"}, {"temperature": 0.8, "top_p": 0.9}),
    "sdar": ({"family": "sdar"}, {"temperature": 0.8, "block_length": 4, "top_k": 50}),
    "mdlm": ({"family": "mdlm"}, {}),
    "mdlm ddpm": ({"family": "mdlm"}, {"predictor": "ddpm", "temperature": 0.7, "noise_removal": False}),
    "remdm": ({"family": "mdlm", "sampler": "remdm"}, {"nucleus_p": 0.9}),
    "remdm conf": ({"family": "mdlm", "sampler": "remdm"}, {"remasking": "conf"}),
    "sedd": ({"family": "sedd"}, {}),
    "bd3lm": ({"family": "bd3lm"}, {"block_length": 4}),
    "bd3lm ancestral": ({"family": "bd3lm"}, {"block_length": 4, "first_hitting": False, "nucleus_p": 0.9}),
    "smdm": ({"family": "smdm"}, {"remasking": "greedy"}),
    "duo": ({"family": "duo"}, {}),
    "gidd_dit": ({"family": "gidd_dit"}, {"correction_steps": 2}),
    "sumi": ({"family": "sumi"}, {}),
    "sumi adaptive": ({"family": "sumi"}, {"remasking": "adaptive"}),
    "wedlm": ({"family": "wedlm"}, {"temperature": 0.8, "steps": None}),
    "d3llm": ({"family": "dream", "sampler": "d3llm"}, {"temperature": 0.8, "steps": None}),
    "fast_dllm_v2": ({"family": "fast_dllm_v2"}, {"temperature": 0.8, "steps": None}),
    "rnd1": ({"family": "rnd1"}, {"temperature": 0.8, "greedy": False}),
    "rnd1 greedy": ({"family": "rnd1"}, {"temperature": 0.0}),
    "diffugpt": ({"family": "diffugpt"}, {"temperature": 0.8}),
}


SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default)


class LargestOfVocabulary(TorchDispatchMode):
    """The most rows of a vocabulary that a tensor of float64 numbers had, or of probabilities in any dtype."""

    def __init__(self, d_vocab: int) -> None:
        super().__init__()
        self.widths, self.rows = (d_vocab - 1, d_vocab), 0  # without [MASK]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            counts = isinstance(one, Tensor) and one.ndim and (one.dtype == torch.float64 or func in SOFTMAX)
            if counts and one.shape[-1] in self.widths:
                self.rows = max(self.rows, one.numel() // one.shape[-1])
        return found


@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_that_of_all_rows_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, settings = RUNS[name]
    model = tiny(**built)
    given = {name: value for name, value in ({"steps": 6} | settings).items() if value is not None}
    runs, largest = [], []
    for rows in (10_000, 3):
        monkeypatch.setattr(network, "ROWS", rows)
        with LargestOfVocabulary(model.config.vocab_size) as seen:
            runs.append(dl.denoise(model, PROMPTS, gen_length=12, seed=[3, 5], **given))
        largest.append(seen.rows)
    whole, parts = runs
    assert parts.canvases.equal(whole.canvases)
    assert parts.confidence.equal(whole.confidence)
    assert largest[0] >= 8  # the rows of a block of both texts
    assert largest[1] <= 3
