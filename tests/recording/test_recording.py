"""The coordinates, parts and files of a Recording."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from dlm_lens.recording import (
    Recording,
    record,
)
from dlm_lens.testing import tiny
from tests.recording.reference import EVERYTHING, PROMPTS, RUN, build, equal


@pytest.fixture(scope="module")
def recorded():
    return record(build(tiny, "sink front"), PROMPTS, EVERYTHING, **RUN)


def test_coordinates(recorded):
    rec = recorded
    assert rec.sizes == {"step": 6, "batch": 2, "layer": 2, "key": 23, "query": 21}
    assert torch.equal(rec.tokens[..., :21], rec.run.canvases[:-1])
    assert rec.tokens[0, 0, 21:].tolist() == [-1, -2]
    assert rec.strings(0, 1)[6:11] == ["w6", "w2", "w40", "[MASK]", "[MASK]"]
    assert rec.strings(0)[21:] == ["sink(0)", "sink(1)"]
    assert rec.strings(-1, -1) == rec.strings(len(rec.steps) - 1, len(rec.rows) - 1)
    for place, sentence in (((99,), "step 99 of "), ((0, 9), "row 9 of "), (("a",), "step is 'a'")):
        with pytest.raises(ValueError, match=sentence):
            rec.strings(*place)
    assert rec.progress[3].tolist() == [0.5, 0.5]
    assert rec.seeds == (3, 4)
    assert rec.prompt_length == 9
    assert rec.blocks == rec.run.blocks
    assert rec.scale == pytest.approx(8**-0.5)
    assert rec.versions["torch"] == torch.__version__
    assert rec.specs["received"].unit == "relative to uniform"
    assert "2510.15731" in rec.specs["received"].formula
    # Scores times e_j are column sums: of all queries, each of which attends once.
    sums = rec.received_sums()
    torch.testing.assert_close(sums.nansum(-1), rec.counted()[:, :, None, None].expand(6, 2, 2, 4).float())
    with pytest.raises(AttributeError, match="no 'masses'; its statistics are received"):
        _ = rec.masses
    with pytest.raises(ValueError, match="received_masked was not recorded"):
        rec.received_sums("masked")


def test_select(recorded):
    part = recorded.select(step=[1, -1], layer=1, batch=1, head=slice(0, 4, 3))
    assert part.received.shape == (2, 1, 1, 2, 23)
    assert part.value_norm.shape == (2, 1, 1, 2, 23)
    assert (part.steps, part.layers, part.rows, part.heads) == ((1, 5), (1,), (1,), (0, 3))
    wanted = recorded.received[[1, 5]][:, [1]][:, :, [1]][:, :, :, [0, 3]]
    assert torch.equal(part.received.nan_to_num(-1), wanted.nan_to_num(-1))
    assert torch.equal(part.progress, recorded.progress[[1, 5]][:, [1]])
    assert torch.equal(part.expected("prompt"), recorded.expected("prompt")[[1, 5]][:, [1]])
    again = part.select(step=-1)
    assert again.steps == (5,)
    assert torch.equal(again.tokens, recorded.tokens[5:, 1:])
    for wrong in ({"step": 6}, {"layer": 2}, {"batch": -3}, {"head": [4]}, {"step": slice(3, 3)}):
        with pytest.raises(ValueError, match=r"of \d|was not recorded|selects nothing"):
            recorded.select(**wrong)


def test_an_axis_is_named_in_the_singular(recorded):
    with pytest.raises(
        TypeError, match=r"^select has no argument 'heads' \(did you mean 'head'\?\); it has step, layer"
    ):
        recorded.select(heads=[1])
    with pytest.raises(TypeError, match=r"^select has no argument 'rows' \(rows is batch here\); it has step"):
        recorded.select(rows=[0])


@pytest.mark.parametrize(
    "wrong", [1.0, [1.7], True, [True, False, True, False, False, False], torch.tensor([True] * 6), "12"]
)
def test_only_whole_numbers_select(recorded, wrong):
    with pytest.raises(ValueError, match=r"^step is .*; give a whole number, several of them, or a slice"):
        recorded.select(step=wrong)


def test_any_whole_numbers_select(recorded):
    for index in (torch.tensor([1, 3]), np.array([1, 3]), range(1, 4, 2), (1, 3), [np.int64(1), torch.tensor(3)]):
        assert recorded.select(step=index).steps == (1, 3)
    assert recorded.select(step=torch.tensor(3)).steps == recorded.select(step=np.int64(3)).steps == (3,)


def test_a_directory_below_a_file_is_refused_in_a_sentence(recorded, tmp_path):
    (tmp_path / "file").write_text("mine")
    for call in (
        lambda: recorded.save(tmp_path / "file/below"),
        lambda: record(tiny("llada"), PROMPTS, to=tmp_path / "file/below", **RUN),
    ):
        with pytest.raises(FileExistsError, match="file is a file; give a directory"):
            call()


def test_xarray(recorded):
    data = recorded.to_xarray()
    assert data["received"].dims == ("step", "batch", "layer", "head", "key")
    cell = data["received"].sel(step=4, layer=1, head=2, batch=0)
    assert cell.values[3] == pytest.approx(float(recorded.received[4, 0, 1, 2, 3]))
    assert data["received"].attrs["units"] == "relative to uniform"
    assert str(data["token_text"].sel(step=0, batch=1, key=8).values) == "w40"
    assert bool(data["masked"].sel(step=0, batch=0, key=9))
    assert not bool(data["valid"].sel(batch=1, key=0))
    assert data["region_mass"].sel(key_region="self").shape == (6, 2, 2, 4, 5)
    assert float(data["progress"].sel(step=3, batch=0)) == 0.5
    assert json.loads(data.attrs["settings"])["steps"] == 6
    assert data["seed"].values.tolist() == [3, 4]
    assert data["query"].values.tolist() == list(range(21))


def test_padding_has_no_text():
    """Joining pads shorter prompts with the id 0, which is a word like others."""
    settings = {"steps": 2, "gen_length": 2, "seed": 0}
    recorded = record(tiny("llada"), [[0, 9, 14], [5]], ["received:all"], batch_size=1, **settings)
    assert [recorded.strings(0, row)[:3] for row in (0, 1)] == [["w0", "w9", "w14"], ["", "", "w5"]]
    joined = recorded.to_xarray()
    assert joined["token_text"].values[0, :, :3].tolist() == [["w0", "w9", "w14"], ["", "", "w5"]]
    padded = record(tiny("llada"), [[0, 9, 14], [5]], ["received:all"], **settings).to_xarray()
    assert padded["token_text"].equals(joined["token_text"].assign_coords(token=padded["token"]))


def test_xarray_without_queries_has_no_such_axis():
    recorded = record(tiny("llada"), [[5, 9, 14]], ["received:all"], steps=2, gen_length=2)
    assert set(recorded.to_xarray().sizes) == {"step", "batch", "layer", "head", "key"}


def test_save_and_load(recorded, tmp_path):
    recorded.save(tmp_path / "a")
    found = Recording.load(tmp_path / "a")
    equal(found, recorded)
    for field in dataclasses.fields(Recording):
        if field.name not in ("run", "arrays", "answer"):
            assert getattr(found, field.name) == getattr(recorded, field.name), field.name
    assert dict(found.settings) == dict(recorded.settings)
    assert torch.equal(found.progress, recorded.progress)
    assert found.strings(2) == recorded.strings(2)
    part = recorded.select(step=[2, 4], head=1)
    part.save(tmp_path / "b")
    equal(Recording.load(tmp_path / "b"), part)
    with pytest.raises(FileExistsError, match="not empty"):
        recorded.save(tmp_path / "a")
    lazy = Recording.load(tmp_path / "a").select(step=[3])
    # Only the chosen step's shard is read.
    for shard in (tmp_path / "a").glob("step-0000[01245].safetensors"):
        shard.unlink()
    equal(lazy, recorded.select(step=3))


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "rows-00000-00001").mkdir()
    (tmp_path / "rows-00000-00001" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no recording"):
        record(tiny("llada"), PROMPTS, to=tmp_path, **RUN)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        record(tiny("llada"), PROMPTS, to=tmp_path / "file", **RUN)


def test_a_mask_by_shape_is_refused_in_validation(recorded):
    with pytest.raises(ValueError, match="received has shape"):
        dataclasses.replace(recorded, arrays={**recorded.arrays, "received": recorded.received[..., :3]})
    with pytest.raises(ValueError, match="do not name the same"):
        dataclasses.replace(recorded, arrays={})
    assert math.isnan(float(recorded.received[0, 1, 0, 0, 0]))
