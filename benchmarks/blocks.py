"""Speed of block diffusion with the exact prefix cache, against recomputing everything and the original code.

`python -m benchmarks.blocks [--size small] [--new-tokens 512 --block 32 --steps-per-block 8]`, on the CPU or on a
GPU if there is one; `--size 0.6B` has the shape of Qwen3-0.6B, and `--model` takes a checkpoint of block diffusion.
With `--original DIRECTORY`, a checkout of ZHZisZZ/dllm, its sampler and its network run on the same weights.

Candidates take turns in one process. Times are those of the process (`process_time`), because other programs may
use the machine; on a GPU they are of the clock.
"""

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Int
from torch import Tensor

from benchmarks.timing import machine

SIZES: Mapping[str, Mapping[str, int]] = {
    "small": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
    },
    "30M": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
    },
    "0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
}  # fmt: skip


def build(size: str) -> Any:
    """A random A2D-Qwen3 in blocks, whose last three tokens (padding, end of the text, mask) are never likely."""
    from dlm_lens.testing import tiny  # after the original, which registers its classes first

    shape = SIZES[size]
    last = shape["vocab_size"] - 1
    model: Any = tiny(
        "a2d_qwen3", sampler="dllm_blocks", tie_word_embeddings=True, max_position_embeddings=4096,
        mask_token_id=last, eos_token_id=last - 1, pad_token_id=last - 2, initializer_range=0.05, **shape,
    )  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight[last - 2 :] *= 0.01
    return model


def original(directory: Path) -> Callable[[Any], Any]:
    """Block diffusion of dllm: its sampler over its own Qwen3, on the weights of a model of ours.

    Only the files of the sampler and of the network are executed.
    """
    packages = ("dllm", "dllm.core")
    for name in packages:  # whose own __init__ imports training and evaluation
        package = ModuleType(name)
        package.__path__ = [str(directory / name.replace(".", "/"))]
        sys.modules[name] = package
    from dllm.core.samplers.bd3lm import BD3LMSampler  # type: ignore[import-not-found]

    file = directory / "dllm/pipelines/a2d/models/qwen3/modeling_qwen3.py"
    spec = spec_from_file_location("dllm_qwen3", file)
    assert spec is not None
    assert spec.loader is not None
    network = module_from_spec(spec)
    spec.loader.exec_module(network)

    def beside(model: Any) -> Any:
        config, ours = network.A2DQwen3Config(**_shape(model.config)), model.config
        theirs = network.A2DQwen3LMHeadModel(config)
        theirs.load_state_dict(model.state_dict())
        theirs.tie_weights()
        theirs.config._attn_implementation = "sdpa"
        for layer in theirs.model.layers:  # which later versions of transformers leave to the config
            layer.attention_type = "full_attention"
        ids = {f"{name}_token_id": getattr(ours, f"{name}_token_id") for name in ("mask", "bos", "pad", "eos")}
        return BD3LMSampler(theirs.to(model.device, model.dtype).eval(), SimpleNamespace(**ids))

    return beside


def _shape(config: Any) -> dict[str, Any]:
    names = (*SIZES["small"], "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    return {name: getattr(config, name) for name in names}


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of one run: of the process, on a GPU of the clock."""
    gpu = torch.cuda.is_available()
    clock = time.perf_counter if gpu else time.process_time
    if gpu:
        torch.cuda.synchronize()
    started = clock()
    run()
    if gpu:
        torch.cuda.synchronize()
    return clock() - started


def main(
    size: str = "small",
    model: Annotated[str, typer.Option(help="a checkpoint of block diffusion, instead of random weights")] = "",
    new_tokens: int = 512,
    prompt_tokens: int = 64,
    block: int = 32,
    steps_per_block: int = 8,
    rounds: int = 5,
    threads: int = 1,
    original_code: Annotated[str, typer.Option("--original", help="a checkout of ZHZisZZ/dllm")] = "",
) -> None:
    """Time one text, side by side."""
    torch.set_num_threads(threads)
    beside = original(Path(original_code)) if original_code else None
    import dlm_lens as dl

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    network: Any = dl.load(model) if model else build(size)
    network.to(device, dtype)
    ids = torch.randint(0, 4000, (1, prompt_tokens), generator=torch.Generator().manual_seed(0)).to(device)
    settings = {"gen_length": new_tokens, "block_length": block, "steps_per_block": steps_per_block}

    def ours(**options: Any) -> Int[Tensor, "1 position"]:
        return dl.denoise(network, ids, **settings, **options).tokens

    runs: dict[str, Callable[[], Tensor]] = {"everything recomputed": partial(ours, use_cache=False)}
    runs["prefix cache"] = ours
    if beside is not None:
        sampler = beside(network)
        options = {"max_new_tokens": new_tokens, "block_size": block, "steps_per_block": steps_per_block}
        runs["dllm's own code"] = lambda: sampler.sample([ids[0]], **options).cpu()
    written = {name: run() for name, run in runs.items()}  # also the turn that warms up
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds_of(run))
    report(
        taken, written, f"{model or size}, {new_tokens} new tokens, blocks of {block}, {steps_per_block} steps each"
    )


def report(taken: Mapping[str, list[float]], written: Mapping[str, Tensor], title: str) -> None:
    """Print the table, and whether all wrote the same tokens."""
    print(f"\n{title}; {machine()}, {len(next(iter(taken.values())))} rounds\n")
    print("| | best, s | median, s | slowest, s | best ratio | ratio of medians |\n|---|---:|---:|---:|---:|---:|")
    base = taken["prefix cache"]
    for name, values in taken.items():
        ratios = f"{min(values) / min(base):.2f} | {median(values) / median(base):.2f}"
        print(f"| {name} | {min(values):.2f} | {median(values):.2f} | {max(values):.2f} | {ratios} |")
    reference = written["prefix cache"]
    same = {name: float((tokens == reference).float().mean()) for name, tokens in written.items()}
    print("\nTokens as with the cache: " + ", ".join(f"{name} {share:.1%}" for name, share in same.items()))


if __name__ == "__main__":
    typer.run(main)
