"""What was hidden is counted per map, over one run or several."""

import torch

import dlm_lens as dl
from dlm_lens.attention import hidden_mass, hidden_per_map
from dlm_lens.attention.masking_stats import COLUMNS, MASS
from dlm_lens.hooks import mask_top_sinks


def test_runs_count_by_their_maps() -> None:
    hook = mask_top_sinks(2)
    one = {(COLUMNS, hook): [torch.tensor(6), torch.tensor(3)], (MASS, hook): [torch.tensor(0.6), torch.tensor(3)]}
    other = {(COLUMNS, hook): [torch.tensor(2), torch.tensor(5)]}
    assert hidden_per_map(one, hook) == 2.0
    assert hidden_per_map([one, other], hook) == (6 + 2) / (3 + 5)
    # Only maps at which the hook asked count for the mass.
    assert abs((hidden_mass([one, other], hook) or 0) - 0.2) < 1e-6
    assert hidden_per_map([], hook) is hidden_mass(other, hook) is None


def test_a_run_says_what_its_hooks_hid() -> None:
    model = dl.load("toy")
    hook = mask_top_sinks(3)
    run = dl.denoise(model, "sort 4 2 9 1 :", hooks=[hook], steps=4, gen_length=8)
    assert run.settings["columns_hidden"] == (3.0,)
    (mass,) = run.settings["mass_hidden"]
    even = 3 / run.tokens.shape[1]
    assert even < mass < 1
