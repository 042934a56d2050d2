import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.adapters import family_of
from dlm_lens.sampling import StoredRun, algorithms, samplers
from dlm_lens.sampling.setting_meanings import settings_of_sampler
from dlm_lens.testing import tiny

LEFTMOST = '''
"""A sampler that unmasks the leftmost masks, as many at every step."""

from dataclasses import dataclass

import torch

from dlm_lens.sampling.algorithm_registry import Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.samplers.base import Sampler
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import answer_settings


@dataclass(frozen=True)
class LeftmostSettings:
    steps: int
    gen_length: int


class Propose(torch.nn.Module):
    def forward(self, canvas, logits, evaluated, eligible):
        tokens = canvas.masked_scatter(evaluated, logits[:, :-5].argmax(-1))
        order = -torch.arange(canvas.shape[1]).float().expand(canvas.shape)
        return Proposal(tokens, order.masked_fill(~eligible, -torch.inf))


class LeftmostSampler(Sampler):
    has_quirks = False

    def __init__(self, settings, noise, ids, *, reference_quirks=False):
        super().__init__()
        self.steps, self.propose, self.select = settings.steps, Propose(), Select()

    def plans(self, prompt_length, positions):
        span = (prompt_length, positions)
        return [StepPlan(step, self.steps, 0, span, self.steps - step) for step in range(self.steps)]

    def eligible(self, masked, plan):
        return masked

    def count(self, eligible, masked, plan):
        return (eligible.sum(-1) + plan.remaining - 1) // plan.remaining


ALGORITHM = Algorithm("leftmost", LeftmostSettings, LeftmostSampler, answer_settings, "minus the position")
'''


def test_algorithms_are_found_by_their_files() -> None:
    found = algorithms()
    blocks = ["bd3lm", "d2f", "dllm_blocks", "dmax", "fast_dllm_v2", "llada2", "llada2_editing", "multi_block"]
    blocks += ["llada2_levenshtein", "sdar", "nemotron_labs_diffusion", "efficient_dlm", "stable_diffcoder"]
    others = [
        "causal",
        "d3llm",
        "dreamon",
        "diffugpt",
        "diffusion_gemma",
        "dllm",
        "dllm_var",
        "dream",
        "duo",
        "duo_psi",
        "entropy_bound",
    ]
    others += [
        "llada",
        "gidd",
        "gidd_dit",
        "i_dlm",
        "mdlm",
        "p2",
        "remdm",
        "rnd1",
        "sdlm",
        "sedd",
        "smdm",
        "sumi",
        "udlm",
        "wedlm",
    ]
    assert list(found) == sorted([*blocks, *others])
    assert [name for name, algorithm in found.items() if algorithm.sampler.autoregressive] == ["causal"]
    assert [name for name, algorithm in found.items() if not algorithm.sampler.has_quirks] == [
        "causal",
        "entropy_bound",
        "llada2_levenshtein",
    ]


@pytest.fixture
def leftmost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "leftmost.py").write_text(LEFTMOST)
    monkeypatch.setattr(samplers, "__path__", [*samplers.__path__, str(tmp_path)])
    algorithms.cache_clear()
    model: Any = tiny("llada")
    model.sampler_defaults = {"gen_length": 6, "steps": 3}
    monkeypatch.setitem(family_of("llada").samplers, "leftmost", {})
    model.config.sampler = "leftmost"
    yield model
    algorithms.cache_clear()
    sys.modules.pop("dlm_lens.sampling.samplers.leftmost")


def test_an_algorithm_is_one_file(leftmost: Any) -> None:
    run = dl.denoise(leftmost, [[1, 2, 3], [4]])
    assert run.settings == {"sampler": "leftmost", "gen_length": 6, "steps": 3, "seeds": (0, 0)}
    assert run.step_of[:, 3:].tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert not run.autoregressive
    assert StoredRun(leftmost, run).states(1).shape == (1, 8, 32)
    recorder = dl.Recorder(leftmost, [dl.recording.ReceivedAttention()])
    recorded = recorder.recording(dl.denoise(leftmost, [[1, 2, 3], [4]], observers=recorder))
    again = dl.recording.rerun(leftmost, run, [dl.recording.ReceivedAttention()])
    assert recorded.received.nan_to_num(-1).equal(again.received.nan_to_num(-1))
    with pytest.raises(
        ValueError, match="the leftmost sampler has no setting 'cfg_scale'; it has steps, gen_length"
    ):
        dl.denoise(leftmost, [1, 2], cfg_scale=1.0)


@pytest.mark.parametrize(
    ("family", "own", "sentence"),
    [
        ("sink_qwen", {"stepz": 3}, r"sampler_defaults of the config: .* 'stepz' \(did you mean 'steps'"),
        ("sink_qwen", {"temperature": "hot"}, "sampler_defaults of the config: temperature is 'hot'"),
        ("causal", {"steps": 3}, "sampler_defaults of the config: the causal sampler has no setting 'steps'"),
    ],
)
def test_defaults_of_a_config_that_its_sampler_does_not_have_are_refused(
    family: str, own: dict[str, Any], sentence: str
) -> None:
    model = tiny(family, sampler_defaults=own)
    for given in ({}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match=sentence):
            dl.denoise(model, [[1, 2]], **given)
    with pytest.raises(ValueError, match=sentence):
        dl.record(model, [[1, 2]])


@pytest.mark.parametrize("family", [family.name for family in dl.families()])
def test_a_setting_without_a_default_is_named(family: str) -> None:
    """A family of one's own may leave out what its sampler needs."""
    named = set()
    for sampler in next(one for one in dl.families() if one.name == family).samplers:
        if (family, sampler) == ("bd3lm", "mdlm"):
            continue  # a network without blocks alone has it, and the tiny one has blocks
        model = tiny(family, **({"sampler": sampler} if sampler != tiny_sampler(family) else {}))
        complete = model.sampler_defaults
        for name in complete:
            model.sampler_defaults = {key: value for key, value in complete.items() if key != name}
            given = {} if name == "gen_length" else {"gen_length": 4}
            try:
                run = dl.denoise(model, "w1 w2", **given)
            except ValueError as error:
                assert f"sampler {sampler} of this family has no default {name}: give it" in str(error)  # noqa: PT017
                named.add(name)
            else:
                assert run.settings["gen_length"] == 4
    assert "gen_length" in named


def test_the_settings_of_a_family_without_a_default_cannot_be_listed_either() -> None:
    with pytest.raises(ValueError, match="the sampler llada of this family has no default gen_length: give it"):
        settings_of_sampler(algorithms()["llada"], {"steps": 4, "block_length": 4})


def test_an_error_of_a_resolver_itself_is_not_taken_for_a_missing_default() -> None:
    algorithm = replace(algorithms()["sdlm"], resolve=lambda defaults, given, masks: {}["elsewhere"])
    with pytest.raises(KeyError, match="elsewhere"):
        algorithm.resolved({"gen_length": 8, "window_length": 4}, {})


def tiny_sampler(family: str) -> str:
    return next(iter(next(one for one in dl.families() if one.name == family).samplers))
