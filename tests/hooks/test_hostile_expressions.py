"""Hostile hook expressions: read fast, never executed, refused in one sentence with the character."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlm_lens.hooks.expressions import MAX_LENGTH, check_expression, detector_names, hook_names, parse_hooks

seen: list[str] = []
watching = False


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    # ast.parse compiles to a syntax tree under the name "<unknown>"; anything else is a program. The directory of
    # an autoencoder, reconstruct('...'), is listed to say what is missing there.
    harmless = event == "os.listdir" or (event == "compile" and arguments[1] in ("<unknown>", b"<unknown>"))
    if (
        watching
        and not harmless
        and event.split(".")[0] in ("exec", "compile", "open", "subprocess", "socket", "os")
    ):
        seen.append(f"{event} {arguments!r:.100}")


@pytest.fixture(scope="module")
def audited() -> None:
    parse_hooks("mask_sinks(above_mean(3)), at_steps(mask_random(2), [0])")  # what it imports is imported
    sys.addaudithook(audit)


def read(text: str) -> str | None:
    """The refusal of an expression, None where it is read; what Python does meanwhile is watched."""
    global watching
    start = time.process_time()
    watching = True
    try:
        parse_hooks(text)
        refusal = None
    except (ValueError, FileNotFoundError) as error:  # the directory of an autoencoder
        refusal = str(error)
    finally:
        watching = False
    # A thousandth of it on an idle machine.
    assert time.process_time() - start < 2, text
    assert seen == []
    if refusal is not None:
        assert refusal.isprintable(), refusal
        assert len(refusal) < 1800
    return refusal


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mask_positions(0), mask_positions(x)", r"'x' alone is no value.*\(at character 35 of"),
        ("mask_tokens('é'), mask_positions(1.5)", r"mask_tokens\('é'\).*\(at character 1 of"),
        (
            "mask_positions(1.5)",
            r"whole number, sink\(i\) or by_row\(\.\.\.\) \(at character 1 of the hook expression\)",
        ),
        ("(mask_positions(0),\n  open('x'))", r"'open' is no hook .*\(at character 23 of"),
        ("(mask_positions(0),\r\n  open('x'))", r"'open' is no hook .*\(at character 23 of"),
        ("mask_positions(0), mask_positions(0", r"was never closed, at character 34"),
        ("mask_positions('\x0c\u2028'), 1 + 1", r"'1 \+ 1' is not allowed .*\(at character 23 of"),
        ("mask_positions(range(0, 10, 0))", r"range\(0, 10, 0\) never ends"),
        (
            "keep_only(" + "range(99999), " * 2 + ")",
            r"ranges of the expression have more than 100000 numbers together",
        ),
        ("mask_positions(range(10 ** 9))", r"'10 \*\* 9' is not allowed"),
        ("mask_positions(range(1000000000))", r"has more than 100000 numbers"),
        ("mask_positions(range(1000000000000000000000, 0, -1))", r"has more than 100000 numbers"),
        ("mask_positions(" + "9" * 5000 + ")", r"has 5016 characters; 2000 is the most"),
        ("[]", r"'\[\]' holds no hook"),
        ("((), )", r"holds \(\), which is no hook"),
        ("[" * 150 + "]" * 150, r"is nested too deeply; 20 levels are the most"),
        ("at_steps(" * 99 + "mask_positions(0)" + ", 1)" * 99, r"is nested too deeply; 20 levels are the most"),
        ("at_progress(mask_positions(0), 1)", r"progress is 1; it must be an interval"),
        ("at_progress(mask_positions(0), ('a', None))", r"progress is \('a', None\); it must be an interval"),
        ("at_progress(mask_positions(0), (0, 1, 2))", r"progress is \(0, 1, 2\); it must be an interval"),
        ("mask_positions('" + "x" * 1900 + "')", r"\.\.\. \(at character 1 of"),
        ("mask_positions(0)\x00", r"is no hook expression"),
        ("mask_tokens('\ud800')", r"is no hook expression"),
        ("mask_positions(0) if 1is 1 else '\\d'", r"is not allowed"),
        (3, r"the hook expression is 3, which is no text"),
        (None, r"the hook expression is None, which is no text"),
    ],
)
def test_a_refusal_names_the_place(text: Any, sentence: str, audited: None) -> None:
    said = read(text)
    assert said is not None
    assert re.search(sentence, said), said


def test_a_range_of_the_largest_size_is_read(audited: None) -> None:
    (hook,) = parse_hooks("at_steps(mask_positions(0), range(0, 200000, 2))")
    assert hook.limit.steps == range(0, 200000, 2)
    assert read("at_steps(mask_positions(0), range(0, 200002, 2))") is not None
    assert read("at_steps(mask_positions(0), range(5, 0))") is not None  # no step at all


def test_python_s_remarks_on_an_expression_are_not_shown(recwarn: pytest.WarningsRecorder, audited: None) -> None:
    for text in ("mask_tokens('\\d')", "mask_positions(1is 1)", "mask_positions(0)(1)", "'a'()"):
        read(text)
    assert [str(one.message) for one in recwarn] == []


def expressions() -> st.SearchStrategy[str]:
    """Near and far from what is allowed: calls of known and unknown names around literals and pieces of Python."""
    names = st.sampled_from(
        [*hook_names(), *detector_names(), "range", "open", "eval", "__import__", "exec", "sink"]
    )
    literals = st.one_of(
        st.integers(-(10**40), 10**40).map(str),
        st.integers(-3, 6).map(str),
        st.floats().map(repr),
        st.text(max_size=8).map(repr),
        st.sampled_from(
            ["None", "True", "inf", "'mask'", "'after'", "'end'", "1e999", "b'x'", "...", "x.y", "1j", "lambda: 0",
             "[i for i in range(9)]", "().__class__", "f'{open}'", "*[1]", "**{}", "10**9", "not 1", "await x",
             "'current'", "'previous'", "(0, 1)", "[0, 1]", "{1: 2}", "0x10", "\\", "\n", ";", ")", "(", "#"]
        ),
    )  # fmt: skip
    keys = st.sampled_from(["", "", "top=", "stage=", "k=", "eps=", "window=", "ahead=", "source=", "seed=", "x="])

    def around(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        arguments = st.lists(st.tuples(keys, inner).map("".join), max_size=4).map(", ".join)
        calls = st.tuples(names, arguments).map(lambda parts: f"{parts[0]}({parts[1]})")
        return st.one_of(
            calls,
            arguments.map(lambda one: f"[{one}]"),
            arguments.map(lambda one: f"({one},)"),
            inner.map("-{}".format),
        )

    return st.recursive(literals, around, max_leaves=12)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(expressions())
def test_any_expression_is_read_or_refused(audited: None, text: str) -> None:
    read(text)


@pytest.mark.long
@pytest.mark.in_turn
@settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        expressions(), st.text(max_size=MAX_LENGTH), st.binary(max_size=200).map(lambda b: b.decode("latin-1"))
    )
)
def test_any_text_is_read_or_refused(audited: None, text: str) -> None:
    if read(text) is None:
        check_expression(text)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", "path is ''; give the directory of a sparse autoencoder"),
        (" ", "path is ' '; give the directory of a sparse autoencoder"),
        (".", "holds neither sae_weights.safetensors nor sae.safetensors"),
        ("nowhere", "nowhere is no directory; give the one that holds cfg.json and the weights"),
    ],
)
def test_directories_of_autoencoders_in_expressions(
    audited: None, path: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refusal = read(f"reconstruct({path!r})")
    assert refusal is not None
    assert sentence in refusal
