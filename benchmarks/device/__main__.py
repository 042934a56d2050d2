"""`python -m benchmarks.device`: run the parts, or one of them; see `benchmarks/README.md`, "On a GPU"."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.device import report
from benchmarks.device.part import Device, Part, run_part, verdict_of
from benchmarks.device.parts import PARTS


def device_here(pretended: bool) -> Device:
    """Asked in a process of its own: this one holds no memory of the GPU."""
    if pretended:
        return "pretended"
    from subprocess import run
    from sys import executable

    asked = run(
        [executable, "-c", "import torch; print(torch.cuda.is_available())"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "gpu" if asked.stdout.strip().endswith("True") else "cpu"


def finished(known: dict[str, Any], part: Part, device: Device, small: bool) -> bool:
    """Whether the part is done on such a device, at this size and commit."""
    before = known.get(part.name)
    if before is None or before["verdict"] != "done":
        return False
    return (before["device"], before["small"], before["commit"]) == (device, small, report.commit())


def main(
    part: Annotated[str, typer.Option(help="numbers or names of parts, separated by commas; all by default")] = "",
    show: Annotated[bool, typer.Option("--list", help="print the parts and what each shows")] = False,
    out: Annotated[Path, typer.Option(help="folder of device.json and device.md")] = Path("runs/device"),
    small: Annotated[bool, typer.Option("--small", help="small sizes, on the CPU where there is no GPU")] = False,
    pretended: Annotated[bool, typer.Option("--pretended", help="the pretended GPU (implies --small)")] = False,
    again: Annotated[bool, typer.Option("--again", help="repeat finished parts")] = False,
    minutes: Annotated[float, typer.Option(help="begin no part that may end later than this")] = 1e6,
) -> None:
    """Run every part that is not finished."""
    if show:
        for number, each in enumerate(PARTS, start=1):
            print(f"{number:2} {each.name}: {each.shows} (at most {each.budget / 60:.0f} minutes)")
        return
    chosen = _chosen(part)
    small, device = small or pretended, device_here(pretended)
    ends, known = time.monotonic() + minutes * 60, report.read(out)
    print(
        f"device: {device}; nnsight {_there('nnsight')}, transformer_lens {_there('transformer_lens')}", flush=True
    )
    for number, each in enumerate(PARTS, start=1):
        if each not in chosen:
            continue
        if not again and finished(known, each, device, small):
            print(f"{number} {each.name}: finished before", flush=True)
        elif time.monotonic() + each.budget > ends:
            print(f"{number} {each.name}: not begun, it may take {each.budget / 60:.0f} minutes", flush=True)
        else:
            print(f"{number} {each.name}: {each.shows}", flush=True)
            outcomes = run_part(each, device, small)
            known[each.name] = report.entry(outcomes, verdict_of(outcomes), device, small)
            report.write(out, known, PARTS)
    failed = [each.name for each in chosen if known.get(each.name, {}).get("verdict") in ("failed", "out of time")]
    print(f"{out / 'device.md'}; failed: {', '.join(failed) or 'none'}")
    raise typer.Exit(1 if failed else 0)


def _there(package: str) -> str:
    return "installed" if find_spec(package) else "not installed: its rows are skipped"


def _chosen(given: str) -> list[Part]:
    names = {str(number): part for number, part in enumerate(PARTS, start=1)} | {p.name: p for p in PARTS}
    wanted = [text.strip() for text in given.split(",") if text.strip()] or [part.name for part in PARTS]
    for text in wanted:
        if text not in names:
            raise typer.BadParameter(
                f"no part {text!r}; there are 1 to {len(PARTS)}: {', '.join(p.name for p in PARTS)}"
            )
    return [names[text] for text in wanted]


if __name__ == "__main__":
    typer.run(main)
