"""The page of the samplers: their settings with what they mean, from the dataclasses that have them."""

import re
from collections.abc import Mapping
from typing import Any

from dlm_lens_site.command_line import cell
from dlm_lens_site.files import DOCS

HEAD = """# Samplers

What `denoise` takes for each sampler beside its own arguments, and what `run.confidence` is.
`dl.sampler_settings(model)` prints it for a model, `dlm-lens families FAMILY` for a family. How they work is in
[families](../families.md).

| sampler | families |
|---|---|"""


def sampler_page() -> dict[str, str]:
    """One section per sampler: whose code it follows, what its confidence is, its settings, their defaults."""
    from dlm_lens.adapters.registry import families
    from dlm_lens.sampling import algorithms
    from dlm_lens.sampling.setting_meanings import settings_of_sampler

    used = {
        name: {one.name: one.samplers[name] for one in families() if name in one.samplers} for name in algorithms()
    }
    table = (DOCS / "families.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\)", table, re.MULTILINE))
    lines = [HEAD]
    for name, own in used.items():
        links = ", ".join(f"[{family}](../families.md#{sections[family]})" for family in own)
        lines.append(f"| [`{name}`](#{name}) | {links} |")
    for name, algorithm in algorithms().items():
        shown = settings_of_sampler(algorithm, {})
        lines += ["", f"## {name}", "", cell(shown.source), "", f"Confidence: {cell(shown.confidence)}.", ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        for one in shown.settings:
            default = _default(
                {family: of[one.name] for family, of in used[name].items() if one.name in of}, one.value
            )
            lines.append(f"| `{one.name}` | {default} | {cell(one.meaning)} |")
    return {"samplers.md": "\n".join(lines) + "\n"}


def _default(given: Mapping[str, Any], own: Any) -> str:
    """The sampler's value, or those of its families where they have others."""
    by_value: dict[str, list[str]] = {}
    for family, value in given.items():
        by_value.setdefault(repr(value), []).append(family)
    if len(by_value) == 1:
        return f"`{next(iter(by_value))}`"
    return "; ".join(f"`{value}` ({', '.join(names)})" for value, names in by_value.items()) or f"`{own!r}`"
