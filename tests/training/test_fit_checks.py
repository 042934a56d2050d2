from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from dlm_lens.attention import decoder_of
from dlm_lens.testing import tiny
from dlm_lens.training import (
    DataSettings,
    Example,
    LikelihoodBoundLoss,
    MaskedDiffusionTrainer,
    ModelSettings,
    NextToken,
    TrainingSettings,
)
from dlm_lens.training.fit_checks import check_isolated
from dlm_lens.training.sources import Rows
from dlm_lens.training.trainer import run_training
from tests.training.job import ROWS, job, losses


def test_isolated_documents_with_sinks_at_the_end_are_refused(tmp_path: Path) -> None:
    data = DataSettings(length=12, packing="isolated")
    settings = replace(job(tmp_path).settings, data=data)
    model = tiny("sink_qwen", num_sinks=2, sink_placement="end")
    with pytest.raises(ValueError, match=r"one position for all of its documents.*set model.position to front"):
        MaskedDiffusionTrainer(model, settings, ROWS)
    MaskedDiffusionTrainer(tiny("sink_qwen", num_sinks=2), settings, ROWS)


@pytest.mark.parametrize(("family", "options"), [("sedd", {}), ("mdlm", {"time_conditioning": True})])
def test_isolated_documents_of_a_network_with_a_noise_level_are_refused(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    settings = replace(job(tmp_path).settings, data=DataSettings(length=12, packing="isolated"))
    with pytest.raises(ValueError, match=r"one noise level for a row.*set data.packing to joined"):
        MaskedDiffusionTrainer(tiny(family, **options), settings, ROWS)
    MaskedDiffusionTrainer(tiny("mdlm"), settings, ROWS)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("modernbert", {}, "ModernBert.* has sliding windows of 4 positions, fewer than the 20 of a row"),
        (
            "sink_qwen",
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
            "has sliding windows of 6 positions",
        ),
        ("bd3lm", {}, "has attention in blocks of 4, fewer than the 20 positions of a row"),
        ("wedlm", {}, "WeDLM.* has attention in an order of its own"),
        ("modernbert", {"local_attention": 40}, None),
        ("fast_dllm_v2", {}, None),  # blocks of 32
        ("sink_qwen", {"num_sinks": 2}, None),
        ("gidd", {}, None),  # its learned key is not rotated
    ],
)
def test_isolated_documents_of_networks_with_a_mask_of_their_own_are_refused(
    family: str, options: dict[str, Any], message: str | None
) -> None:
    model = tiny(family, **options)
    tokens = torch.arange(5, 25)
    rows = Rows.of([Example(tokens, 0, torch.tensor([0] * 10 + [1] * 10))], 20, 61)
    with torch.no_grad():
        packed = decoder_of(model)(input_ids=rows.tokens, use_cache=False, **rows.network_inputs())
        alone = decoder_of(model)(input_ids=tokens[None, 10:], use_cache=False)
    difference = float((packed.last_hidden_state[0, -10:] - alone.last_hidden_state[0, -10:]).abs().max())
    if message is None:
        check_isolated(model, 20, in_blocks=False)
        assert difference < 1e-5  # rounding of float32
        return
    assert difference > 0.1
    with pytest.raises(ValueError, match=message + r".*; set data.packing to joined"):
        check_isolated(model, 20, in_blocks=False)
    if getattr(model.config, "block_causal_length", None):
        check_isolated(model, 20, in_blocks=True)


def test_isolated_documents_of_modernbert_are_refused_by_the_trainer(tmp_path: Path) -> None:
    settings = replace(job(tmp_path).settings, data=DataSettings(length=12, packing="isolated"))
    with pytest.raises(ValueError, match="sliding windows of 4 positions, fewer than the 12 of a row"):
        MaskedDiffusionTrainer(tiny("modernbert"), settings, ROWS)


def test_isolated_documents_of_gidd_train(tmp_path: Path) -> None:
    """They were refused for a sink at the end, whose place does not change anything here."""
    rows = [{"text": row["text"].replace("w3 ", "w4 ")} for row in ROWS]  # w3 is the id without probability
    given: dict[str, Any] = {
        "family": "gidd",
        "objective": LikelihoodBoundLoss(),
        "steps": 2,
        "train_dataset": rows,
    }
    trainer = job(tmp_path, data=DataSettings(length=12, packing="isolated"), **given)
    trainer.train()
    assert len(losses(trainer)) == 2
    with pytest.raises(ValueError, match=r"must not see the noise: there is no mask for both; .*data.bos to false"):
        job(tmp_path / "bos", data=DataSettings(length=12, packing="isolated", bos=True), **given)


def test_isolated_documents_of_next_token_are_refused_before_the_first_step(tmp_path: Path) -> None:
    given: dict[str, Any] = {"family": "causal", "objective": NextToken(), "steps": 1}
    with pytest.raises(ValueError, match=r"the causal one of NextToken; set data.packing to joined"):
        job(tmp_path, data=DataSettings(length=12, packing="isolated"), **given)
    pairs = DataSettings(length=24, packing="isolated", prompt_column="text", answer_column="text")
    job(tmp_path, data=pairs, **given)  # rows of fine-tuning are one document each


def test_evaluation_losses_without_data_are_refused(tmp_path: Path) -> None:
    message = (
        r"eval_steps is 2 and there are no evaluation data.*give eval_dataset \(in a config data.eval_path or "
        r"data.eval_split\)"
    )
    with pytest.raises(ValueError, match=message):
        job(tmp_path, eval_steps=2)
    text = tmp_path / "text.txt"
    text.write_text("w1 w2")
    settings = TrainingSettings(
        output=str(tmp_path), model=ModelSettings(start="missing"), data=DataSettings(path=str(text)), steps=1,
        eval_steps=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        run_training(settings)


def test_rows_beyond_the_positions_are_refused_where_these_are_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was an IndexError in the first pass."""
    data = DataSettings(length=24)
    settings = replace(job(tmp_path).settings, data=data)
    with pytest.raises(ValueError, match=r"data.length is 24, and DiffuGPT.* has embeddings of 16 positions; set"):
        MaskedDiffusionTrainer(tiny("diffugpt", max_position_embeddings=16), settings, ROWS)
    MaskedDiffusionTrainer(tiny("diffugpt", max_position_embeddings=24), settings, ROWS)
    assert "max_position_embeddings" not in caplog.text
    MaskedDiffusionTrainer(tiny("llada", max_position_embeddings=16), settings, ROWS)
    assert "data.length is 24, and LLaDAModelLM was made for 16 positions at most" in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty; give at least one row"),
        (datasets.Dataset.from_dict({"text": []}), "is empty; give at least one row"),
        (["w1 w2", "w3"], r"holds 'w1 w2' as a row; give mappings from columns to values, such as \{'text'"),
        (iter(ROWS), "is a list_iterator, which can be read once alone; give a list"),
        (3, "is 3; give one dataset"),
        ("text.txt", "is 'text.txt'; give one dataset"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "holds 'train'; give one dataset"),
        ([ROWS[0], "w1"], None),
    ],
)
def test_what_is_no_dataset_is_refused_by_the_name_of_its_argument(
    rows: Any, message: str | None, tmp_path: Path
) -> None:
    if message is None:
        with pytest.raises(ValueError, match=r"row 1 of the data: .*'w1', which is no mapping"):
            job(tmp_path, train_dataset=rows, steps=1).train()
        return
    for name in ("train_dataset", "eval_dataset"):
        with pytest.raises(ValueError, match=f"^{name} {message}"):
            job(tmp_path, **{name: rows})


def test_a_model_of_which_nothing_is_trained_is_refused(tmp_path: Path) -> None:
    """torch said that the optimiser has an empty list."""
    model = tiny("llada").requires_grad_(False)
    with pytest.raises(ValueError, match="all weights of the LLaDAModelLM are frozen"):
        MaskedDiffusionTrainer(model, job(tmp_path).settings, ROWS)
