import pytest

from dlm_lens.experiments.experiment import read_setting


def test_settings_are_literals_or_text_and_never_programs() -> None:
    read = dict(map(read_setting, ["a=[1, 2]", "b=open('x')", "c={{}: 1}", "d=1e999", "e=a = b", "f="]))
    assert read == {"a": [1, 2], "b": "open('x')", "c": "{{}: 1}", "d": float("inf"), "e": "a = b", "f": ""}
    with pytest.raises(ValueError, match="is nested too deeply"):
        read_setting("a=" + "-" * 3000 + "1")  # RecursionError in Python's parser
    assert read_setting("a=" + "{" * 5000) == ("a", "{" * 5000)  # too many nested parentheses: a SyntaxError
