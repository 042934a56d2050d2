"""Evaluation against a restatement of the authors' loops: one request at a time, all logits.

`python -m benchmarks.evaluation [--requests 64 --samples 128]`, on the CPU or on a GPU if there is one. 25 million
parameters with random weights, a vocabulary of 32,768. Both sides give the same numbers: values to rounding, texts
exactly. Each side runs once (its time is CPU time, or wall time with a GPU), after a few requests to warm up.
Stop sequences are words that the random model produces in the first half of a text. `--precisions medium,bfloat16`
adds the package with products of bfloat16 numbers, and with bfloat16 weights; how far their numbers are from the
others' is printed.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer

from benchmarks.timing import machine, print_table
from dlm_lens.evaluation.generation_requests import Generator, Job, cut, end_ids
from dlm_lens.evaluation.likelihood_requests import Item, Likelihoods
from dlm_lens.evaluation.settings import LikelihoodSettings
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import CountCorruption, chain_masks
from dlm_lens.testing import tiny

VOCABULARY, STRATA = 32_768, 8
"""8 is the batch size of the authors' script (ML-GSAI/LLaDA, eval_llada_lm_eval.sh), and so of its draws."""


PRECISIONS = {"medium": "dlm_lens, products in bfloat16", "bfloat16": "dlm_lens, weights in bfloat16"}
"""`--precisions` and the lines of the tables: `torch.set_float32_matmul_precision`, and `dlm_lens.load(dtype=)`."""

ANSWERS = {"letters": (1, 1), "words": (1, 4), "sentences": (12, 48)}
"""Tokens of an answer: as in MMLU, in ARC, in HellaSwag or PIQA."""


def _ids(generator: torch.Generator, low: int, high: int) -> list[int]:
    length = int(torch.randint(low, high + 1, (), generator=generator))
    return [int(i) for i in torch.randint(0, VOCABULARY - 3, (length,), generator=generator)]


def items_of(count: int, kinds: Sequence[str]) -> list[Item]:
    """Multiple choice: four answers to each context of 8 to 120 tokens; the kinds of answers alternate."""
    generator, items = torch.Generator().manual_seed(0), []
    for document in range(count // 4):
        context = _ids(generator, 8, 120)
        length = ANSWERS[kinds[document % len(kinds)]]
        items += [(context, _ids(generator, *length), document) for _ in range(4)]
    return [Item(place, *item, False) for place, item in enumerate(items)]


def jobs_of(count: int, length: int, until: tuple[str, ...]) -> list[Job]:
    """Prompts of 8 to 120 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [Job(place, _ids(generator, 8, 120), 0, until, length, ()) for place in range(count)]


@torch.no_grad()
def values_one_by_one(model: Any, items: Sequence[Item], samples: int) -> list[float]:
    """LLaDA's eval_llada.py, restated: the samples of one request are a batch, all logits are computed."""
    values = []
    for item in items:
        pair, losses = _pair(item), []
        generator = torch.Generator().manual_seed(item.seed)
        for _ in range(samples // STRATA):
            drawn = CountCorruption().draw(pair, STRATA, generator)
            losses.append(float((_losses(model, pair, drawn.masked).sum(-1) / drawn.rate).mean()))
        values.append(-sum(losses) / len(losses))
    return values


@torch.no_grad()
def chains_one_by_one(model: Any, items: Sequence[Item], _samples: int) -> list[float]:
    """SMDM's chain_rule, restated: the tokens of one request are cut into batches, all logits are computed."""
    values = []
    for item in items:
        pair = _pair(item)
        parts = [part.split(16) for part in chain_masks(pair, "left_to_right")]
        values.append(
            -sum(float(_losses(model, pair, masked)[scored].sum()) for masked, scored in zip(*parts, strict=True))
        )
    return values


def _pair(item: Item) -> Pair:
    return Pair(torch.tensor(item.context), torch.tensor(item.continuation))


def _losses(model: Any, pair: Pair, masked: torch.Tensor) -> torch.Tensor:
    tokens, masked = pair.tokens.to(model.device), masked.to(model.device)
    logits = model(input_ids=tokens.expand(masked.shape).masked_fill(masked, model.config.mask_token_id)).logits
    out = torch.zeros(masked.shape, device=model.device)
    targets = tokens.expand(masked.shape)[masked]
    out[masked] = torch.nn.functional.cross_entropy(logits[masked].float(), targets, reduction="none")
    return out.cpu()


@torch.no_grad()
def texts_one_by_one(model: Any, jobs: Sequence[Job], block: int) -> list[str]:
    """LLaDA's generate.py, restated: one prompt at a time, all blocks; the text is then cut as by dlm_lens."""
    mask, texts = model.config.mask_token_id, []
    for job in jobs:
        prompt = len(job.prompt)
        canvas = torch.tensor([job.prompt + [mask] * job.gen_length], device=model.device)
        for start in range(prompt, prompt + job.gen_length, block):
            for _ in range(block):
                logits = model(input_ids=canvas).logits
                logits[..., mask] = -torch.inf
                chosen = logits.argmax(-1)
                confidence = logits.softmax(-1).gather(-1, chosen[..., None])[..., 0]
                open_now = (canvas == mask) & (torch.arange(canvas.shape[1], device=canvas.device) < start + block)
                place = confidence.masked_fill(~open_now, -torch.inf).argmax(-1)
                canvas[0, place] = chosen[0, place]
        written = canvas[0, prompt:].tolist()
        texts.append(cut(model.tokenizer, written, end_ids(model.config), job.until).text)
    return texts


def compare_likelihood(
    title: str, model: Any, items: Sequence[Item], method: Any, samples: int, precisions: Sequence[str] = ()
) -> None:
    """Time both sides and check that they agree; say how far other precisions are."""
    settings = LikelihoodSettings(method, samples=samples, strata=STRATA if method == "mc" else None)
    loop = values_one_by_one if method == "mc" else chains_one_by_one

    def ours(network: Any, some: Sequence[Item]) -> list[float]:
        answers = [answer for chunk in Likelihoods(network, settings).run(some) for answer in chunk]
        return [answer.value for answer in sorted(answers)]

    def theirs(some: Sequence[Item]) -> list[float]:
        return loop(model, some, samples)

    (wanted, mine, *others), seconds = _all(ours, theirs, model, items, precisions)
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(wanted), rtol=1e-4, atol=1e-3)
    drawn = f", {samples} samples" if method == "mc" else ""
    _print(f"{method}{drawn}, {len(items)} requests, {title}", seconds)
    for precision, values in zip(precisions, others, strict=True):
        away = (torch.tensor(values) - torch.tensor(wanted)).abs()
        best = [torch.tensor(each).view(-1, 4).argmax(-1) for each in (values, wanted)]  # four answers each
        same = int((best[0] == best[1]).sum())
        print(
            f"{PRECISIONS[precision]}: {away.mean():.3g} nats away on average, {away.max():.3g} at most, of "
            f"{-sum(wanted) / len(wanted):.3g}; the most likely answer is the same for {same} of {len(best[0])} "
            "contexts"
        )


def compare_generation(
    model: Any, count: int, length: int, block: int, stops: bool, precisions: Sequence[str] = ()
) -> None:
    """Time both sides and count the texts that are the same."""
    jobs = jobs_of(count, length, ())
    if stops:
        jobs = jobs_of(count, length, _words_in_the_first_half(model, jobs))

    def ours(network: Any, some: Sequence[Job]) -> list[str]:
        return [text.text for text in sorted(text for batch in Generator(network).run(some) for text in batch)]

    (wanted, mine, *others), seconds = _all(
        ours, lambda some: texts_one_by_one(model, some, block), model, jobs, precisions
    )
    same = [sum(a == b for a, b in zip(texts, wanted, strict=True)) for texts in (mine, *others)]
    words = sum(len(text.split()) for text in wanted) / len(wanted)
    ends = f"texts end after {words:.0f} on average" if stops else "no text ends early"
    _print(f"generation of {length} tokens in blocks of {block}, {count} prompts, {ends}; {same[0]} equal", seconds)
    for precision, equal in zip(precisions, same[1:], strict=True):
        print(f"{PRECISIONS[precision]}: {equal} of {count} texts are equal")


def _all(
    ours: Callable[[Any, Sequence[Any]], Any],
    theirs: Callable[[Sequence[Any]], Any],
    model: Any,
    requests: Sequence[Any],
    precisions: Sequence[str],
) -> tuple[list[Any], dict[str, float]]:
    """What the other side, this package, and this package in every precision find, and the seconds of each."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    found, seconds = [], {}
    candidates = {BASELINE: theirs, "dlm_lens": lambda some: ours(model, some)}
    for name, run in candidates.items():
        run(requests[:2])
        started = clock()
        found.append(run(requests))
        seconds[name] = clock() - started
    for precision in precisions:
        with _precision(precision, model) as network:
            ours(network, requests[:2])
            started = clock()
            found.append(ours(network, requests))
            seconds[PRECISIONS[precision]] = clock() - started
    return found, seconds


BASELINE = "one request at a time, all logits"


@contextmanager
def _precision(name: str, model: Any) -> Iterator[Any]:
    """The model that computes in a precision."""
    if name == "bfloat16":
        yield copy.deepcopy(model).bfloat16()
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield model
    finally:
        torch.set_float32_matmul_precision(before)


def _words_in_the_first_half(model: Any, jobs: Sequence[Job]) -> tuple[str, ...]:
    """Words that end the texts before their middle."""
    stops: set[str] = set()
    for text in sorted(text for batch in Generator(model).run(jobs) for text in batch):
        words = text.text.split()
        if not stops.intersection(words[: len(words) // 2]):
            stops.add(words[len(words) // 3])
    return tuple(f"{word} " for word in sorted(stops))


def _print(title: str, seconds: dict[str, float]) -> None:
    print_table(f"{title}; {machine()}", seconds, BASELINE)
    times = ", ".join(f"{seconds[BASELINE] / value:.1f}" for name, value in seconds.items() if name != BASELINE)
    print(f"\n{times} times the throughput", flush=True)


def main(
    requests: int = 64,
    samples: int = 128,
    prompts: int = 64,
    length: int = 128,
    block: int = 32,
    threads: int = 1,
    kinds: Annotated[str, typer.Option(help="Kinds of answers that are also measured alone.")] = ",".join(ANSWERS),
    methods: Annotated[str, typer.Option(help="Methods of the mix.")] = "mc,chain_rule",
    ends: Annotated[str, typer.Option(help="Whether texts end early: early, never.")] = "early,never",
    precisions: Annotated[str, typer.Option(help="Other precisions: medium, bfloat16.")] = "",
) -> None:
    """Time likelihoods by both methods, and generation with and without stop sequences; 0 leaves a part out."""
    torch.set_num_threads(threads)
    model = tiny(
        "llada", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, mask_token_id=VOCABULARY - 1,
        initializer_range=0.1, sampler_defaults={"steps": length, "gen_length": length, "block_length": block},
    )  # fmt: skip
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    others = precisions.split(",") if precisions else []
    for end in ends.split(",") if prompts else ():
        compare_generation(model, prompts, length, block, end == "early", others)
    if not requests:
        return
    mixed, title = items_of(requests, ["letters", "words", "sentences"]), "a third letters, words, sentences"
    for method in methods.split(","):
        compare_likelihood(title, model, mixed, method, samples, others)
    for kind in kinds.split(",") if kinds else ():
        compare_likelihood(f"all {kind}", model, items_of(min(requests, 16), [kind]), "mc", samples, others)


if __name__ == "__main__":
    typer.run(main)
