"""Presets of the authors' own evaluation scripts: LLaDA's and Dream's base models."""

from collections.abc import Iterator

from dlm_lens.evaluation.preset import Preset
from dlm_lens.evaluation.settings import GenerationSettings, LikelihoodSettings

ANY_METRIC = "the metric: the script names none, and the results hold all of the task's"


def llada_scripts() -> Iterator[Preset]:
    """ML-GSAI/LLaDA, eval_llada_lm_eval.sh, with the defaults of eval_llada.py."""
    source = "ML-GSAI/LLaDA, eval_llada_lm_eval.sh and eval_llada.py"
    cells = (
        ("gpqa_main_n_shot", 5, 0.5, 128), ("truthfulqa_mc2", 0, 2.0, 128), ("arc_challenge", 0, 0.5, 128),
        ("hellaswag", 0, 0.5, 128), ("winogrande", 5, 0.0, 128), ("piqa", 0, 0.5, 128), ("mmlu", 5, 0.0, 1),
        ("cmmlu", 5, 0.0, 1), ("ceval-valid", 5, 0.0, 1),
    )  # fmt: skip
    for task, shots, guidance, samples in cells:
        # Their batch of 8 (1 where there is one sample) is one stratified draw, rounded as they round it.
        settings = LikelihoodSettings(
            "mc", samples=samples, strata=min(8, samples), cfg_scale=guidance, is_greedy=False,
            options={"rounding": "half_to_even"},
        )  # fmt: skip
        yield Preset(
            f"llada/eval_llada_lm_eval/{task}", "GSAI-ML/LLaDA-8B-Base", task, "likelihood", "acc",
            num_fewshot=shots, likelihood=settings, max_length=4096, source=source, assumptions=(ANY_METRIC,),
        )  # fmt: skip
    generation = GenerationSettings(
        gen_length=1024, steps=1024, block_length=1024, temperature=0.0, cfg_scale=0.0, remasking="low_confidence"
    )
    for task, metric in (
        ("bbh", "exact_match"), ("gsm8k", "exact_match"), ("minerva_math", "exact_match"),
        ("humaneval", "pass@1"), ("mbpp", "pass_at_1"),
    ):  # fmt: skip
        yield Preset(
            f"llada/eval_llada_lm_eval/{task}", "GSAI-ML/LLaDA-8B-Base", task, "generation", metric,
            generation=generation, source=source,
            assumptions=("the task's own number of worked examples (the script gives none)", ANY_METRIC),
        )  # fmt: skip


def dream_scripts() -> Iterator[Preset]:
    """HKUNLP/Dream, eval/eval_dream_mc.sh and eval/eval_dream_gen.sh, with the defaults of eval/eval.py."""
    model = "Dream-org/Dream-v0-Base-7B"
    # Their batch of 32 is one stratified draw; log_type "ftb" masks the answer alone.
    likelihood = LikelihoodSettings(
        "mc", samples=128, strata=32, is_greedy=False, append_eos=True,
        options={"eps": 1e-3, "protect_ends": True, "scope": "answer"},
    )  # fmt: skip
    cells = (
        ("mmlu", 5), ("arc_easy", 0), ("arc_challenge", 0), ("hellaswag", 0), ("piqa", 0),
        ("gpqa_main_n_shot", 5), ("winogrande", 5), ("race", 0),
    )  # fmt: skip
    for task, shots in cells:
        yield Preset(
            f"dream/eval_dream_mc/{task}", model, task, "likelihood", "acc", num_fewshot=shots,
            likelihood=likelihood, add_bos=True, max_length=2048,
            source="HKUNLP/Dream, eval/eval_dream_mc.sh and eval/eval.py", assumptions=(ANY_METRIC,),
        )  # fmt: skip
    generations = (
        ("humaneval", 0, 512, 0.2, "pass@1"), ("gsm8k_cot", 8, 256, 0.0, "exact_match"),
        ("mbpp", 3, 512, 0.2, "pass_at_1"), ("minerva_math", 4, 512, 0.0, "exact_match"),
        ("bbh", 3, 512, 0.0, "exact_match"),
    )  # fmt: skip
    for task, shots, length, temperature, metric in generations:
        code = task == "humaneval"
        told = ("without the script's postprocess_code.py, which cuts the code out of the answers",) if code else ()
        yield Preset(
            f"dream/eval_dream_gen/{task}", model, task, "generation", metric, num_fewshot=shots,
            generation=GenerationSettings(
                gen_length=length, steps=length, temperature=temperature, remasking="entropy", stop=not code,
                options={"top_p": 0.95, "alg_temp": 0.0},
            ),
            add_bos=True,
            source="HKUNLP/Dream, eval/eval_dream_gen.sh and eval/eval.py", assumptions=(*told, ANY_METRIC),
        )  # fmt: skip
