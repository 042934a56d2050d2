"""Against peers: the same weights, the same request, one process, in turns.

`python -m benchmarks.peers [--dllm CHECKOUT] [--fast-dllm CHECKOUT] [--rows llada-sampler,ar-likelihood]`. The
checkouts are clones of ZHZisZZ/dllm and NVlabs/Fast-dLLM in folders outside this repository; rows that need a
missing one are named at the end. transformers, lm-eval, TransformerLens and nnsight are the installed packages.

Both sides run once first, and a line says whether their tokens or numbers are equal; only then they are timed.
Times are CPU seconds of the process, on a GPU those of the clock. 9 million parameters with random weights.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

import dlm_lens as dl
from benchmarks.evaluation import items_of
from benchmarks.peer_code import commit_of, llada_network, module_at, package, token_ids
from benchmarks.timing import Timings, machine, side_by_side
from dlm_lens.evaluation.likelihood_requests import Item, Likelihoods
from dlm_lens.evaluation.settings import LikelihoodSettings
from dlm_lens.testing import tiny

VOCABULARY, PROMPT, ANSWER, BLOCK = 8192, 64, 32, 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


class Row(NamedTuple):
    """A comparison: what is computed, the peer and its version, and the runs, the peer's first."""

    title: str
    peer: str
    runs: dict[str, Callable[[], Any]]
    compare: Callable[[Any, Any], str]


class Checkouts(NamedTuple):
    """Where the peers' code is; None if it was not given."""

    dllm: Path | None
    fast_dllm: Path | None


def llada() -> Any:
    """A random LLaDA whose mask token is never the most likely: the peers' samplers may write it, ours never."""
    model: Any = tiny("llada", mask_token_id=VOCABULARY - 1, initializer_range=0.1, **SHAPE)
    with torch.no_grad():
        model.get_output_embeddings().weight[-3:] *= 0.01
    return model


def prompts(rows: int) -> list[Tensor]:
    """Random ids."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY - 3, (PROMPT,), generator=generator) for _ in range(rows)]


def requests_of(count: int, kind: str) -> list[Item]:
    """Requests of `benchmarks.evaluation`, in this vocabulary."""

    def within(ids: list[int]) -> list[int]:
        return [one % (VOCABULARY - 3) for one in ids]

    items = items_of(count, [kind])
    return [item._replace(context=within(item.context), continuation=within(item.continuation)) for item in items]


def same_tokens(theirs: Tensor, ours: Tensor) -> str:
    """The share of equal tokens of the canvases."""
    return f"{float((theirs.cpu() == ours.cpu()).double().mean()):.1%} of the tokens equal"


def same_values(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """The largest difference."""
    worst = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    return f"{len(theirs)} values, largest difference {worst:.1e} nats of up to {max(map(abs, theirs)):.0f}"


def llada_sampler(peers: Checkouts) -> Iterator[Row]:
    """Dllm's sampler over its own LLaDA, every token in a step of its own."""
    assert peers.dllm is not None
    sampler, model = _dllm_core(peers.dllm, "samplers.mdlm"), llada()
    network = llada_network("dllm_llada", peers.dllm / "dllm/pipelines/llada/models", model)
    theirs = sampler.MDLMSampler(network, token_ids(model))
    options = {"max_new_tokens": ANSWER, "steps": ANSWER, "block_size": BLOCK}
    settings: dict[str, Any] = {"gen_length": ANSWER, "steps": ANSWER, "block_length": BLOCK}

    def ours(ids: list[Tensor]) -> Tensor:
        return dl.denoise(model, torch.stack(ids), **settings).tokens

    for rows in (1, 4):
        ids = prompts(rows)
        yield Row(
            f"LLaDA's sampler, {rows} x {PROMPT} + {ANSWER} positions, {ANSWER} steps",
            f"dllm {commit_of(peers.dllm)}",
            {
                "dllm, MDLMSampler": partial(theirs.sample, ids, **options),
                "dlm_lens.denoise": partial(ours, ids),
            },
            same_tokens,
        )


def block_sampler(peers: Checkouts) -> Iterator[Row]:
    """Dllm's block diffusion over its own Qwen3."""
    assert peers.dllm is not None
    from benchmarks.blocks import build, original

    beside, model = original(peers.dllm), build("small")
    theirs, ids = beside(model), prompts(1)[0] % 4000
    options = {"max_new_tokens": 256, "block_size": 32, "steps_per_block": 8}
    yield Row(
        "block diffusion (A2D-Qwen3, 4 layers of width 256), 64 + 256 positions, blocks of 32 in 8 steps",
        f"dllm {commit_of(peers.dllm)}",
        {
            "dllm, BD3LMSampler": lambda: theirs.sample([ids], **options),
            "dlm_lens.denoise": lambda: (
                dl.denoise(model, ids[None], gen_length=256, block_length=32, steps_per_block=8).tokens
            ),
        },
        same_tokens,
    )


def llada_likelihood(peers: Checkouts, samples: int = 32, batch: int = 8) -> Iterator[Row]:
    """Dllm's evaluation, Monte Carlo likelihoods with the same masks."""
    assert peers.dllm is not None
    evaluation, model = _dllm_core(peers.dllm, "eval.mdlm"), llada()
    theirs = object.__new__(evaluation.MDLMEvalHarness)  # whose __init__ loads a checkpoint
    theirs.model = llada_network("dllm_llada", peers.dllm / "dllm/pipelines/llada/models", model)
    theirs.mask_id, theirs._device, theirs.batch_size = model.config.mask_token_id, model.device, batch
    theirs.mc_num = samples

    def loop(items: Sequence[Item]) -> list[float]:
        found = []
        for item in items:
            torch.manual_seed(item.seed)  # of ours every item has a generator of its own
            found.append(theirs._get_loglikelihood(torch.tensor(item.context), torch.tensor(item.continuation)))
        return found

    settings = LikelihoodSettings("mc", samples=samples, strata=batch, options={"rounding": "half_to_even"})
    for title in ("letters", "words", "sentences"):
        items = requests_of(8, title)
        yield Row(
            f"LLaDA's likelihoods, {samples} samples, 8 requests (four answers to a context), {title}",
            f"dllm {commit_of(peers.dllm)}",
            {
                f"dllm, MDLMEvalHarness, batches of {batch}": partial(loop, items),
                "dlm_lens, log_likelihood": partial(_values, model, settings, items),
            },
            same_values,
        )


def fast_dllm(peers: Checkouts) -> Iterator[Row]:
    """Fast-dLLM's caches over its own LLaDA."""
    assert peers.fast_dllm is not None
    folder, model, ids = peers.fast_dllm / "llada", llada(), prompts(1)[0][None]
    network = llada_network("model", folder / "model", model)  # the name that its generate.py imports
    generate = module_at("fast_dllm_generate", folder / "generate.py")
    options = {"gen_length": ANSWER, "steps": ANSWER, "block_length": BLOCK, "mask_id": model.config.mask_token_id}
    settings: dict[str, Any] = {"gen_length": ANSWER, "steps": ANSWER, "block_length": BLOCK}
    for cache, name in (
        (None, "generate"),
        ("prefix", "generate_with_prefix_cache"),
        ("dual", "generate_with_dual_cache"),
    ):
        yield Row(
            f"LLaDA's sampler, {PROMPT} + {ANSWER} positions, {ANSWER} steps, cache: {cache or 'none'}",
            f"Fast-dLLM {commit_of(peers.fast_dllm)}",
            {
                f"Fast-dLLM, {name}": lambda name=name: getattr(generate, name)(network, ids, **options)[0],
                "dlm_lens.denoise": lambda cache=cache: dl.denoise(model, ids, cache=cache, **settings).tokens,
            },
            same_tokens,
        )


def ar_likelihood(_: Checkouts) -> Iterator[Row]:
    """lm-eval's class for models of transformers."""
    from lm_eval.models.huggingface import HFLM

    model: Any = tiny("causal", model_type="llama", initializer_range=0.1, **SHAPE)
    theirs = HFLM(pretrained=model, tokenizer=model.tokenizer, device=str(model.device), batch_size=16)

    def loop(items: Sequence[Item]) -> list[float]:
        requests = [(("", str(item.place)), item.context, item.continuation) for item in items]
        return [value for value, _ in theirs._loglikelihood_tokens(requests, disable_tqdm=True)]

    for title in ("letters", "words", "sentences"):
        items = requests_of(48, title)
        yield Row(
            f"likelihoods of an AR model, 48 requests (four answers to a context), {title}",
            f"lm_eval {version('lm_eval')}",
            {
                "lm-eval, HFLM, batches of 16": partial(loop, items),
                "dlm_lens, evaluation": partial(_values, model, LikelihoodSettings(), items),
            },
            same_values,
        )


def _values(model: Any, settings: LikelihoodSettings, items: Sequence[Item]) -> list[float]:
    answers = [answer for chunk in Likelihoods(model, settings).run(items) for answer in chunk]
    return [answer.value for answer in sorted(answers)]


def diffusion_gemma(_: Checkouts) -> Iterator[Row]:
    """Transformers' `generate`."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    shape = {**SHAPE, "num_hidden_layers": 3, "num_key_value_heads": 2}
    shape.pop("max_position_embeddings")
    model: Any = tiny("diffusion_gemma", use_bidirectional_attention="vision", initializer_range=0.05, **shape)
    ids = torch.stack(prompts(2))
    both: dict[str, Any] = {
        "t_min": 0.4, "t_max": 0.8, "stability_threshold": 2, "confidence_threshold": 0.005,
    }  # fmt: skip

    def theirs() -> Tensor:
        torch.manual_seed(0)
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id, disable_compile=True, max_new_tokens=ANSWER,
            max_denoising_steps=8, sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1), **both,
        ).sequences  # fmt: skip

    settings: dict[str, Any] = {**both, "gen_length": ANSWER, "steps_per_block": 8, "entropy_bound": 0.1, "seed": 0}
    yield Row(
        f"DiffusionGemma (3 layers of width 256), 2 x {PROMPT} + {ANSWER} positions, 8 steps a canvas",
        f"transformers {version('transformers')}",
        {
            "transformers, generate": theirs,
            "dlm_lens.denoise, the reference's random numbers": lambda: (
                dl.denoise(model, ids, reference_quirks=True, **settings).tokens
            ),
        },
        same_tokens,
    )


def pattern_caching(_: Checkouts) -> Iterator[Row]:
    """What keys receive in an AR model: from TransformerLens's and nnsight's caches of all patterns."""
    from nnsight import LanguageModel
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    length = 512
    model, twin, eager = (
        tiny("causal", model_type="llama", initializer_range=0.1, **{**SHAPE, "max_position_embeddings": length})
        for _ in range(3)
    )
    eager.set_attn_implementation("eager")
    plain: Any = twin  # TransformerLens replaces the modules of the model that it is given
    plain.set_attn_implementation("eager")
    bridge = build_bridge_from_module(plain, "LlamaForCausalLM", hf_config=plain.config, tokenizer=plain.tokenizer)
    traced = LanguageModel(eager, tokenizer=eager.tokenizer)
    ids = torch.cat(prompts(length // PROMPT))[None]
    layers = range(model.config.num_hidden_layers)

    @torch.no_grad()
    def transformerlens() -> Tensor:
        _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name.endswith("attn.hook_pattern"))
        return torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"][0].sum(-2) for layer in layers])

    @torch.no_grad()
    def nnsight() -> Tensor:
        with traced.trace(ids):
            kept = [layer.self_attn.output[1] for layer in traced.model.layers].save()  # type: ignore[attr-defined]
        return torch.stack([pattern[0].sum(-2) for pattern in kept])

    @torch.no_grad()
    def ours() -> Tensor:
        with dl.record_forward(model, [dl.ReceivedAttention()]) as recording:
            model.get_decoder()(input_ids=ids, use_cache=False)
        received = torch.as_tensor(recording.received[0, 0])  # relative to the uniform pattern's
        return received * torch.as_tensor(recording.expected()[0, 0])

    def difference(theirs: Tensor, own: Any) -> str:
        known = own.isfinite()  # of a key that few queries see there is none
        worst, share = float((theirs - own)[known].abs().max()), float(known.double().mean())
        return f"largest difference {worst:.1e} of up to {float(theirs.max()):.0f} ({share:.1%} of the keys)"

    for name, run, release in (
        ("TransformerLens, run_with_cache of all patterns", transformerlens, "transformer-lens"),
        ("nnsight, all patterns saved", nnsight, "nnsight"),
    ):
        yield Row(
            f"attention received by each of {length} keys, 6 layers x 4 heads, one forward pass",
            f"{release} {version(release)}",
            {name: run, "dlm_lens.record_forward, ReceivedAttention": ours},
            difference,
        )


ROWS: dict[str, tuple[Callable[[Checkouts], Iterator[Row]], str | None]] = {
    "llada-sampler": (llada_sampler, "dllm"),
    "block-sampler": (block_sampler, "dllm"),
    "llada-likelihood": (llada_likelihood, "dllm"),
    "fast-dllm": (fast_dllm, "fast_dllm"),
    "diffusion-gemma": (diffusion_gemma, None),
    "ar-likelihood": (ar_likelihood, None),
    "patterns": (pattern_caching, None),
}
"""The rows, and the checkout that each needs."""


def _dllm_core(checkout: Path, module: str) -> Any:
    """A module of `dllm.core`, without the packages' own `__init__`."""
    from importlib import import_module

    top = package("dllm", checkout / "dllm")
    core = package("dllm.core", checkout / "dllm/core")
    utils = package("dllm.utils", checkout / "dllm/utils")
    package("dllm.core.eval", checkout / "dllm/core/eval")
    vars(top).update(core=core, utils=utils)
    # Command-line arguments of training, which import packages that are not needed here.
    package("dllm.utils.configs", checkout, ModelArguments=object)
    return import_module(f"dllm.core.{module}")


def measure(row: Row, rounds: int) -> None:
    """Compare both sides, then time them."""
    results = {name: run() for name, run in row.runs.items()}
    theirs, ours = results.values()
    print(f"\n{row.title}; {row.peer}; {row.compare(theirs, ours)}; {machine()}", flush=True)
    report(side_by_side(row.runs, rounds, "cpu"))


def report(seconds: Timings) -> None:
    """Seconds, and how many times faster than the peer, with the spread over the rounds."""
    peer = next(iter(seconds))
    print("\n| | CPU seconds | times as fast | from | to |\n|---|---:|---:|---:|---:|")
    for name, value in seconds.items():
        low, high = seconds.spread(peer, name)
        print(f"| {name} | {value:.3f} | {seconds.ratio(peer, name):.2f} | {low:.2f} | {high:.2f} |", flush=True)


def main(
    dllm: Annotated[Path | None, typer.Option(help="a checkout of ZHZisZZ/dllm")] = None,
    fast_dllm: Annotated[Path | None, typer.Option(help="a checkout of NVlabs/Fast-dLLM")] = None,
    rows: Annotated[str, typer.Option(help="names, separated by commas; all by default")] = "",
    rounds: int = 3,
    threads: int = 1,
) -> None:
    """Time every row whose peer is there, and name the others."""
    torch.set_num_threads(threads)
    peers = Checkouts(dllm, fast_dllm)
    chosen = rows.split(",") if rows else list(ROWS)
    unknown = sorted({*chosen} - {*ROWS})
    if unknown:
        raise typer.BadParameter(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    missing = []
    for name in chosen:
        build, needed = ROWS[name]
        if needed is not None and getattr(peers, needed) is None:
            missing.append(f"{name} (give --{needed.replace('_', '-')} CHECKOUT)")
            continue
        for row in build(peers):
            measure(row, rounds)
    if missing:
        print(f"\nleft out: {', '.join(missing)}")


if __name__ == "__main__":
    typer.run(main)
