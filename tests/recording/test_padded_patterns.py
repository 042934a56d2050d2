"""`AttentionPattern`: the rows of present queries sum to 1, in one batch, in several, on disk and in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.recording import AttentionPattern, Reducer, record
from dlm_lens.sinks import AboveMean, find_sinks
from dlm_lens.testing import tiny
from tests.recording.reference import build

PROMPTS = [[5], [7, 9, 11], [3, 8]]


@pytest.mark.parametrize(
    "family", ["llada", "sink front", "causal", "dream", "llada2", "sdlm", "i_dlm", "diffusion_gemma"]
)
def test_rows_sum_to_one_however_prompts_are_batched(family: str, tmp_path: Path) -> None:
    few = {"sampler_defaults": {"steps_per_block": 4}} if family == "diffusion_gemma" else {}
    model: Any = build(tiny, family) if " " in family else tiny(family, **few)
    run: dict[str, Any] = {"gen_length": 4, "seed": 0}
    whole = record(model, PROMPTS, [AttentionPattern()], **run)
    apart = record(model, PROMPTS, [AttentionPattern()], batch_size=1, **run)
    record(model, PROMPTS, [AttentionPattern()], batch_size=1, to=tmp_path, **run)
    for found in (whole, apart, dl.Recording.load(tmp_path)):
        torch.testing.assert_close(found.pattern, whole.pattern, equal_nan=True, rtol=1e-3, atol=1e-4)
        absent = found.pattern.isnan()
        assert torch.equal(absent.any(-1), absent.all(-1))
        sums = found.pattern[~absent.any(-1)].sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-4, atol=1e-4)
    assert bool(absent[:, 0, ..., 0, :].all())
    assert not absent[0, 1, ..., 0, :].any() or family == "diffusion_gemma"  # which decodes the block alone


def test_patterns_of_padded_rows_have_sinks() -> None:
    model = tiny("llada")
    found = record(model, PROMPTS[:2], [AttentionPattern()], gen_length=4, batch_size=1)
    present = found.pattern[0, 0, 0][:, 2:]
    assert find_sinks(present, AboveMean(1.0), min_viewers=1).scores.shape == (model.config.num_attention_heads, 7)


def test_shares_without_queries_are_refused() -> None:
    class Shares(Reducer):
        """Padding of 0, and no axis of queries."""

        zero_padding = True

        def reduce(self, layer: Any) -> torch.Tensor:
            raise AssertionError("never called")

    with pytest.raises(ValueError, match=r"shares has zero_padding and the dims .* with both axes"):
        record(tiny("llada"), PROMPTS, [Shares()], gen_length=4)
