"""Writes operators.inc: what torch's own list of operators says of CUDA, as sets of names for `backend/rules.h`."""

from pathlib import Path
from typing import Any

import yaml


def operator_sets() -> dict[str, set[str]]:
    """The operators that torch knows, those that CUDA has, and those that do not check their tensors' devices."""
    import torchgen

    listing = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: list[dict[str, Any]] = yaml.load(listing.read_text(encoding="utf-8"), Loader=loader)
    keys = {_name(entry): _dispatch_keys(entry) for entry in entries}
    known, on_cuda, unchecked = set(keys), set(), set()
    for entry in entries:
        name = _name(entry)
        own = keys[name] | keys.get(entry.get("structured_delegate", ""), set())
        if not own or "CUDA" in own or any(key.startswith("Composite") for key in own):
            on_cuda.add(name)
        if entry.get("device_check") == "NoCheck":
            unchecked.add(name)
        generated = {each.strip() for each in str(entry.get("autogen", "")).split(",")} - {""}
        known |= generated
        on_cuda |= generated
    return {"kKnown": known, "kOnCuda": on_cuda, "kUnchecked": unchecked}


def _name(entry: dict[str, Any]) -> str:
    return str(entry["func"]).split("(")[0].strip()


def _dispatch_keys(entry: dict[str, Any]) -> set[str]:
    found = {part.strip() for keys in entry.get("dispatch") or {} for part in keys.split(",")}
    return found | ({"CPU", "CUDA"} if "ufunc_inner_loop" in entry else set())


def write(path: Path) -> None:
    """The sets as C++: plain arrays, made sets when the library is loaded, compile in a fraction of the time."""
    lines = []
    for label, names in operator_sets().items():
        lines += [f"inline const char* const {label}Names[] = {{"]
        lines += [f'"{name}",' for name in sorted(names)]
        lines += ["};"]
        lines += [f"inline const Names {label}(std::begin({label}Names), std::end({label}Names));"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
