"""Presets: the settings that papers and code state, on tasks that exist."""

import pytest

from dlm_lens.evaluation import GenerationSettings, evaluate, find_preset, list_presets
from dlm_lens.evaluation.running import find_tasks
from dlm_lens.evaluation.wishes import JobMaker, sampler_settings
from dlm_lens.testing import tiny


@pytest.mark.parametrize(
    ("task", "kind", "method", "guidance"),
    [
        ("lambada_standard", "greedy completion", "chain_rule", 1.1),
        ("piqa", "likelihood", "chain_rule", 0.6),
        ("arc_easy", "likelihood", "mc", 0.6),
        ("social_iqa", "likelihood", "mc", 0.6),
        ("race", "likelihood", "mc", 0.7),
        ("hellaswag", "likelihood", "mc", 0.7),
    ],
)
@pytest.mark.parametrize("table", ["table1", "table2"])
def test_the_second_papers_likelihoods(table: str, task: str, kind: str, method: str, guidance: float) -> None:
    preset = find_preset(f"one-token/{table}/{task}")
    assert preset.kind == kind
    assert (preset.likelihood.method, preset.likelihood.cfg_scale) == (method, guidance)
    assert preset.likelihood.is_greedy == (True if task == "lambada_standard" else None)
    if method == "mc":
        assert (preset.likelihood.samples, preset.likelihood.strata) == (1024, 16)


def test_the_second_papers_gsm8k_is_two_stages_on_256_positions() -> None:
    settings = find_preset("one-token/table2/gsm8k").generation
    assert settings == GenerationSettings(
        canvas_length=256, steps=256, temperature=0.1, cfg_scale=0.0, remasking="greedy", stages=2
    )


@pytest.mark.parametrize(
    ("model", "task", "length", "block"),
    [
        ("llada", "gsm8k", 256, 32),
        ("llada", "humaneval", 512, 32),
        ("dream", "gsm8k", 256, None),
        ("dream", "humaneval", 768, None),
        ("mmada", "gsm8k", 256, 64),
    ],
)
def test_the_first_papers_generations(model: str, task: str, length: int, block: int | None) -> None:
    settings = find_preset(f"attention-sinks/table1/{model}/{task}").generation
    assert (settings.gen_length, settings.block_length) == (length, block)


def test_every_preset_is_something_that_its_sampler_can_do() -> None:
    families = {"llada": "llada", "dream": "dream", "mmada": "mmada", "llama": "causal"}
    for preset in list_presets():
        _, table, where, *_rest = preset.name.split("/")
        family = families.get(where, {"table1": "sink_qwen", "table2": "smdm"}[table])
        known = sampler_settings(tiny(family))
        assert {*preset.generation.sampler()} <= known, preset.name


def test_the_tasks_exist_and_code_stays_locked() -> None:
    manager = find_tasks([preset.task for preset in list_presets()])
    assert {preset.task for preset in list_presets()} <= {*manager.all_tasks}
    for preset in list_presets("humaneval"):
        with pytest.raises(ValueError, match="confirm_run_unsafe_code"):
            evaluate("toy", **preset.settings())


def test_names_are_unique_and_near_ones_are_named() -> None:
    names = [preset.name for preset in list_presets()]
    assert len(names) == len({*names}) == 8 + 8 + 8
    with pytest.raises(ValueError, match="attention-sinks/table1/llada/gsm8k"):
        find_preset("table1/gsm8k")


def test_every_preset_names_its_source_and_what_is_assumed() -> None:
    for preset in list_presets():
        assert preset.source
        assert preset.assumptions


def test_a_job_gets_what_the_preset_says() -> None:
    from dlm_lens.evaluation.encoding import Encoder

    model = tiny("smdm", max_position_embeddings=512)
    maker = JobMaker(model, Encoder(model), find_preset("one-token/table2/gsm8k").generation, 0)
    job = maker.job(0, ("w1 w2 w3", {"until": ["."], "do_sample": False, "max_gen_toks": 1024}), 0)
    assert job.gen_length == 253
    assert dict(job.settings) == {"steps": 256, "temperature": 0.1, "cfg_scale": 0.0, "remasking": "greedy"}
