"""The training forward on weights that FSDP2 splits over two gloo processes; run by torchrun."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dlm_lens.testing import tiny
from dlm_lens.training.losses import loss_forward
from dlm_lens.training.sink_probe import ProbeBatch, sink_statistics


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.arange(0, 4 * 12, 3)
    return {
        "input_ids": torch.randint(0, 60, (4, 12), generator=generator),
        "outputs": outputs,
        "targets": torch.randint(0, 60, outputs.shape, generator=generator),
        "weights": torch.rand(outputs.shape, generator=generator),
    }


def probe(model: torch.nn.Module) -> ProbeBatch:
    canvas = torch.randint(0, 60, (1, 2, 12), generator=torch.Generator().manual_seed(1))
    return ProbeBatch(canvas, torch.zeros_like(canvas, dtype=torch.bool), torch.ones(2, 12, dtype=torch.bool))


def norm(model: torch.nn.Module) -> float:
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return float(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    whole = tiny("sink_qwen", num_sinks=1, tie_word_embeddings=True)
    with loss_forward(whole):
        expected = whole(**batch())["loss"]
        expected.backward()
    model = tiny("sink_qwen", num_sinks=1, tie_word_embeddings=True)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with loss_forward(model):
        loss = model(**batch())["loss"]
        loss.backward()
    # A forward pass without a backward one leaves the root's weights gathered, so these come first.
    norms = norm(model), norm(whole)
    split = all(isinstance(p, DTensor) for p in model.parameters())
    statistics = [sink_statistics(whole, probe(whole)).metrics()]
    with loss_forward(model), torch.no_grad():
        nothing = torch.zeros(1, dtype=torch.long)
        statistics.append(
            sink_statistics(
                model,
                probe(whole),
                lambda ids: model(input_ids=ids, outputs=nothing, targets=nothing, weights=nothing.float()),
            ).metrics()
        )
    found = {
        "loss": float(loss.detach()), "expected loss": float(expected.detach()),
        "norm": norms[0], "expected norm": norms[1], "split": split,
        "probe": statistics[1], "expected probe": statistics[0],
    }  # fmt: skip
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()
