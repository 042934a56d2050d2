"""Presets: the evaluation settings of each cell of the papers' tables and each task of the authors' scripts."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dlm_lens.evaluation.settings import GenerationSettings, LikelihoodSettings

Kind = Literal["likelihood", "greedy completion", "generation"]


@dataclass(frozen=True)
class Preset:
    """The settings of one task of one table, for one model family.

    Args:
        name: "PAPER/TABLE/MODEL/TASK", or "AUTHORS/SCRIPT/TASK" of a public evaluation script.
        model: the checkpoint that the paper evaluated; any of its family takes the settings.
        task: of lm-evaluation-harness, or shipped here.
        kind: whether the number is a likelihood, a greedy completion or a generation.
        metric: the harness's metric, with its filter.
        num_fewshot: worked examples; None for the task's own.
        chat: whether the prompt is a chat.
        multiturn: whether the worked examples of a chat are turns of it, rather than one text.
        likelihood: settings of likelihoods.
        generation: settings of generation.
        add_bos: whether texts begin with the beginning-of-text token.
        max_length: positions of a canvas; None for the model's.
        source: where the settings are published.
        assumptions: settings that are published nowhere and were chosen here.
    """

    name: str
    model: str
    task: str
    kind: Kind
    metric: str
    num_fewshot: int | None = None
    chat: bool = False
    multiturn: bool = True
    likelihood: LikelihoodSettings = field(default_factory=LikelihoodSettings)
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    add_bos: bool = False
    max_length: int | None = None
    source: str = ""
    assumptions: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """Arguments of `evaluate`, next to the model: `evaluate(model, **preset.settings())`."""
        return {
            "tasks": self.task,
            "num_fewshot": self.num_fewshot,
            "chat": self.chat,
            "multiturn": self.multiturn,
            "likelihood": self.likelihood,
            "generation": self.generation,
            "add_bos": self.add_bos,
            "max_length": self.max_length,
        }


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
                "without the system prompt about <think> that MMaDA's script puts before every question",
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
                "the number after #### is compared as text without commas and dollar signs (theirs: sympy)",
                *more,
            ),
        )  # fmt: skip
