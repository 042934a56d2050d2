import sys

import pytest

from dlm_lens.option_values import read_setting


@pytest.fixture(autouse=True)
def _pythons_own_limit():
    """Other tests' libraries raise the limit of recursion of their process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


def test_settings_are_literals_or_text_and_never_programs() -> None:
    read = dict(map(read_setting, ["a=[1, 2]", "b=open('x')", "c={{}: 1}", "d=1e999", "e=a = b", "f="]))
    assert read == {"a": [1, 2], "b": "open('x')", "c": "{{}: 1}", "d": float("inf"), "e": "a = b", "f": ""}
    with pytest.raises(ValueError, match="is nested too deeply"):
        read_setting("a=" + "-" * 3000 + "1")  # RecursionError in Python's parser
    assert read_setting("a=" + "{" * 5000) == ("a", "{" * 5000)  # too many nested parentheses: a SyntaxError


def test_settings_may_be_written_as_json() -> None:
    read = dict(
        map(read_setting, ['a={"chat": true, "b": null}', "c=false", "d=NaN", "e=Infinity", "f=(1, 2)", "g= x "])
    )
    assert read == {"a": {"chat": True, "b": None}, "c": False, "d": "NaN", "e": "Infinity", "f": (1, 2), "g": "x"}
    with pytest.raises(ValueError, match="is nested too deeply"):
        read_setting("a=" + "[" * 50_000)
