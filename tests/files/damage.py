"""A damager of directories: one random damage to one file, such as disks, copies and editors do."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRONG: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.5, 99, 10**30, "", "a", "x" * 5000, [], [0], {}, {"a": 1}, [[[]]],
    float("nan"), float("inf"), "\ud800", "../../outside",
)  # fmt: skip


def damage(directory: Path, draw: random.Random) -> str:
    """Damage a file below a directory; says how. Some damages change nothing that counts."""
    while True:
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        path, kind = draw.choice(files), draw.choice(KINDS)
        before = path.read_bytes()
        done = kind(path, files, draw)
        if done and not (path.is_file() and path.read_bytes() == before):
            return f"{kind.__name__} {path.relative_to(directory)} {done}"


def _flip(path: Path, files: list[Path], draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    if not data:
        return ""
    for _ in range(draw.choice((1, 1, 1, 4))):
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return "bits"


def _cut(path: Path, files: list[Path], draw: random.Random) -> str:
    data = path.read_bytes()
    where = draw.randrange(len(data) + 1)
    path.write_bytes(data[:where] if draw.random() < 0.7 else data[where:])
    return f"at {where}"


def _grow(path: Path, files: list[Path], draw: random.Random) -> str:
    path.write_bytes(path.read_bytes() + draw.choice((b"\n", b"\0" * 8, b"{}\n", b"garbage", b"[" * 100_000)))
    return "longer"


def _hole(path: Path, files: list[Path], draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data) + 1)
    stop = min(len(data), start + draw.choice((1, 8, 64, 4096)))
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    return f"{start}:{stop}"


def _swap(path: Path, files: list[Path], draw: random.Random) -> str:
    other = draw.choice([one for one in files if one.suffix == path.suffix])
    if other == path:
        return ""
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    if draw.random() < 0.5:
        other.write_bytes(one)
    return f"with {other.parent.name}/{other.name}"


def _remove(path: Path, files: list[Path], draw: random.Random) -> str:
    path.unlink()
    return "gone"


def _directory(path: Path, files: list[Path], draw: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a directory"


def _empty(path: Path, files: list[Path], draw: random.Random) -> str:
    path.write_bytes(b"")
    return "empty"


def _lines(path: Path, files: list[Path], draw: random.Random) -> str:
    if path.suffix != ".jsonl":
        return ""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    if not lines:
        return ""
    one, two = draw.randrange(len(lines)), draw.randrange(len(lines))
    what = draw.choice(("delete", "duplicate", "swap", "blank", "copy"))
    if what == "delete":
        del lines[one]
    elif what == "duplicate":
        lines.insert(two, lines[one])
    elif what == "swap":
        lines[one], lines[two] = lines[two], lines[one]
    elif what == "blank":
        lines.insert(one, "\n")
    else:
        lines[one] = lines[two]
    path.write_text("".join(lines))
    return f"{what} {one} {two}"


def _field(path: Path, files: list[Path], draw: random.Random) -> str:
    """Change, remove, add or swap fields of a JSON object, at any depth."""
    if path.suffix not in (".json", ".jsonl"):
        return ""
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = draw.randrange(len(texts))
    values = json.loads(texts[number])
    places = list(_places(values))
    if not places:
        return ""
    holder, key = draw.choice(places)
    what = draw.choice(("remove", "wrong", "wrong", "nudge", "add", "nest", "swap"))
    if what == "remove":
        del holder[key]
    elif what == "wrong":
        holder[key] = draw.choice(WRONG)
    elif what == "nudge":
        holder[key] = _nudged(holder[key], draw)
    elif what == "add":
        if isinstance(holder, dict):
            holder["more"] = draw.choice(WRONG)
        else:
            holder.append(holder[key])
    elif what == "swap":
        other, there = draw.choice(places)
        holder[key], other[there] = json.loads(json.dumps([other[there], holder[key]]))
    text = json.dumps(values)
    if what == "nest":
        holder[key] = "NEST"
        depth = draw.choice((50, 2000, 200_000))
        text = json.dumps(values).replace('"NEST"', "[" * depth + "]" * depth)
    texts[number] = text
    path.write_text("\n".join(texts) + "\n" if path.suffix == ".jsonl" else text)
    return f"{what} {key!r:.40} in line {number}"


def _places(values: Any) -> list[tuple[Any, Any]]:
    found, left = [], [values]
    while left:
        value = left.pop()
        keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            found.append((value, key))
            left.append(value[key])
    return found


def _nudged(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + draw.choice((-1, 1, 0.5, 100))
    if isinstance(value, str):
        return value[1:] + "z" if value else "z"
    if isinstance(value, list):
        return value[::-1] if len(value) > 1 else [*value, *value]
    return {name: value[name] for name in list(value)[1:]} if isinstance(value, dict) else 0


def _folders(path: Path, files: list[Path], draw: random.Random) -> str:
    """Swap the folder of a file with a sibling, or remove it."""
    siblings = sorted({one.parent for one in files if one.parent.parent == path.parent.parent} - {path.parent})
    if not siblings:
        return ""
    other = draw.choice(siblings)
    if draw.random() < 0.3:
        shutil.rmtree(other)
        return f"without {other.name}"
    aside = path.parent.with_name("aside")
    path.parent.rename(aside)
    other.rename(path.parent)
    aside.rename(other)
    return f"folder for {other.name}"


KINDS: tuple[Callable[[Path, list[Path], random.Random], str], ...] = (
    _flip, _flip, _flip, _cut, _grow, _hole, _swap, _remove, _directory, _empty, _lines, _folders,
    _field, _field, _field, _field,
)  # fmt: skip
