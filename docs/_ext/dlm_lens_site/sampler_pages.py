"""The page of the samplers: their settings with what they mean, from the dataclasses that have them."""

import re
from collections.abc import Mapping
from typing import Any

from dlm_lens_site.command_line import cell
from dlm_lens_site.files import DOCS

HEAD = """# Samplers

What `denoise` takes for each sampler beside its own arguments, and what `run.confidence` is.
`dl.sampler_settings(model)` prints it for a model, `dlm-lens families FAMILY` for a family. How they work is on
the pages of the [families](../families.md).

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
    pages = dict(re.findall(r"^\| \[`(\w+)`\]\((families/\w+\.md)\)", table, re.MULTILINE))
    lines = [HEAD]
    for name, own in used.items():
        links = ", ".join(f"[{family}](../{pages[family]})" for family in own)
        lines.append(f"| [`{name}`](#{name}) | {links} |")
    for name, own in used.items():
        shown = {family: settings_of_sampler(algorithms()[name], defaults) for family, defaults in own.items()}
        first = next(iter(shown.values()))
        lines += ["", f"## {name}", "", cell(first.source), "", f"Confidence: {cell(first.confidence)}.", ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        for number, one in enumerate(first.settings):
            default = _default({family: each.settings[number].value for family, each in shown.items()})
            lines.append(f"| `{one.name}` | {default} | {cell(one.meaning)} |")
    return {"samplers.md": "\n".join(lines) + "\n"}


def _default(of_families: Mapping[str, Any]) -> str:
    """The value, or those of the families where they have others."""
    by_value: dict[str, list[str]] = {}
    for family, value in of_families.items():
        by_value.setdefault(repr(value), []).append(family)
    if len(by_value) == 1:
        return f"`{next(iter(by_value))}`"
    return "; ".join(f"`{value}` ({', '.join(names)})" for value, names in by_value.items())
