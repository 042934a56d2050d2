"""Sink statistics of a probe against patterns and values taken by hand, and their picture."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlm_lens.attention import hooked_attentions
from dlm_lens.testing import tiny
from dlm_lens.training import Example, MaskedDiffusionLoss, MaskedDiffusionTrainer, probe_batch, sink_statistics
from dlm_lens.training.sink_probe import LEVELS
from dlm_lens.training.sources import Rows
from dlm_lens.viz import sink_emergence
from tests.reference import forward64
from tests.training.job import job


class Place:
    length, padding = 14, 61


def batch_of(model):
    generator = torch.Generator().manual_seed(0)
    examples = [Example(torch.randint(0, 60, (size,), generator=generator)) for size in (14, 11)]
    return probe_batch(examples, MaskedDiffusionLoss().for_model(model, 8), Place)


@pytest.mark.parametrize(("count", "place"), [(0, "front"), (1, "front"), (2, "end")])
def test_statistics_are_those_of_the_patterns(count: int, place: str) -> None:
    model = tiny("sink_qwen", num_sinks=count, sink_placement=place)
    batch = batch_of(model)
    found = sink_statistics(model, batch)
    shares, tops, norms, others, mains, learned, canvas = [], [], [], [], [], [], []
    for level in range(len(LEVELS)):
        for row, size in enumerate((14, 11)):
            kept = forward64(model, batch.canvases[level, row : row + 1, :size])
            where = torch.arange(size) + (count if place == "front" else 0)
            own = torch.arange(count) + (0 if place == "front" else size)
            for layer in range(2):
                for head in range(4):
                    pattern = kept[f"pattern{layer}"][0, head][where]  # the canvas's queries
                    received = torch.cat([pattern[:, where].sum(0), pattern[:, own].sum(0)]) / size
                    v = kept[f"v{layer}"][0, :, head // 2]
                    norm = torch.cat([v[where].norm(dim=-1), v[own].norm(dim=-1)])
                    top = int(received.argmax())
                    masked = batch.masked[level, row, :size]
                    alike = [
                        i for i in range(size) if i != top and (top >= size or bool(masked[i]) == bool(masked[top]))
                    ]
                    learned.append((layer, float(norm[size:].mean())))
                    canvas.append((layer, float(norm[:size].mean())))
                    shares.append((layer, float(received[size:].sum())))
                    tops.append((layer, float(received[top])))
                    norms.append((layer, float(norm[top])))
                    others.append((layer, float(norm[alike].mean()) if alike else math.nan))
                    mains.append(top)
    checked = [("main_share", tops), ("sink_norm", norms), ("other_norm", others), ("canvas_norm", canvas)]
    for name, values in checked + ([("learned_norm", learned)] if count else []):
        for layer in range(2):
            expected = np.nanmean([value for at, value in values if at == layer])
            assert float(getattr(found, name)[layer]) == pytest.approx(expected, rel=1e-4), name
    assert found.main.flatten().tolist() == mains
    assert found.learned is (count > 0)
    for layer in range(2):
        if count:
            expected = np.mean([value for at, value in shares if at == layer])
            assert float(found.learned_share[layer]) == pytest.approx(expected, rel=1e-4)
    first, last = np.array(mains).reshape(3, -1)[[0, -1]]
    assert found.moved() == pytest.approx(float((first != last).mean()))


def test_a_masked_canvas_has_the_noise_level_of_its_share() -> None:
    """That of training: a prompt, which no level masks, does not lower it."""
    examples = [Example(torch.arange(14), 10)]
    batch = probe_batch(examples, MaskedDiffusionLoss().for_model(tiny("sedd"), 8), Place)
    assert batch.noise_levels is not None
    expected = [-math.log(1 - 0.999 * share) for share in LEVELS]
    assert batch.noise_levels.tolist() == pytest.approx(expected, rel=1e-6)  # float32
    assert batch_of(tiny("mdlm")).noise_levels is None


def test_isolated_documents_are_canvases_of_their_own() -> None:
    """The learned share is that under the mask and the positions that training uses."""
    model = tiny("sink_qwen", num_sinks=1)
    generator = torch.Generator().manual_seed(1)
    owners = [torch.tensor([0] * 5 + [1] * 2 + [2] * 7), torch.tensor([0] * 3 + [1] * 8)]
    examples = [Example(torch.randint(0, 60, (len(o),), generator=generator), documents=o) for o in owners]
    objective = MaskedDiffusionLoss().for_model(model, 8)
    batch, joined = (
        probe_batch(examples, objective, Place),
        probe_batch([replace(e, documents=None) for e in examples], objective, Place),
    )
    assert batch.visible.sum(-1).tolist() == [5, 2, 7, 3, 8]
    rows = Rows.of(examples, Place.length, Place.padding)
    for level in range(len(LEVELS)):
        whole = joined.canvases[level]
        with torch.no_grad():
            seen = hooked_patterns(model, whole, rows.network_inputs())
        found = sink_statistics(
            model, replace(batch, canvases=batch.canvases[[level] * 2], masked=batch.masked[[level] * 2])
        )
        for layer, pattern in enumerate(seen):
            own = pattern[:, :, 1:, 0]  # [row, head, query]: what every query gives to the sink
            shares = [own[0, :, :5], own[0, :, 5:7], own[0, :, 7:14], own[1, :, :3], own[1, :, 3:11]]
            expected = torch.stack([share.mean() for share in shares]).mean()
            # Float32 under two masks: sums of ten numbers of order 1.
            torch.testing.assert_close(found.learned_share[layer].float(), expected, rtol=1e-5, atol=1e-6)


def hooked_patterns(model: Any, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    points = [attention.hook_pattern for attention in hooked_attentions(model)]
    handles = [p.register_forward_hook(lambda m, i, pattern: kept.append(pattern.clone())) for p in points]
    model(ids, **inputs)
    for handle in handles:
        handle.remove()
    return kept


def test_a_planted_sink_is_found() -> None:
    """Keys of the sink token are made to fit every query; its values are zero."""
    model = tiny("sink_qwen", num_sinks=1, zero_sink_value=True)
    for layer in model.model.layers:
        layer.self_attn.hook_scores.register_forward_hook(
            lambda module, args, scores: scores.clone().index_fill_(-1, torch.tensor([0]), 50.0)
        )
    found = sink_statistics(model, batch_of(model)).metrics()
    assert found["sink/learned_share"] == pytest.approx(1.0, abs=1e-4)
    assert found["sink/moved"] == 0.0
    assert found["sink/value_norm"] == 0.0
    assert found["sink_share/layer_01"] == pytest.approx(1.0, abs=1e-4)


def test_masks_of_the_probe_are_nested_and_fixed() -> None:
    model = tiny("sink_qwen")
    batch, again = batch_of(model), batch_of(model)
    assert torch.equal(batch.canvases, again.canvases)
    assert bool((batch.masked[1] <= batch.masked[0]).all())
    assert bool((batch.masked[2] <= batch.masked[1]).all())
    assert batch.masked.flatten(1).sum(1).tolist() == sorted(batch.masked.flatten(1).sum(1).tolist(), reverse=True)
    assert bool((batch.canvases[batch.masked] == 63).all())
    assert not bool((batch.masked & ~batch.visible).any())


def history(learned: bool = True) -> list[dict]:
    entries: list[dict] = []
    for step in (0, 10, 20):
        entries.append(
            {"step": step, "sink/main_share": 0.1 + step / 100, "sink/moved": 0.5, "sink/value_norm_ratio": 0.9}
            | ({"sink/learned_share": 0.1} if learned else {})
            | ({"sink/changed": 0.25} if step else {})
            | {f"sink_share/layer_{layer:02d}": layer / 10 + step / 100 for layer in range(3)}
        )
        entries.append({"step": step + 1, "loss": 3.0 - step / 10})
    return entries


@pytest.mark.long
def test_the_picture_holds_the_numbers() -> None:
    figure = sink_emergence(history())
    share, norm, moves, loss = [axis for axis in figure.axes if axis.get_gid() == "emergence"]
    assert [line.get_ydata().tolist() for line in share.get_lines()] == [
        pytest.approx([layer / 10, layer / 10 + 0.1, layer / 10 + 0.2]) for layer in range(3)
    ]
    assert norm.get_lines()[0].get_ydata().tolist() == [0.9] * 3
    assert moves.get_lines()[1].get_xdata().tolist() == [10, 20]
    assert loss.get_lines()[0].get_xydata().tolist() == [[1, 3], [11, 2], [21, 1]]
    assert "learned" in share.get_title()
    assert "received by the largest key" in sink_emergence(history(learned=False)).axes[0].get_title()
    figure.savefig(io.BytesIO(), format="png")


def test_layers_from_100_on_follow_the_others() -> None:
    shares = {f"sink_share/layer_{layer:02d}": float(layer) for layer in (9, 99, 100)}
    figure = sink_emergence(
        [{"step": 0, "sink/main_share": 0.1, "sink/moved": 0.5, "sink/value_norm_ratio": 1, **shares}]
    )
    lines = figure.axes[0].get_lines()
    assert [line.get_ydata().tolist() for line in lines] == [[9.0], [99.0], [100.0]]


def test_a_history_without_probes_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="train with probe_steps above 0"):
        sink_emergence([{"step": 1, "loss": 2.0}])
    for history in (object(), [1, 2]):
        with pytest.raises(ValueError, match=r"it must be trainer\.state\.log_history of a training run"):
            sink_emergence(history)
    with pytest.raises(FileNotFoundError, match=r"trainer_state\.json does not exist"):
        sink_emergence(tmp_path)


def test_a_resumed_run_logs_every_probe_once(tmp_path: Path) -> None:
    def probes(trainer: MaskedDiffusionTrainer) -> list[dict[str, float]]:
        return [entry for entry in trainer.state.log_history if "sink/main_share" in entry]

    whole = job(tmp_path / "whole", steps=4, probe_steps=2)
    whole.train()
    first = job(tmp_path / "broken", steps=4, save_steps=2, probe_steps=2)
    first.train()
    (tmp_path / "broken" / "checkpoint-4" / "run.json").unlink()  # as if it had never been finished
    second = job(tmp_path / "broken", steps=4, save_steps=2, probe_steps=2)
    second.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in probes(whole)] == [0, 2, 4]
    assert probes(second) == probes(whole)
