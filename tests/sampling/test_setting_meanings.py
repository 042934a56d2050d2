"""What `sampler_settings` says of every sampler, and that what it says of the confidence is so."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling import algorithms
from dlm_lens.sampling.algorithm_registry import FILTERED, MINUS_ENTROPY, PLAIN
from dlm_lens.sampling.denoising import prepared_run
from dlm_lens.sampling.prompts import read_prompts
from dlm_lens.sampling.setting_meanings import SamplerSettings, settings_of_sampler
from dlm_lens.sampling.settings import only_known
from dlm_lens.testing import tiny

SAMPLERS = [(family.name, name) for family in dl.families() for name in family.samplers]


def shown_of(name: str) -> SamplerSettings:
    """Of a sampler in the first family that has it."""
    defaults = next(family.samplers[name] for family in dl.families() if name in family.samplers)
    return settings_of_sampler(algorithms()[name], defaults)


@pytest.mark.parametrize("name", list(algorithms()))
def test_every_setting_has_a_meaning(name: str) -> None:
    shown = shown_of(name)
    assert [one.name for one in shown.settings] == [one.name for one in fields(algorithms()[name].settings)]
    for one in shown.settings:
        assert len(one.meaning) > 5, one
        assert one.meaning.endswith("."), one
    assert shown.source.startswith("Settings of ")
    assert len(shown.confidence) > 5


@pytest.mark.parametrize(("family", "name"), [one for one in SAMPLERS if one != ("bd3lm", "mdlm")])
def test_a_run_without_settings_has_the_values_that_are_shown(family: str, name: str) -> None:
    """All but BD3-LM's second sampler, for which the small network of that family sees blocks."""
    model = tiny(family, sampler=name, **{"diffugpt": {"max_position_embeddings": 256}}.get(family, {}))
    run = prepared_run(model, read_prompts(model, [[5, 6, 7]]), algorithms()[name], {}, (0,), False)
    made = vars(only_known(algorithms()[name].settings, values_of(run), name))
    assert {one.name: one.value for one in dl.sampler_settings(model).settings} == made


def values_of(run: dict[str, Any]) -> dict[str, Any]:
    """The settings that a run records, without those of every sampler."""
    return {
        name: value
        for name, value in run["history"].settings.items()
        if name not in ("sampler", "seeds", "reference_quirks")
    }


def test_a_class_that_extends_another_has_its_meanings_and_its_own() -> None:
    mdlm, remdm = ({one.name: one.meaning for one in shown_of(name).settings} for name in ("mdlm", "remdm"))
    assert mdlm["eps"] == remdm["eps"]
    assert mdlm["predictor"] != remdm["predictor"]
    two = {one.name: one.meaning for one in shown_of("sumi").settings}
    assert two["min_log_snr"] == two["max_log_snr"] == "bounds of ln(alpha / (1 - alpha))."


def test_the_checkpoints_own_values_are_shown_and_printed() -> None:
    model: Any = tiny("llada")
    model.sampler_defaults = {**model.sampler_defaults, "gen_length": 12, "temperature": 0.5}
    shown = dl.sampler_settings(model)
    table = shown.table()
    assert table.loc[["gen_length", "temperature"], "value"].tolist() == [12, 0.5]
    assert table.loc["threshold"].tolist()[:2] == [None, "float | None"]
    printed = str(shown).splitlines()
    assert printed[0] == "llada"
    assert "  temperature = 0.5 (float): 0 takes the most likely token." in printed
    assert max(map(len, printed)) <= 110
    assert repr(shown).startswith("SamplerSettings(llada: steps, gen_length, block_length, temperature,")
    html = shown._repr_html_()
    assert '<td class="label">temperature = 0.5</td><td class="cells">0 takes the most likely token.</td>' in html
    assert "the probability of the proposed token in the plain softmax" in html


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model"):
        dl.sampler_settings("toy")


def sampled() -> list[tuple[str, str]]:
    """A family of each sampler whose confidence is a probability of the proposed token, or an entropy."""
    found: dict[str, str] = {}
    for family in dl.families():
        for name in family.samplers:
            if any(said in algorithms()[name].confidence for said in (PLAIN, FILTERED, MINUS_ENTROPY)):
                found.setdefault(name, family.name)
    return list(found.items())


@pytest.mark.parametrize(("name", "family"), sampled())
def test_the_confidence_is_what_is_said(name: str, family: str) -> None:
    """At temperature 0 (1 for samplers with a schedule) without filters, from the logits that `on_logits` shows."""
    model, said = tiny(family, sampler=name), algorithms()[name].confidence
    given: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "use_cache": False}
    given |= {"t_min": 1.0, "t_max": 1.0, "position_penalty": 0.0, "cfg_scale": 0.0}
    given |= {"smdm": {"remasking": "greedy"}, "dream": {"remasking": "maskgit_plus"}}.get(name, {})
    given |= {"dreamon": {"remasking": "maskgit_plus"}}.get(name, {})
    own = {one.name for one in fields(algorithms()[name].settings)}
    seen: dict[int, Tensor] = {}

    def keep(step: int, _: Tensor, logits: Tensor) -> None:
        seen[step] = logits.double()

    prompt = [[5, 6, *[model.config.mask_token_id] * 4, 8]] if name == "dreamon" else [[5, 6, 7]]
    settings = {each: value for each, value in given.items() if each in own}
    run = dl.denoise(model, prompt, on_logits=keep, logits="all", gen_length=8, **settings)
    checked = 0
    for step, logits in seen.items():
        if logits.dim() == 2:  # AR: of the next token
            logits = logits[:, None].expand(-1, run.canvases.shape[-1], -1)
        if "other than [MASK]" in said:
            logits[..., model.config.mask_token_id] = -torch.inf
        for at in (run.confidence[step, 0] > -torch.inf).nonzero().flatten().tolist():
            if at < logits.shape[1] and logits[0, at].isfinite().any():
                likely = logits[0, at].softmax(-1)
                expected = likely[run.proposals[step, 0, at]]
                if said.startswith(MINUS_ENTROPY):
                    expected = -torch.special.entr(likely).sum()
                # Most of these softmaxes are float32.
                assert float(run.confidence[step, 0, at]) == pytest.approx(float(expected), abs=1e-5), (step, at)
                checked += 1
    assert checked >= 4
