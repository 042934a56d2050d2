"""Presets: how each cell of the papers' tables was evaluated, as far as papers and code say."""

from collections.abc import Iterator
from dataclasses import replace

from dlm_lens.evaluation.preset import Kind, Preset
from dlm_lens.evaluation.scripts import dream_scripts, llada_scripts
from dlm_lens.evaluation.settings import GenerationSettings, LikelihoodSettings


def list_presets(pattern: str = "") -> list[Preset]:
    """All presets whose name holds `pattern`: the papers' tables in their order, then the authors' scripts."""
    return [
        one
        for one in (*_attention_sinks(), *_one_token(), *llada_scripts(), *dream_scripts())
        if pattern in one.name
    ]


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: there is none.
    """
    for one in list_presets():
        if one.name == name:
            return one
    near = ", ".join(one.name for one in list_presets(name.rsplit("/", 1)[-1])[:5])
    hint = f"perhaps {near}" if near else "dlm-lens eval --presets lists them"
    raise ValueError(f"no preset is named {name!r}; {hint}")


SINKS = "2510.15731, Table 1 and Section 4.3"
SINKS_CODE = "2510.15731 says: the official lm-evaluation-harness scripts, the original papers' hyper-parameters"
ONE_TOKEN = "skywalker0523/OneTokenIsEnough"


def _attention_sinks() -> Iterator[Preset]:
    """Table 1 of 2510.15731: exact match on GSM8K and pass@1 on HumanEval."""
    llada = GenerationSettings(gen_length=256, block_length=32, temperature=0.0, remasking="low_confidence")
    steps = "one step per token, as LLaDA's own script has it for other lengths (the paper does not say)"
    chat = "the chat template (the paper names instruct models only in its limitations, and no template)"
    for task, length, task_name in (("gsm8k", 256, "gsm8k"), ("humaneval", 512, "humaneval_instruct")):
        yield Preset(
            f"attention-sinks/table1/llada/{task}", "GSAI-ML/LLaDA-8B-Instruct", task_name, "generation",
            _metric(task), num_fewshot=_shots(task), chat=True, generation=replace(llada, gen_length=length),
            source=SINKS,
            assumptions=(steps, chat, *_form(task), _shots_said(task)),
        )  # fmt: skip
    dream = {"temperature": 0.1, "remasking": "entropy", "options": {"top_p": 0.9, "alg_temp": 0.0}}
    for task, length, task_name in (("gsm8k", 256, "gsm8k_cot"), ("humaneval", 768, "humaneval_instruct")):
        yield Preset(
            f"attention-sinks/table1/dream/{task}", "Dream-org/Dream-v0-Instruct-7B", task_name, "generation",
            _metric(task), num_fewshot=0, chat=True,
            generation=GenerationSettings(gen_length=length, steps=length, **dream),  # type: ignore[arg-type]
            source=f"{SINKS_CODE}; DreamLM/Dream, eval_instruct/eval.sh",
            assumptions=("the script of Dream-Instruct (the paper names no script)", "the metric (unsaid)"),
        )  # fmt: skip
    for task, length, task_name in (("gsm8k", 256, "gsm8k"), ("humaneval", 512, "humaneval_instruct")):
        told = () if task == "gsm8k" else ("length 512 as LLaDA's (MMaDA's evaluation script has GSM8K alone)",)
        yield Preset(
            f"attention-sinks/table1/mmada/{task}", "Gen-Verse/MMaDA-8B-MixCoT", task_name, "generation",
            _metric(task), num_fewshot=_shots(task), chat=True, multiturn=False,
            generation=GenerationSettings(
                gen_length=length, steps=length, block_length=64, temperature=0.0, remasking="low_confidence"
            ),
            source=f"{SINKS_CODE}; Gen-Verse/MMaDA, evaluation/lm/eval.sh and eval_llada.py",
            assumptions=(
                *told, *_form(task), "the MixCoT checkpoint (the paper does not say)",
                "without the system prompt about <think> that MMaDA's script puts in front of every question",
            ),
        )  # fmt: skip
    for task, length, task_name in (("gsm8k", 256, "gsm8k"), ("humaneval", 512, "humaneval_instruct")):
        yield Preset(
            f"attention-sinks/table1/llama/{task}", "meta-llama/Llama-3.1-8B-Instruct", task_name, "generation",
            _metric(task), num_fewshot=_shots(task), chat=True,
            generation=GenerationSettings(gen_length=length, temperature=0.0), source=SINKS,
            assumptions=(
                "everything but the task: the paper names the model alone", *_form(task), _shots_said(task),
            ),
        )  # fmt: skip


def _metric(task: str) -> str:
    return "exact_match (flexible-extract)" if task == "gsm8k" else "pass@1 (create_test)"


def _shots(task: str) -> int:
    return 5 if task == "gsm8k" else 0


def _form(task: str) -> tuple[str, ...]:
    return () if task == "gsm8k" else ("humaneval_instruct, the harness's HumanEval for chats (unsaid)",)


def _shots_said(task: str) -> str:
    return f"{_shots(task)} worked examples, the harness's own number, and the metric's filter (unsaid)"


def _one_token() -> Iterator[Preset]:
    """Tables 1 and 2 of 2601.19657, by its code for the from-scratch models; Tables 3 to 5 have the same tasks."""
    drawn = LikelihoodSettings("mc", samples=1024, strata=16)
    cells: tuple[tuple[str, Kind, str, LikelihoodSettings, tuple[str, ...]], ...] = (
        ("lambada_standard", "greedy completion", "acc",
         LikelihoodSettings("chain_rule", cfg_scale=1.1, is_greedy=True), ()),
        ("piqa", "likelihood", "acc", LikelihoodSettings("chain_rule", cfg_scale=0.6), ()),
        ("arc_easy", "likelihood", "acc", replace(drawn, cfg_scale=0.6), ()),
        ("arc_challenge", "likelihood", "acc", replace(drawn, cfg_scale=0.6),
         ("the settings of ARC-e (the script has no line for ARC-c)",)),
        ("social_iqa", "likelihood", "acc", replace(drawn, cfg_scale=0.6), ()),
        ("race", "likelihood", "acc", replace(drawn, cfg_scale=0.7), ()),
        ("hellaswag", "likelihood", "acc_norm", replace(drawn, cfg_scale=0.7),
         ("acc_norm rather than acc (the paper does not say)",)),
    )  # fmt: skip
    two_stages = GenerationSettings(
        canvas_length=256, steps=256, temperature=0.1, cfg_scale=0.0, remasking="greedy", stages=2
    )
    unsaid = ("num_fewshot 0, the harness's default",)
    for table, model, more in (
        ("table2", "the from-scratch SMDM-layout models", ()),
        ("table1", "the converted Qwen2.5 models",
         ("the settings of the from-scratch models (the code of the converted ones is not public), with the masks, "
          "remasking and one step per token of the model's own sampler",)),
    ):  # fmt: skip
        for task, kind, metric, likelihood, said in cells:
            yield Preset(
                f"one-token/{table}/{task}", model, task, kind, metric, num_fewshot=0, likelihood=likelihood,
                source=f"{ONE_TOKEN}, eval_mdm.sh and evaluate_diff.py", assumptions=(*said, *more, *unsaid),
            )  # fmt: skip
        yield Preset(
            f"one-token/{table}/gsm8k", model, "gsm8k_two_stage", "generation", "exact_match", num_fewshot=0,
            generation=two_stages if table == "table2" else replace(two_stages, steps=None, remasking=None),
            source=f"{ONE_TOKEN}, evaluate_gsm8k.py",
            assumptions=(
                "the openai/gsm8k test split (theirs is a copy in another repository)",
                "the number behind #### is compared as text without commas and dollar signs (theirs: sympy)",
                *more,
            ),
        )  # fmt: skip
