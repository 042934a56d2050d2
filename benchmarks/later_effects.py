"""The numbers of docs/attribution.md on later steps: `python -m benchmarks.later_effects` (a minute of one core).

Gradients against exact patching on 16 problems of toy, with a problem of other numbers: through the tokens that
a step decides (`token_effects`), and through the keys and values that an approximate cache keeps (`kept=True`).
"""

import itertools
from collections.abc import Sequence

import dlm_lens as dl
from dlm_lens.probes import activation_patching, attribution_patching, token_effects

NAMES = (("tom", "apples"), ("mia", "eggs"), ("ann", "pears"), ("leo", "stones"))
NUMBERS = ((5, 4, 7, 2), (3, 6, 4, 8), (9, 2, 5, 7), (6, 5, 8, 3))
"""a + b of the problem, c + d of its pair."""


def pairs() -> tuple[list[str], list[str]]:
    """The problems, and each with other numbers."""
    found: tuple[list[str], list[str]] = ([], [])
    for (name, what), numbers in itertools.product(NAMES, NUMBERS):
        for place, prompts in enumerate(found):
            a, b = numbers[2 * place : 2 * place + 2]
            prompts.append(f"{name} has {a} {what} . {name} buys {b} more . how many {what} ? :")
    return found


def through_tokens(prompts: Sequence[str], others: Sequence[str]) -> None:
    """Per step: the strongest head's effect on later steps, and the rank correlation of gradients with patching."""
    model = dl.load("toy")
    run = dl.denoise(model, prompts, steps=8, gen_length=24)
    print("\n| step | strongest head, logits | rank correlation |\n|---:|---:|---|")
    for step in range(run.steps - 1):
        target = token_effects(model, run, step)
        exact = activation_patching(model, run, others, target=target, steps=[step])
        fast = attribution_patching(model, run, others, target=target, steps=[step])
        strongest = float(exact.effects.abs().amax((0, 2, 3, 4)).mean())
        print(f"| {step} | {strongest:.2g} | {fast.agreement(exact)} |", flush=True)


def through_keys(prompts: Sequence[str], others: Sequence[str]) -> None:
    """The rank correlation over the steps that read kept keys, and the strongest heads of both passes."""
    model = dl.load("toy")
    for cache in ("prefix", "dual"):
        run = dl.denoise(model, prompts, gen_length=16, block_length=8, cache=cache)
        steps = [step for step, span in enumerate(run.computed) if span is not None]
        exact = activation_patching(model, run, others, steps=steps, kept=True)
        now = activation_patching(model, run, others, steps=steps)
        fast = attribution_patching(model, run, others, steps=steps, kept=True)
        kept, own = (one.effects.abs().amax((2, 3, 4)).mean(1).max() for one in (exact, now))
        told = f"strongest head {kept:.2f}, of the step {own:.2f}"
        print(f"cache={cache}: rank correlation {fast.agreement(exact)}; {told}")


def main() -> None:
    """Print both."""
    through_tokens(*pairs())
    through_keys(*pairs())


if __name__ == "__main__":
    main()
