"""Presets: the settings that papers and code state, on tasks that exist."""

from pathlib import Path

import pytest
import torch

import dlm_lens as dl
from dlm_lens.evaluation import GenerationSettings, HarnessLM, Preset, evaluate, find_preset, list_presets
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.evaluation import find_tasks
from dlm_lens.evaluation.generation_requests import JobMaker, sampler_settings
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask, changed_task


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


def family_of(preset: Preset) -> str:
    first, table, where, *_rest = preset.name.split("/")
    if first in ("llada", "dream"):
        return first
    families = {"llada": "llada", "dream": "dream", "mmada": "mmada", "llama": "causal"}
    return families.get(where) or {"table1": "sink_qwen", "table2": "smdm"}[table]


def test_every_preset_is_something_that_its_model_can_do() -> None:
    model = {one: tiny(one) for one in {family_of(preset) for preset in list_presets()}}
    for preset in list_presets():
        network = model[family_of(preset)]
        assert {*preset.generation.sampler()} <= sampler_settings(network), preset.name
        if preset.kind == "generation":
            continue
        settings = {
            "samples": preset.likelihood.samples, "strata": preset.likelihood.strata, **preset.likelihood.options
        }  # fmt: skip
        if preset.likelihood.method == "mc" and preset.likelihood.samples > 1:
            settings |= {"samples": 2 * (preset.likelihood.strata or 1)}
        method = preset.likelihood.method
        dl.log_likelihood(
            network, [1, 2], [3, 4], method, cfg_scale=preset.likelihood.cfg_scale,
            **(settings if method == "mc" else {}),
        )  # fmt: skip


class TestDreamsScript:
    """HKUNLP/Dream, eval/eval.py, eval_dream_mc.sh and eval_dream_gen.sh, restated."""

    @pytest.mark.parametrize(
        ("task", "shots"),
        [
            ("mmlu", 5), ("arc_easy", 0), ("arc_challenge", 0), ("hellaswag", 0), ("piqa", 0),
            ("gpqa_main_n_shot", 5), ("winogrande", 5), ("race", 0),
        ],
    )  # fmt: skip
    def test_likelihoods(self, task: str, shots: int) -> None:
        preset = find_preset(f"dream/eval_dream_mc/{task}")
        asked = preset.likelihood
        # mc_num, the batch (a stratified draw each), classifier_free_guidance 1.0 (none), no greedy decoding
        assert (asked.method, asked.samples, asked.strata, asked.cfg_scale, asked.is_greedy) == (
            "mc", 128, 32, 0.0, False,
        )  # fmt: skip
        assert asked.options == {"eps": 1e-3, "protect_ends": True, "scope": "answer"}
        assert (preset.num_fewshot, preset.add_bos, asked.append_eos, preset.max_length) == (
            shots,
            True,
            True,
            2048,
        )

    def test_what_the_model_is_shown(self, tmp_path: Path) -> None:
        """_encode_pair and _forward_process: <bos> context | continuation <eos>, both ends never masked."""
        model = tiny("dream", bos_token_id=5, max_position_embeddings=4096)
        bos, eos, mask = 5, int(model.config.eos_token_id), model.config.mask_token_id
        given = find_preset("dream/eval_dream_mc/piqa").settings()
        settings = {name: given[name] for name in ("likelihood", "add_bos", "max_length")}
        lm = HarnessLM(model, **settings, record_to=tmp_path)
        requests = ask("loglikelihood", ("w1 w2 w3", " w4 w5 w6"), ("", " w4 w5"), ("w1 ", "w9"))
        found = lm.loglikelihood(requests)
        assert [same for _, same in found] == [False] * 3
        wanted = [([bos, 1, 2, 3], [4, 5, 6, eos]), ([bos], [4, 5, eos]), ([bos, 1], [9, eos])]
        for number, (prefix, target) in enumerate(wanted):
            recording = dl.Recording.load(tmp_path / f"task/{number:05d}-0")
            canvases, whole = recording.tokens[:, 0], torch.tensor(prefix + target)
            assert recording.prompt_length == len(prefix)
            masked = canvases == mask
            assert torch.equal(canvases.where(~masked, whole), whole.expand(canvases.shape))
            assert not masked[:, [*range(len(prefix)), -1]].any()
            # 128 draws: all of the masks that there are of what may be masked, but the empty one
            assert len(canvases) == 2 ** (len(target) - 1) - 1
            seed = recording.seeds[0]
            value = dl.log_likelihood(model, prefix, target, samples=128, strata=32, seed=seed).value
            assert found[number][0] == pytest.approx(float(value), abs=1e-4)

    def test_a_long_context_is_cut_so_that_2048_positions_remain(self) -> None:
        model = tiny("dream", bos_token_id=5, max_position_embeddings=4096)
        given = find_preset("dream/eval_dream_mc/race").settings()
        lm = HarnessLM(model, likelihood=given["likelihood"], add_bos=True, max_length=given["max_length"])
        item = lm.items.item(0, ("w1 " * 3000, "w2"), False)
        assert (len(item.context), item.continuation) == (2046, [2, int(model.config.eos_token_id)])

    @pytest.mark.parametrize(
        ("task", "shots", "length", "temperature", "stop"),
        [
            ("humaneval", 0, 512, 0.2, False), ("gsm8k_cot", 8, 256, 0.0, True), ("mbpp", 3, 512, 0.2, True),
            ("minerva_math", 4, 512, 0.0, True), ("bbh", 3, 512, 0.0, True),
        ],
    )  # fmt: skip
    def test_generations(self, task: str, shots: int, length: int, temperature: float, stop: bool) -> None:
        preset = find_preset(f"dream/eval_dream_gen/{task}")
        assert preset.generation == GenerationSettings(
            gen_length=length, steps=length, temperature=temperature, remasking="entropy", stop=stop,
            options={"top_p": 0.95, "alg_temp": 0.0},
        )  # fmt: skip
        assert (preset.num_fewshot, preset.add_bos, preset.chat) == (shots, True, False)

    @pytest.mark.parametrize(("task", "harness", "length"), [
        ("gsm8k", "gsm8k_cot", 256), ("humaneval", "humaneval_instruct", 768),
    ])  # fmt: skip
    def test_the_first_papers_table(self, task: str, harness: str, length: int) -> None:
        """DreamLM/Dream, eval_instruct/eval.sh and diffllm.py: a chat, no worked example, no token added."""
        preset = find_preset(f"attention-sinks/table1/dream/{task}")
        assert preset.generation == GenerationSettings(
            gen_length=length, steps=length, temperature=0.1, remasking="entropy",
            options={"top_p": 0.9, "alg_temp": 0.0},
        )  # fmt: skip
        assert (preset.task, preset.num_fewshot, preset.chat, preset.add_bos) == (harness, 0, True, False)


class TestLLaDAsScript:
    """ML-GSAI/LLaDA, eval_llada_lm_eval.sh and eval_llada.py, restated."""

    @pytest.mark.parametrize(
        ("task", "shots", "guidance", "samples", "strata"),
        [
            ("gpqa_main_n_shot", 5, 0.5, 128, 8), ("truthfulqa_mc2", 0, 2.0, 128, 8),
            ("arc_challenge", 0, 0.5, 128, 8), ("hellaswag", 0, 0.5, 128, 8), ("winogrande", 5, 0.0, 128, 8),
            ("piqa", 0, 0.5, 128, 8),
            ("mmlu", 5, 0.0, 1, 1), ("cmmlu", 5, 0.0, 1, 1), ("ceval-valid", 5, 0.0, 1, 1),
        ],
    )  # fmt: skip
    def test_likelihoods(self, task: str, shots: int, guidance: float, samples: int, strata: int) -> None:
        preset = find_preset(f"llada/eval_llada_lm_eval/{task}")
        asked = preset.likelihood
        assert (asked.method, asked.samples, asked.strata, asked.cfg_scale) == ("mc", samples, strata, guidance)
        assert asked.options == {"rounding": "half_to_even"}  # torch.round of their linspace
        assert (asked.is_greedy, asked.append_eos, preset.add_bos) == (False, False, False)
        assert (preset.num_fewshot, preset.max_length) == (shots, 4096)

    @pytest.mark.parametrize("task", ["bbh", "gsm8k", "minerva_math", "humaneval", "mbpp"])
    def test_generations(self, task: str) -> None:
        preset = find_preset(f"llada/eval_llada_lm_eval/{task}")
        assert preset.generation == GenerationSettings(
            gen_length=1024, steps=1024, block_length=1024, temperature=0.0, cfg_scale=0.0,
            remasking="low_confidence",
        )  # fmt: skip
        assert (preset.num_fewshot, preset.chat) == (None, False)


@pytest.mark.long
def test_mmadas_script_puts_everything_into_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gen-Verse/MMaDA, evaluation/lm/eval.sh and eval_llada.py."""
    preset = find_preset("attention-sinks/table1/mmada/gsm8k")
    assert preset.generation == GenerationSettings(
        gen_length=256, steps=256, block_length=64, temperature=0.0, remasking="low_confidence"
    )
    assert (preset.num_fewshot, preset.chat, preset.multiturn) == (5, True, False)
    model = dl.load("toy")
    monkeypatch.setattr(model.tokenizer, "chat_template", "{% for m in messages %}{{ m['role'] }} : {% endfor %}")
    lm, seen = HarnessLM(model), []
    monkeypatch.setattr(lm, "generate_until", lambda asked: [seen.append(one.args[0]) or "" for one in asked])
    task = changed_task(tmp_path, "toy_lists", ("num_fewshot: 0\n", ""))
    for multiturn in (True, False):
        evaluate(lm, task, limit=1, num_fewshot=2, chat=True, multiturn=multiturn)
    assert seen == ["user : assistant : user : assistant : user : ", "user : "]


@pytest.mark.long
def test_the_tasks_exist_and_code_stays_locked(few_tasks: None) -> None:
    manager = find_tasks([preset.task for preset in list_presets()])
    assert {preset.task for preset in list_presets()} <= {*manager.all_tasks}
    for preset in list_presets("humaneval"):
        with pytest.raises(ValueError, match="confirm_run_unsafe_code"):
            evaluate("toy", **preset.settings())


def test_names_are_unique_and_near_ones_are_named() -> None:
    names = [preset.name for preset in list_presets()]
    assert len(names) == len({*names}) == (8 + 8 + 8) + (9 + 5) + (8 + 5)
    with pytest.raises(ValueError, match="attention-sinks/table1/llada/gsm8k"):
        find_preset("table1/gsm8k")


def test_every_preset_names_its_source_and_what_is_assumed() -> None:
    for preset in list_presets():
        assert preset.source
        assert preset.assumptions


def test_a_job_gets_what_the_preset_says() -> None:
    model = tiny("smdm", max_position_embeddings=512)
    maker = JobMaker(model, Encoder(model), find_preset("one-token/table2/gsm8k").generation, 0)
    job = maker.job(0, ("w1 w2 w3", {"until": ["."], "do_sample": False, "max_gen_toks": 1024}), 0)
    assert job.gen_length == 253
    assert dict(job.settings) == {"steps": 256, "temperature": 0.1, "cfg_scale": 0.0, "remasking": "greedy"}
