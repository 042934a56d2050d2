"""`top_p` and `top_k` that leave out no token are no filter: [MASK] keeps its probability, as without them."""

from typing import Any

import pytest
import torch

from dlm_lens.sampling import denoise
from dlm_lens.testing import tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "dream": {"gen_length": 12, "steps": 6, "remasking": "entropy"},
    "coda": {"gen_length": 12, "steps": 6, "remasking": "entropy"},
    "open_dcoder": {"gen_length": 12, "steps": 6},
    "rnd1": {"gen_length": 12, "steps": 6},
    "sdar": {"gen_length": 12, "temperature": 1.0, "stop_tokens": ()},
}


@pytest.mark.parametrize("every", [{"top_p": 1.0}, {"top_k": 64}, {"top_p": 1.0, "top_k": 1000}])
@pytest.mark.parametrize("family", SETTINGS)
def test_a_filter_that_keeps_every_token_is_none(family: str, every: dict[str, Any]) -> None:
    for seed in range(3):
        model = tiny(family, seed=seed)
        prompt = torch.randint(0, 60, (1, 5), generator=torch.Generator().manual_seed(seed))
        plain = denoise(model, prompt, **SETTINGS[family])
        found = denoise(model, prompt, **SETTINGS[family], **every)
        assert torch.equal(found.canvases, plain.canvases)
        assert torch.equal(found.confidence, plain.confidence)


@pytest.mark.parametrize("family", SETTINGS)
def test_a_filter_that_leaves_out_tokens_is_one(family: str) -> None:
    model, prompt = tiny(family), torch.arange(5, 10)[None]
    settings = SETTINGS[family] | {"temperature": 1.0}
    plain = denoise(model, prompt, **settings)
    assert not torch.equal(denoise(model, prompt, top_k=2, **settings).confidence, plain.confidence)
