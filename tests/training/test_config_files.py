"""Files of settings that a stranger or a slip wrote: one sentence each, in little memory."""

from pathlib import Path

import pytest

from dlm_lens.training import read_settings


def test_bases_that_go_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("base: own.yaml\n")
    with pytest.raises(ValueError, match=r"base: goes in a circle, \S*own.yaml -> \S*own.yaml; a base must not"):
        read_settings(tmp_path / "own.yaml")
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: ./c.yaml\n")
    (tmp_path / "c.yaml").write_text(f"base: {tmp_path}/b.yaml\n")
    with pytest.raises(ValueError, match=r"a circle, \S*b.yaml -> \S*c.yaml -> \S*b.yaml; "):
        read_settings(tmp_path / "a.yaml")


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"base: [qwen2.5-0.5b-sink]", r"base is \['qwen2.5-0.5b-sink'\] in .*; it must be the name"),
        (b"[" * 100_000, "is nested too deeply to hold settings"),
        (b"model: \xff\xfe", "is no YAML"),
    ],
)
def test_hostile_files_are_one_sentence(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.yaml").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_settings(tmp_path / "hostile.yaml")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"the override .* is no YAML"):
        read_settings("qwen2.5-0.5b-sink", [f"model={'[' * 50_000}"])


@pytest.mark.parametrize(
    "text",
    [
        # 10^12 values in 600 bytes: as a setting, as the value of one, in mappings that are merged, and of itself.
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 13)),
        "base:\n- &a0 [x]\n" + "".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 13)),
        "a0: &a0 {b: 1}\n"
        + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 13)),
        "output: &a [*a]\n",
    ],
)
def test_aliases_that_multiply_are_refused_before_they_are_followed(text: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.yaml").write_text(text)
    with pytest.raises(
        ValueError, match=r"hostile.yaml is no YAML: more than 10000 values, counted wherever an ali"
    ):
        read_settings(tmp_path / "hostile.yaml")


def test_an_alias_stands_for_its_value(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("base: qwen2.5-0.5b-sink\noutput: &name runs\ndata: {path: *name}\n")
    assert read_settings(tmp_path / "own.yaml").data.path == "runs"
