"""Many likelihoods at once: `log_likelihood` against a restatement of the authors' loop, one item at a time.

`python -m benchmarks.likelihood [--samples 32 --requests 32 --rounds 3]`, on the CPU or on a GPU if there is one.
Both sides use the same masks, and their numbers must agree. The requests mix short answers (with few different
masks) and long ones; "long answers only" has no short ones. `--head` alone times the head and the losses of 1,024
positions, with all logits at once and in pieces.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import typer

import dlm_lens
from benchmarks.timing import machine, print_table, side_by_side
from dlm_lens.sampling import two_copies
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import CountCorruption, chain_masks
from dlm_lens.sampling.likelihood.scoring import cross_entropy, logits_in_pieces
from dlm_lens.testing import tiny

VOCABULARY, STRATA = 8192, 16


def requests_of(count: int) -> list[Pair]:
    """Prompts of 8 to 120 tokens; every other answer has 1 to 4 tokens, the rest 12 to 48."""
    generator = torch.Generator().manual_seed(0)

    def ids(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(0, VOCABULARY - 3, (length,), generator=generator)

    return [Pair(ids(8, 120), ids(1, 4) if item % 2 else ids(12, 48)) for item in range(count)]


def one_at_a_time(model: Any, pairs: Sequence[Pair], samples: int) -> torch.Tensor:
    """LLaDA's get_log_likelihood.py, restated: the samples of one item are a batch, all logits are computed."""
    values = []
    for pair in pairs:
        generator, losses = torch.Generator().manual_seed(0), []
        for _ in range(samples // STRATA):
            drawn = CountCorruption().draw(pair, STRATA, generator)
            losses.append((cross_entropies(model, pair, drawn.masked).sum(-1) / drawn.rate).mean())
        values.append(-torch.stack(losses).mean())
    return torch.stack(values)


def chain_one_at_a_time(model: Any, pairs: Sequence[Pair], _samples: int) -> torch.Tensor:
    """SMDM's chain_rule, restated: the tokens of one item are cut into batches, all logits are computed."""
    values = []
    for pair in pairs:
        parts = [part.split(STRATA) for part in chain_masks(pair, "left_to_right")]
        losses = [cross_entropies(model, pair, masked)[scored].sum() for masked, scored in zip(*parts, strict=True)]
        values.append(-torch.stack(losses).sum())
    return torch.stack(values)


@torch.no_grad()
def cross_entropies(model: Any, pair: Pair, masked: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every masked position, 0 elsewhere: [sample, position]."""
    tokens, masked = pair.tokens.to(model.device), masked.to(model.device)
    logits = model(input_ids=tokens.expand(masked.shape).masked_fill(masked, model.config.mask_token_id)).logits
    out = torch.zeros(masked.shape, device=model.device)
    targets = tokens.expand(masked.shape)[masked]
    out[masked] = torch.nn.functional.cross_entropy(logits[masked].float(), targets, reduction="none")
    return out.cpu()


def compare(title: str, model: Any, pairs: Sequence[Pair], method: str, samples: int, rounds: int) -> None:
    """Time both sides and check that they agree."""
    prompts, answers = [pair.prompt.tolist() for pair in pairs], [pair.answer.tolist() for pair in pairs]
    theirs = one_at_a_time if method == "mc" else chain_one_at_a_time
    options = {"samples": samples, "strata": STRATA} if method == "mc" else {}
    values: dict[str, torch.Tensor] = {}

    def run(name: str) -> None:
        if name == "dlm_lens":
            values[name] = dlm_lens.log_likelihood(model, prompts, answers, method, **options).value
        else:
            values[name] = theirs(model, pairs, samples).double()

    names = ("one item at a time, all logits", "dlm_lens")
    seconds = side_by_side({name: lambda name=name: run(name) for name in names}, rounds)
    torch.testing.assert_close(values[names[1]], values[names[0]], rtol=1e-4, atol=1e-3)
    print_table(f"{title}: {method}, {len(pairs)} requests; {machine()}", seconds, names[0])
    worst = float(((values[names[1]] - values[names[0]]) / values[names[0]]).abs().max())
    print(f"\nlargest relative difference of a value: {worst:.1e}")


def compare_blocks(model: Any, pairs: Sequence[Pair], samples: int, rounds: int) -> None:
    """Block diffusion: the clean copy once per text, against both copies of every mask in one pass."""
    prompts, answers = [pair.prompt.tolist() for pair in pairs], [pair.answer.tolist() for pair in pairs]
    values: dict[str, torch.Tensor] = {}

    def run(name: str, whole: bool) -> None:
        shares = patch.object(two_copies, "keeps_keys", lambda _: False) if whole else nullcontext()
        with shares:
            values[name] = dlm_lens.log_likelihood(model, prompts, answers, samples=samples, strata=STRATA).value

    names = ("both copies of every mask", "the clean copy once per text")
    calls = {name: lambda name=name: run(name, name == names[0]) for name in names}
    seconds = side_by_side(calls, rounds)
    torch.testing.assert_close(values[names[1]], values[names[0]], rtol=1e-4, atol=1e-3)
    print_table(f"block diffusion, {samples} samples: mc, {len(pairs)} requests; {machine()}", seconds, names[0])


@torch.no_grad()
def compare_head(dtype: torch.dtype, rounds: int) -> None:
    """The head and the losses of 1,024 positions x 256 x 32,768: all logits at once, and in pieces."""
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = (torch.randn(32_768, 256, generator=generator) / 16).to(device, dtype)
    states = torch.randn(1, 1024, 256, generator=generator).to(device, dtype)
    targets, where = torch.randint(0, 32_768, (1024,), generator=generator).to(device), torch.arange(1024)

    def head(_: int, some: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(some[0], weight)
        assert bool(logits.amax(-1).isfinite().all())
        return logits

    def at_once() -> torch.Tensor:
        return cross_entropy(head(0, states).float(), where, targets)

    def in_pieces() -> torch.Tensor:
        return torch.cat(
            [
                cross_entropy(logits.float(), where[: len(logits)], targets[first : first + len(logits)])
                for first, logits in logits_in_pieces(head, states)
            ]
        )

    torch.testing.assert_close(in_pieces(), at_once(), rtol=0, atol=1e-4)
    seconds = side_by_side({"all logits at once": at_once, "in pieces": in_pieces}, rounds)
    print_table(f"head and losses of 1,024 positions, {dtype}; {machine()}", seconds, "all logits at once")


def main(samples: int = 32, requests: int = 32, rounds: int = 3, threads: int = 1, head: bool = False) -> None:
    """Time both methods on mixed and on long answers."""
    torch.set_num_threads(threads)
    if head:
        for dtype in (torch.float32, torch.bfloat16):
            compare_head(dtype, rounds)
        return
    model = tiny(
        "llada", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, mask_token_id=VOCABULARY - 1,
        initializer_range=0.02,
    )  # fmt: skip
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    pairs = requests_of(requests)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    compare(f"{size:.1f}M parameters, {samples} samples", model, pairs, "mc", samples, rounds)
    compare(
        f"{size:.1f}M parameters, {samples} samples, long answers only", model, pairs[::2], "mc", samples, rounds
    )
    compare(f"{size:.1f}M parameters", model, pairs, "chain_rule", samples, rounds)
    blocks = tiny(
        "sdar", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6, head_dim=64,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, mask_token_id=VOCABULARY - 1,
    )  # fmt: skip
    compare_blocks(blocks.to(model.device), pairs, samples, rounds)


if __name__ == "__main__":
    typer.run(main)
