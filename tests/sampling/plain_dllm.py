"""dllm's sampler for masked DLMs as plain loops over rows and positions, written from its description.

Facts: ZHZisZZ/dllm, core/samplers/mdlm.py and utils.py. Rows are padded on the right, blocks are counted from the
end of each prompt, and a step's numbers come from the linear schedule.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def numbers(masks: int, steps: int) -> list[int]:
    """round(left (1 - s / t)) of the masks left, half to even, without zeros; shares in float32."""
    found, left = [], masks
    for step in range(steps):
        t, s = (1 - (1 - torch.tensor((steps - step - ahead) / steps, dtype=torch.float32)) for ahead in (0, 1))
        share = float((torch.tensor(1.0) - s / t).double())
        now = min(left, round(left * share))
        left -= now
        found += [now] if now else []
    return found


def plain_dllm(
    logits_of: Callable[[Tensor, Tensor], Tensor],
    prompts: list[list[int]],
    *,
    mask: int,
    fill: int,
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    cfg_scale: float = 0.0,
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Every canvas [batch, position], and the confidence of every step (-inf where nothing may be unmasked).

    Args:
        logits_of: ids and attention mask -> logits.
        prompts: ids.
        mask: the id of [MASK].
        fill: an id for padding.
        gen_length: tokens of every answer.
        block_length: of the blocks.
        steps: of all blocks together.
        temperature: of the Gumbel noise.
        remasking: "low_confidence" or "random".
        cfg_scale: guidance.
        seed: of one random stream for the batch.
    """
    stream = torch.Generator().manual_seed(seed)
    width = max(map(len, prompts)) + gen_length
    canvas = torch.full((len(prompts), width), fill)
    content = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        canvas[row, : len(prompt) + gen_length] = torch.tensor(prompt + [mask] * gen_length)
        content[row, : len(prompt) + gen_length] = 1
    given = (canvas != mask) & content.bool()
    blocks = -(-gen_length // block_length)
    canvases, ranks = [canvas.clone()], []
    for block in range(blocks):
        plans = []
        for row, prompt in enumerate(prompts):
            start = len(prompt) + block * block_length
            stop = min(start + block_length, len(prompt) + gen_length)
            plans.append(numbers(int((canvas[row, start:stop] == mask).sum()), -(-steps // blocks)))
        for step in range(max(map(len, plans))):
            if cfg_scale:
                empty = canvas.masked_fill(given, mask)
                both = logits_of(torch.cat([canvas, empty]), torch.cat([content, content]))
                logits, without = both[: len(canvas)], both[len(canvas) :]
                logits = without + (cfg_scale + 1) * (logits - without)
            else:
                logits = logits_of(canvas, content)
            ranked = logits
            if temperature:
                noise = torch.rand(logits.shape, generator=stream, dtype=torch.float64)
                ranked = logits.double().exp() / (-noise.log()) ** temperature
            tokens = ranked.argmax(-1)
            likely = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
            if remasking == "random":
                likely = torch.rand(canvas.shape, generator=stream)
            confidence = torch.full(canvas.shape, -torch.inf)
            for row, prompt in enumerate(prompts):
                stop = len(prompt) + (block + 1) * block_length
                open_ = [place for place in range(min(stop, width)) if canvas[row, place] == mask]
                confidence[row, open_] = likely[row, open_].float()
                best = sorted(open_, key=lambda place, row=row: -float(likely[row, place]))  # type: ignore[misc]
                for place in best[: plans[row][step] if step < len(plans[row]) else 0]:
                    canvas[row, place] = tokens[row, place]
            canvases.append(canvas.clone())
            ranks.append(confidence)
    return canvases, ranks
