"""Stored answers belong to what an intervention computes, whatever its place in memory."""

import importlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlm_lens.attention.hook_identity import _parts, identity_of
from dlm_lens.evaluation import HarnessLM
from dlm_lens.hooks import at_progress, mask_positions, splice, steer
from dlm_lens.recording import record
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask, counted
from tests.preloaded import python

LIMIT = 0.5
EDITS = {"cos": torch.cos, "sin": torch.sin}


def limited(by: float) -> Callable[[Any], Any]:
    return lambda p: p < by


def with_default(p: Any, by: float = 0.5) -> Any:
    return p < by


def with_global(p: Any) -> Any:
    return p < LIMIT


def calls_another(p: Any) -> Any:
    return with_global(p)


class Below:
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, p: Any) -> Any:
        return p < self.by

    def method(self, p: Any) -> Any:
        return p < self.by


def in_half(code: str) -> Any:
    """A function from its source, as a notebook's cell defines it."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(code, space)  # noqa: S102
    return space["f"]


def of_class(body: str, before: str = "") -> Any:
    """An object of a class with this body, whose repr says nothing of it."""
    return in_half(f"{before}\nclass F({'Base' if 'class Base' in before else 'object'}):\n {body}\nf = F()")


CALL = "def __call__(self, p): return p < "
LESS = "def __call__(self, p): return self.less(p)"
BELOW = "from functools import lru_cache, partial, partialmethod\ndef less(p, by): return p < by"
LIMITS = """
class Limit:
    def __init__(self, by): self.by = by
class Stored(Limit):
    def __get__(self, owner, kind): return self.by
"""
REPR = "def __repr__(self): return 'F()'"
METHODS = {
    "class attribute": ("by = {}\n " + CALL + "self.by", ""),
    "global of a method": (CALL + "A", "A = {}"),
    "inherited method": ("pass", "class Base:\n " + CALL + "{}"),
    "property": (CALL + "self.by\n @property\n def by(self): return {}", ""),
    "static method": (CALL + "self.by()\n @staticmethod\n def by(): return {}", ""),
    "attribute": (CALL + "self.by\n def __init__(self): self.by = A", "A = {}"),
    "slot": (CALL + "self.by\n __slots__ = ('by',)\n def __init__(self): self.by = A", "A = {}"),
    "class attribute that is a partial": ("less = staticmethod(partial(less, by={}))\n " + LESS, BELOW),
    "call that is a partial": ("__call__ = staticmethod(partial(less, by={}))", BELOW),
    "class attribute that is a partial method": (
        "less = partialmethod(lambda self, p, by: p < by, by={})\n " + LESS,
        BELOW,
    ),
    "class attribute that is a module": ("less = torch.nn.Threshold({}, 0)\n " + LESS, "import torch"),
    "class attribute that is an object": ("by = Limit({})\n " + CALL + "self.by.by", LIMITS),
    "class attribute that describes itself": ("by = Stored({})\n " + CALL + "self.by", LIMITS),
    "cached method": ("@lru_cache\n def less(self, p): return p < {}\n " + LESS, BELOW),
}


class Choice:
    """One of several values that it holds; its repr does not say which."""

    site, stateless, padding_safe = "resid", True, True

    def __init__(self, chosen: int, values: Any) -> None:
        self.values = values
        self.chosen = self.values[chosen]

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        return self.chosen(tensor)

    def __repr__(self) -> str:
        return "Choice()"


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


VALUES: dict[str, Any] = {
    "functions": [zeros, doubled],
    "objects": [Below(0.5), Below(0.9)],
    "lists": [[0], [1]],
}


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "constant": (lambda p: p < 0.5, lambda p: p < 0.9),
    "operator": (in_half("f = lambda p: p < .5"), in_half("f = lambda p: p > .5")),
    "closure": (limited(0.5), limited(0.9)),
    "default": (with_default, partial(with_default, by=0.9)),
    "global": (in_half("A = 1\nf = lambda p: p < A"), in_half("A = 2\nf = lambda p: p < A")),
    "global function": (
        in_half("g = lambda p: p < 1\nf = lambda p: g(p)"),
        in_half("g = lambda p: p < 2\nf = lambda p: g(p)"),
    ),
    "inner function": (
        in_half("f = lambda p: (lambda q: q < 1)(p)"),
        in_half("f = lambda p: (lambda q: q < 2)(p)"),
    ),
    "name of a builtin": (in_half("f = lambda p: min(p)"), in_half("f = lambda p: max(p)")),
    "callable object": (Below(0.5), Below(0.9)),
    "method": (Below(0.5).method, Below(0.9).method),
    "class of the user's": (
        in_half("class F:\n def __call__(self, p): return p < 1\nf = F()"),
        in_half("class F:\n def __call__(self, p): return p < 2\nf = F()"),
    ),
    "array in the closure": (limited(np.ones(2000)), limited(np.arange(2000.0))),  # type: ignore[arg-type]
    "tensor in the closure": (limited(torch.ones(2000)), limited(torch.zeros(2000))),  # type: ignore[arg-type]
    "builtin": (torch.sin, torch.cos),
    "module": (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)),
}


for case, (body, before) in METHODS.items():
    for shown, text in (("", ""), (", with a repr of its own", "\n " + REPR)):
        one, other = (of_class(body.replace("{}", by) + text, before.replace("{}", by)) for by in ("1", "2"))
        DIFFERENT[case + shown] = one, other


for case, held in VALUES.items():
    DIFFERENT[f"which of the known {case}"] = Choice(0, held), Choice(1, held)
DIFFERENT["which of two keys of one name"] = (
    Choice(0, {0: zeros, "0": doubled}),
    Choice("0", {0: zeros, "0": doubled}),  # type: ignore[arg-type]
)


@pytest.mark.parametrize("case", DIFFERENT)
def test_functions_that_compute_something_else_are_told_apart(case: str) -> None:
    one, other = DIFFERENT[case]
    found = [identity_of(at_progress(mask_positions(1), each)) for each in (one, other)]
    assert found[0] != found[1]
    assert found[0] == identity_of(at_progress(mask_positions(1), one))
    edited = [identity_of(splice(each)) for each in (one, other)]
    assert edited[0] != edited[1]
    assert not any("0x" in text for text in (*found, *edited))


def test_equal_functions_have_one_identity() -> None:
    assert limited(0.5) is not limited(0.5)
    for make in (limited, Below):
        assert len({identity_of(at_progress(mask_positions(1), make(0.5))) for _ in range(3)}) == 1
    line = "f = lambda p: p in {'a', 'b', 'c'}"
    assert identity_of(in_half(line)) == identity_of(in_half("\n\n" + line))
    assert identity_of(calls_another) == identity_of(calls_another)


def test_a_tensor_in_the_closure_is_identified_by_its_numbers() -> None:
    made = [limited(torch.arange(3.0)) for _ in range(2)]  # type: ignore[arg-type]
    assert identity_of(made[0]) == identity_of(made[1])


def test_one_tuple_twice_is_as_two_equal_ones() -> None:
    one, other = (tuple(range(3)) for _ in range(2))
    assert one is not other
    assert identity_of(Choice(0, [one, one])) == identity_of(Choice(0, [one, other]))


def test_an_abstract_class_has_an_identity() -> None:
    made = [of_class(CALL + by, "from abc import ABC\nclass Base(ABC): pass") for by in ("1", "1", "2")]
    found = [identity_of(one) for one in made]
    assert found[0] == found[1] != found[2]


@dataclass(frozen=True)
class Scale:
    """A hook of the user's own; Python generates its repr, in a decorator that holds a function twice."""

    factor: float = 2.0

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        return tensor * self.factor


def test_a_dataclass_whose_repr_is_generated_holds_nothing_twice() -> None:
    # Files that were stored before objects were told apart hold this identity.
    assert not [part for part in _parts(Scale(), "", True, True, {}) if b"again" in part.content]


def test_decorated_functions_are_told_apart_by_what_they_call() -> None:
    def chosen(used: Any, other: Any) -> Any:
        @wraps(zeros)
        def call(tensor: torch.Tensor) -> torch.Tensor:
            return used(tensor) if other else tensor

        return call

    assert len({identity_of(chosen(*two)) for two in ((zeros, doubled), (doubled, zeros), (doubled, doubled))}) == 3


def test_a_hook_that_chose_another_known_function_continues_no_recording(llada: Any, tmp_path: Path) -> None:
    settings = {"steps": 2, "gen_length": 2, "block_length": 2}
    record(llada, [[5, 6, 7]], hooks=[Choice(0, [zeros, doubled])], to=tmp_path / "kept", **settings)
    with pytest.raises(ValueError, match=r"holds a recording with hooks = \['Choice"):
        record(llada, [[5, 6, 7]], hooks=[Choice(1, [zeros, doubled])], to=tmp_path / "kept", **settings)


RECORDS = np.zeros(2, dtype=[("a", "f4"), ("b", "i4")])
KINDS: dict[str, tuple[Any, Any]] = {
    "text": (np.array(["noun", "verb"]), np.array(["noun", "noun"])),
    "negative strides": (np.arange(3.0)[::-1], np.arange(3.0)),
    "dates": (np.array(["2020-01-01"], dtype="datetime64[D]"), np.array(["2020-01-02"], dtype="datetime64[D]")),
    "another byte order": (np.arange(3, dtype=">f4"), np.arange(1, 4, dtype=">f4")),
    "records": (RECORDS, RECORDS.view([("a", "f4"), ("c", "i4")])),
    "numbers of 16 bytes": (np.ones(2, dtype=np.longdouble), np.zeros(2, dtype=np.longdouble)),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(3)[[1, 0, 2]].to_sparse()),
    "conjugate": (torch.full((2,), 1j).conj(), torch.full((2,), 1j)),
    "negative view": (torch.full((2,), 1j).conj().imag, torch.full((2,), 1j).imag),
}


@pytest.mark.parametrize("case", KINDS)
def test_arrays_and_tensors_of_every_kind_have_an_identity(case: str) -> None:
    one, other = KINDS[case]
    again = one.clone() if isinstance(one, torch.Tensor) else one.copy()
    found = [identity_of(Below(each)) for each in (one, again, other)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "longlong", "float16", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_an_array_has_the_identity_of_its_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=float).reshape(shape).astype(dtype)
    assert identity_of(Below(array)) == identity_of(Below(torch.from_numpy(array)))
    assert identity_of(Below(array.T.copy().T)) == identity_of(Below(array))


SCRIPT = """
import sys
from dlm_lens.attention.hook_identity import identity_of
from dlm_lens.hooks import at_progress, mask_positions
hold = [object() for _ in range(int(sys.argv[1]))]
def make(by, names):
    def chosen(p):
        return (p < by) & (len({"a", "b", "c"} & names) > 0)
    return chosen
print(identity_of(at_progress(mask_positions(1), make(0.5, frozenset("abcdef")))))
"""


def test_an_identity_is_the_same_in_every_process() -> None:
    # Each has its own seed of hashes: the second is a fork of a server that drew one.
    found = set()
    for command, number in ((sys.executable, "1"), (python(), "100000")):
        done = subprocess.run([command, "-c", SCRIPT, number], capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


LIBRARY = """
NOTHING = object()
class Tokens:
    def __init__(self, size):
        self.size = size
    def read(self):
        return NOTHING
"""


@pytest.mark.parametrize("folder", ["lib/python3/site-packages", "lib/python3/dist-packages"])
@pytest.mark.parametrize("package", [False, True])
def test_libraries_outside_of_the_environment_are_libraries(
    folder: str, package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's or the system's own packages, or PYTHONPATH on a cluster; with and without an __init__.py."""
    place = tmp_path / folder
    (place / "elsewhere").mkdir(parents=True)
    name = "elsewhere.tokens" if package else "elsewhere_tokens"
    (place / (name.replace(".", "/") + ".py")).write_text(LIBRARY)
    monkeypatch.syspath_prepend(place)
    for one in ("elsewhere", name):
        monkeypatch.delitem(sys.modules, one, raising=False)
    library = importlib.import_module(name)

    def identity(size: int) -> str:
        held = library.Tokens(size)
        return identity_of(at_progress(mask_positions(1), lambda p: p < held.size))

    assert identity(3) == identity(3) != identity(4)
    # The same code beside a user's scripts is the user's own, and what it reads has no identity.
    monkeypatch.setattr(library, "__file__", str(tmp_path / "scripts" / "tokens.py"))
    if package:
        monkeypatch.setattr(sys.modules["elsewhere"], "__file__", str(tmp_path / "scripts" / "__init__.py"))
    with pytest.raises(ValueError, match="NOTHING is <object object>, which has no identity"):
        identity(3)


def test_an_object_that_only_its_address_distinguishes_is_refused(llada: Any, tmp_path: Path) -> None:
    file = (one for one in [1])
    hook = at_progress(mask_positions(1), lambda p: p < next(file))
    match = "hooks holds .*file is <generator object .*leave out `responses` and `record_to`"
    with pytest.raises(ValueError, match=match) as caught:
        HarnessLM(llada, hooks=[hook], responses=tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.jsonl").exists()
    with pytest.raises(ValueError, match="hooks holds"):
        HarnessLM(llada, hooks=[hook], record_to=tmp_path / "recordings")
    assert not (tmp_path / "recordings").exists()
    # Without stored answers there is nothing to identify.
    assert HarnessLM(llada, hooks=[hook]).get_model_info()["dlm_lens"]["hooks"]


def test_stored_answers_of_another_function_are_not_returned(llada: Any, tmp_path: Path) -> None:
    path, requests = tmp_path / "a.jsonl", ask("generate_until", ("w1 w2", {"until": []}))

    def evaluated(by: float) -> list[str]:
        hooks = [at_progress(steer(torch.ones(32), 50.0), limited(by))]
        return HarnessLM(llada, hooks=hooks, responses=path).generate_until(requests)

    first = evaluated(0.5)
    with counted(llada) as none:
        assert evaluated(0.5) == first
    assert none == []
    with pytest.raises(ValueError, match="holds answers with hooks="):
        evaluated(0.9)


@contextmanager
def adding(model: Any, number: float) -> Iterator[None]:
    """Hooks of the user's own: the logits of token 3 plus a number."""
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, inputs, out: out + number * torch.eye(out.shape[-1])[3])
    try:
        yield
    finally:
        handle.remove()


def test_stored_answers_without_around_are_not_returned_under_it(llada: Any, tmp_path: Path) -> None:
    path, requests = tmp_path / "a.jsonl", ask("loglikelihood", ("w1 w2", " w3"))
    settings = {"likelihood": {"method": "chain_rule", "is_greedy": False}, "responses": path}
    plain = HarnessLM(llada, **settings).loglikelihood(requests)
    with pytest.raises(ValueError, match="holds answers with around=None, this evaluation has '<function"):
        HarnessLM(llada, **settings, around=partial(adding, number=2.0).func)
    settings["responses"] = tmp_path / "b.jsonl"
    edited = HarnessLM(llada, **settings, around=partial(adding, number=2.0)).loglikelihood(requests)
    assert edited != plain
    with counted(llada) as none:
        assert HarnessLM(llada, **settings, around=partial(adding, number=2.0)).loglikelihood(requests) == edited
    assert none == []
    with pytest.raises(ValueError, match="holds answers with around="):
        HarnessLM(llada, **settings, around=partial(adding, number=3.0))
    kept = io.StringIO()
    with pytest.raises(ValueError, match=r"around holds .*_io\.StringIO"):
        HarnessLM(llada, responses=tmp_path / "c.jsonl", around=lambda model: adding(model, float(kept.read())))


def test_requests_that_are_recorded_take_hooks_and_nothing_around_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"around is given with record: .*give interventions as hooks="):
        HarnessLM(tiny("llada"), record_to=tmp_path / "kept", around=lambda model: nullcontext())
    assert not (tmp_path / "kept").exists()
