"""The losses of an output embedding, forward and backward: in one pass over the logits, and with two.

`python -m benchmarks.head_loss [--positions 512 --width 768 --vocabulary 30522 --rounds 5]`: the cross entropy of a
head with a bias, and the bounds on the likelihood of UDLM, GIDD on a DiT and GIDD, in float32. "Two passes" is the
path of a head that is not linear, which runs again in the backward pass. Both sides must agree; the ratio is to the
cross entropy in one pass.
"""

from collections.abc import Callable, Mapping
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from benchmarks.timing import machine, print_table, side_by_side
from dlm_lens.testing import tiny
from dlm_lens.training import head_loss
from dlm_lens.training.head_loss import bound_loss, weighted_cross_entropy

FAMILIES = ("udlm", "gidd_dit", "gidd")


def losses_of(positions: int, width: int, vocabulary: int) -> Mapping[str, Callable[[], list[Tensor]]]:
    """Every loss by its name, as a function that returns it and its gradients."""
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Logits of a few units: with hundreds, exp gives denormal numbers, on which some processors are slow.
    states = (0.1 * torch.randn(positions, width, generator=generator)).to(device).requires_grad_()
    seen, targets = (
        torch.randint(5, vocabulary - 1, (positions,), generator=generator).to(device) for _ in range(2)
    )
    weights = torch.ones(positions, device=device)
    levels = torch.stack([torch.rand(positions, generator=generator) * 0.8 + 0.1, torch.zeros(positions)], -1)

    def differentiated(loss: Callable[[], Tensor], head: torch.nn.Module) -> Callable[[], list[Tensor]]:
        """The loss, then the gradients of states and head."""

        def run() -> list[Tensor]:
            value = loss()
            return [value.detach(), *torch.autograd.grad(value, [states, *head.parameters()])]

        return run

    found: dict[str, Callable[[], list[Tensor]]] = {}
    for family in FAMILIES:
        model = tiny(family, vocab_size=vocabulary, hidden_size=width, num_attention_heads=12).to(device)
        head = model.get_output_embeddings()
        if family == FAMILIES[0]:
            cross = lambda head=head: weighted_cross_entropy(states, head, targets, weights)  # noqa: E731
            found["cross entropy"] = differentiated(cross, head)
        bound = lambda model=model: bound_loss(states, model, seen, targets, weights, levels.to(device))  # noqa: E731
        found[f"bound of {family}"] = differentiated(bound, head)
    return found


def main(positions: int = 512, width: int = 768, vocabulary: int = 30_522, rounds: int = 5) -> None:
    """Time every loss both ways."""
    torch.set_num_threads(1)
    candidates: dict[str, Callable[[], object]] = {}
    for name, run in losses_of(positions, width, vocabulary).items():

        def twice(run: Callable[[], list[Tensor]] = run) -> list[Tensor]:
            with patch.object(head_loss, "_linear", lambda head: False):
                return run()

        # Sums over the vocabulary in float32, in another order.
        torch.testing.assert_close(run(), twice(), rtol=1e-4, atol=1e-4)
        candidates |= {f"{name}, one pass": run, f"{name}, two passes": twice}
    seconds = side_by_side(candidates, rounds, clock="cpu")
    title = f"{positions} positions of width {width}, {vocabulary} tokens; {machine()}"
    print_table(title, seconds, "cross entropy, one pass")


if __name__ == "__main__":
    typer.run(main)
