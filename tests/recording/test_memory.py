"""What recording allocates beyond plain denoising: the statistics that it returns, and little else."""

from typing import Any

import torch

import dlm_lens as dl
from benchmarks.recording import PATTERN_STATISTICS, STATISTICS, allocated
from dlm_lens.attention import tiled
from dlm_lens.testing import tiny


def beyond(length: int, monkeypatch: Any) -> tuple[float, float]:
    """MiB of recording with all reducers beyond the plain run, and MiB of the statistics."""
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1 << 13)  # a small model's tiles are small
    model = tiny("llada", hidden_size=64, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=4, max_position_embeddings=length)  # fmt: skip
    prompt = torch.randint(0, 20, (1, length - 8), generator=torch.Generator().manual_seed(0))
    settings = {"steps": 4, "gen_length": 8, "block_length": 8}
    reducers = [*STATISTICS, *PATTERN_STATISTICS]
    dl.record(model, prompt, reducers, **settings)  # what is made once a process
    plain, _ = allocated(lambda: dl.denoise(model, prompt, **settings))
    whole, recording = allocated(lambda: dl.record(model, prompt, reducers, **settings))
    return whole - plain, sum(array.nbytes for array in recording.arrays.values()) / 2**20


def test_recording_everything_allocates_less_than_one_and_a_half_times_its_statistics(monkeypatch: Any) -> None:
    for length in (128, 512):
        extra, statistics = beyond(length, monkeypatch)
        assert 0 < extra < 1.5 * statistics, f"{extra:.3f} MiB beyond plain for {statistics:.3f} MiB at {length}"
