"""Every error sentence of the library, read from its source.

A sentence is what a `raise` gives its exception; `…` stands for a value. Where the text is made by a helper
function or assigned to a name first, it is followed there.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dlm_lens_site.files import ROOT

VALUE = "…"


@dataclass(frozen=True)
class ErrorSentence:
    """One sentence and its place.

    Args:
        text: the sentence, with … for values.
        kind: name of the exception.
        module: dotted module.
        function: qualified name of the function that raises it.
        line: line of the `raise`.
        when: what the docstring's `Raises:` says about this exception; empty if nothing.
    """

    text: str
    kind: str
    module: str
    function: str
    line: int
    when: str


@dataclass(frozen=True)
class Unread:
    """A `raise` whose sentence could not be read from the source."""

    module: str
    line: int
    code: str


def source_files() -> list[Path]:
    """The modules of the package, interventions included."""
    found = [*(ROOT / "dlm_lens").rglob("*.py"), *(ROOT / "hooks").rglob("*.py")]
    return sorted(path for path in found if "hooks" not in path.relative_to(ROOT).parts[1:])


def module_name(path: Path) -> str:
    """`hooks/limits.py` is `dlm_lens.hooks.limits`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "dlm_lens" else ("dlm_lens", *parts)).removesuffix(".__init__")


@cache
def all_sentences() -> tuple[list[ErrorSentence], list[Unread]]:
    """Every sentence in the order of the files, and every `raise` that could not be read."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in source_files()}
    helpers = _helpers(trees)
    found: list[ErrorSentence] = []
    unread: list[Unread] = []
    for path, tree in trees.items():
        for node, owners in _raises(tree, (tree,)):
            module = module_name(path)
            kind, texts = _sentences(node, owners, helpers, path)
            if not texts:
                unread.append(Unread(module, node.lineno, ast.unparse(node)))
            name = ".".join(owner.name for owner in owners if not isinstance(owner, ast.Module))
            when = _when(owners, kind)
            found += [ErrorSentence(text, kind, module, name, node.lineno, when) for text in texts]
    return found, unread


Owner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
Helpers = dict[tuple[Path | None, str], list[ast.FunctionDef]]


def _raises(node: ast.AST, owners: tuple[Owner, ...]) -> Iterator[tuple[ast.Raise, tuple[Owner, ...]]]:
    """Every `raise` with a new exception, and the classes and functions around it."""
    for child in ast.iter_child_nodes(node):
        inside = (
            (*owners, child) if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else owners
        )
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            yield child, owners
        yield from _raises(child, inside)


def _helpers(trees: dict[Path, ast.Module]) -> Helpers:
    """Functions by file and name, and by name alone (None), for texts and exceptions that a helper makes."""
    found: Helpers = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found.setdefault((path, node.name), []).append(node)
                found.setdefault((None, node.name), []).append(node)
    return found


def _sentences(node: ast.Raise, owners: tuple[Owner, ...], helpers: Helpers, path: Path) -> tuple[str, list[str]]:
    call = node.exc
    assert isinstance(call, ast.Call)
    kind = _name(call.func)
    if not kind.lstrip("_")[:1].isupper():
        return _made(call, kind, helpers, path)
    if not call.args:
        return kind, []
    # An OSError's sentence is its second argument.
    argument = call.args[1] if kind == "OSError" and len(call.args) > 1 else call.args[0]
    return kind, _texts(argument, owners, helpers, path)


def _made(call: ast.Call, name: str, helpers: Helpers, path: Path) -> tuple[str, list[str]]:
    """The exception that a helper function makes: its sentences, or those given to it."""
    kind, texts = "ValueError", []
    for helper in _find(name, helpers, path):
        for part in ast.walk(helper):
            if isinstance(part, ast.Call) and _name(part.func).endswith(("Error", "Exception")) and part.args:
                kind = _name(part.func)
                texts += _texts(part.args[0], (helper,), helpers, path)
    given = [text for argument in call.args for text in _texts(argument, (), helpers, path)]
    for argument in call.args:
        if isinstance(argument, ast.Call) and argument.args and _name(argument.func).endswith("Error"):
            kind = _name(argument.func)
            given += _texts(argument.args[0], (), helpers, path)
    fragments = [text for text in given if " " in text.strip()]
    if texts and fragments:
        texts = [f"{text}  [{VALUE} = {fragment}]" for text in texts[:1] for fragment in fragments]
    return kind, texts or fragments


def _texts(node: ast.expr, owners: tuple[Owner, ...], helpers: Helpers, path: Path, depth: int = 0) -> list[str]:
    """What an expression may say, one text per alternative."""
    if depth > 4:
        return []
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(_piece(part) for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left = _texts(node.left, owners, helpers, path, depth + 1) or [VALUE]
        right = _texts(node.right, owners, helpers, path, depth + 1) or [VALUE]
        return [a + b for a in left for b in right][:4]
    if isinstance(node, ast.IfExp):
        both = (node.body, node.orelse)
        return [text for part in both for text in _texts(part, owners, helpers, path, depth + 1)]
    if isinstance(node, ast.Name):
        return [
            text for value in _assigned(node.id, owners) for text in _texts(value, owners, helpers, path, depth + 1)
        ]
    if isinstance(node, ast.Call):
        return _returned(node, owners, helpers, path, depth)
    return []


def _returned(node: ast.Call, owners: tuple[Owner, ...], helpers: Helpers, path: Path, depth: int) -> list[str]:
    name = _name(node.func)
    if name == "str" and node.args:
        return _texts(node.args[0], owners, helpers, path, depth + 1)
    texts = []
    for helper in _find(name, helpers, path):
        for part in ast.walk(helper):
            if isinstance(part, ast.Return) and part.value is not None:
                texts += _texts(part.value, (helper,), helpers, path, depth + 1)
    given = [text for argument in node.args for text in _texts(argument, owners, helpers, path, depth + 1)]
    fragments = [text for text in given if " " in text.strip()]
    if texts and fragments:
        return [f"{text}  [{VALUE} = {fragment}]" for text in texts[:1] for fragment in fragments]
    return texts or fragments


def _piece(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return VALUE


def _assigned(name: str, owners: tuple[Owner, ...]) -> list[ast.expr]:
    """The values assigned to a name in the function around, the innermost first; also what is appended with +=."""
    for owner in reversed(owners):
        found = []
        for node in ast.walk(owner):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    found.append(node.value)
        if found:
            return found
    return []


def _find(name: str, helpers: Helpers, path: Path) -> list[ast.FunctionDef]:
    here = helpers.get((path, name))
    everywhere = helpers.get((None, name), [])
    return here or (everywhere if len(everywhere) <= 3 else [])


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _when(owners: tuple[Owner, ...], kind: str) -> str:
    """What the nearest docstring around says about this exception."""
    for owner in reversed(owners):
        doc = ast.get_docstring(owner) or ""
        lines = doc.partition("Raises:")[2].splitlines()
        for number, line in enumerate(lines):
            if line.strip().startswith(f"{kind}:"):
                more = []
                for following in lines[number + 1 :]:
                    if not following.startswith("        "):
                        break
                    more.append(following.strip())
                return " ".join([line.split(":", 1)[1].strip(), *more])
    return ""
