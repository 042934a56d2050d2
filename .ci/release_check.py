"""Build wheel and sdist from what is committed and install them in clean environments: `make release-check`.

For every Python of 3.11, 3.12 and 3.13 on this machine, with constraints.txt and without (then torch alone is
pinned, whose newest release brings gigabytes of CUDA packages): `pip check`, a denoised prompt, a sink, both hosts,
and mypy on a user's script, whose mistake it must find (PEP 561). On the first Python also with every dependency at
its lower bound. The last lines are a table. Arguments: `3.11 3.12` for these Pythons only, `pinned`, `newest` or
`lowest` for these versions only.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
KINDS = ("pinned", "newest", "lowest")
NEEDED = ("py.typed", "__init__.pyi", "hooks/__init__.py", "checkpoints/toy/config.json")
USE = """
import importlib.metadata, dlm_lens as dl
assert dl.__version__ == importlib.metadata.version("dlm-lens"), dl.__version__
model = dl.load("toy")
prompt = "leo has 26 stones . leo breaks 6 . leo loses 9 . he picks 12 stones . how many stones now ? :"
run = dl.denoise(model, prompt, gen_length=21, block_length=7, seed=0)
assert run.answers[0].startswith("26 - 6 = 20"), run.answers
assert len(dl.find_sinks(dl.received_over_steps(model, run), dl.AboveMean(eps=3.0)).table()) > 10
dl.DiffusionLM(model)
bridged = dl.bridge(model).denoise(prompt, gen_length=21, block_length=7, seed=0)
assert bridged.tokens.equal(run.tokens)
print(dl.__version__)
"""
TYPED = """
import dlm_lens as dl
from dlm_lens.hooks import at_layers, mask_sinks

model = dl.load("toy")
run = dl.denoise(model, "a prompt", gen_length=8)
texts: list[str] = run.texts
sinks = dl.find_sinks(dl.received_over_steps(model, run), dl.AboveMean(eps=3.0))
pair = dl.compare(model, "a prompt", hooks=[at_layers(mask_sinks(dl.AboveMean(3.0)), [1])], gen_length=8)
shares: list[float] = dl.logit_lens(model, run).table()["probability"].tolist()
recording = dl.record(model, "a prompt", [dl.ReceivedAttention()])
strongest: dl.Sinks = dl.find_sinks(recording, dl.TopK(2))
dl.TopK("two")
"""
MISTAKE = 'error: Argument 1 to "TopK" has incompatible type "str"; expected "int"'


def main() -> None:
    """Check what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", choices=[*PYTHONS, *KINDS], default=[])
    only = set(parser.parse_args().only)
    pythons = {
        name: path for name in PYTHONS if (path := _found(name)) and (name in only or not only & set(PYTHONS))
    }
    kinds = [kind for kind in KINDS if kind in only or not only & set(KINDS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = built(folder)
        sizes = [f"{path.name}: {path.stat().st_size / 2**20:.1f} MB" for path in (wheel, sdist)]
        print("\n".join(sizes), flush=True)
        first = next(iter(pythons), "")
        rows = [
            checked(folder, wheel, python, path, kind)
            for python, path in pythons.items()
            for kind in kinds
            if kind != "lowest" or python == first
        ]
    print("\n".join(["| Python | versions | dlm_lens | torch | transformers |", "|---|---|---|---|---|", *rows]))
    absent = [name for name in PYTHONS if _found(name) is None]
    print("not on this machine: Python " + ", ".join(absent) if absent else "all Pythons were here")


def built(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of the last commit; the wheel is built from the sdist."""
    source, out = folder / "source", folder / "dist"
    _run("git", "clone", "-q", str(ROOT), str(source))
    _run(sys.executable, "-m", "build", "--outdir", str(out), str(source))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in NEEDED if f"dlm_lens/{name}" not in names]
    assert not missing, f"the wheel lacks {missing}"
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    modules = {path.relative_to(source).as_posix() for path in (source / "dlm_lens").rglob("*.py")}
    assert modules <= names, f"the wheel lacks {sorted(modules - names)[:5]}"
    strays = {name.split("/")[0] for name in names} - {"dlm_lens"}
    assert all(name.endswith(".dist-info") for name in strays), f"the wheel installs {strays} too"
    assert not any(name.startswith(("tests/", "docs/", "experiments/")) for name in inside)
    return wheel, sdist


def checked(folder: Path, wheel: Path, python: str, path: str, kind: str) -> str:
    """A line of the table: a clean environment with the wheel, used as a user would."""
    home = folder / f"{python}-{kind}"
    _run(path, "-m", "venv", str(home))
    inside = str(home / "bin" / "python")
    pins = ROOT / "constraints.txt"
    if kind != "pinned":
        lines = [line for line in pins.read_text().splitlines() if line.startswith("torch==")]
        pins = folder / f"{kind}.txt"
        pins.write_text("\n".join(lines + (lowest(ROOT / "pyproject.toml") if kind == "lowest" else [])))
    _run(inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel), "-c", str(pins))
    _run(inside, "-m", "pip", "check", "--disable-pip-version-check")
    version = _run(inside, "-c", USE, cwd=folder).strip().splitlines()[-1]
    _run(str(home / "bin" / "dlm-lens"), "families", cwd=folder)
    if kind == "pinned":
        _check_types(inside, folder)
    show = "from importlib.metadata import version as v; print(v('torch'), v('transformers'))"
    torch, transformers = _run(inside, "-c", show).split()
    shutil.rmtree(home)
    return f"| {python} | {kind} | {version} | {torch} | {transformers} |"


def lowest(project: Path) -> list[str]:
    """Every dependency of a pyproject.toml at its lower bound, as pins; without torch, which has its own."""
    found = [Requirement(text) for text in tomllib.loads(project.read_text())["project"]["dependencies"]]
    bounds = {one.name: [each.version for each in one.specifier if each.operator == ">="] for one in found}
    unbounded = [name for name, versions in bounds.items() if len(versions) != 1]
    assert not unbounded, f"no lower bound: {unbounded}"
    return [f"{name}=={version}" for name, (version,) in bounds.items() if name != "torch"]


def _check_types(python: str, folder: Path) -> None:
    """The package's types reach a user's mypy: it finds the one mistake of `TYPED`, and no other."""
    _run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "mypy",
        "-c",
        str(ROOT / "constraints.txt"),
    )
    script = folder / "typed.py"
    script.write_text(TYPED)
    done = subprocess.run(
        [python, "-m", "mypy", "--strict", str(script)], capture_output=True, text=True, cwd=folder
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [MISTAKE in line for line in errors] == [True], done.stdout + done.stderr


def _found(name: str) -> str | None:
    """A Python that runs: pyenv has shims of versions that are not active."""
    candidates = [
        shutil.which(f"python{name}"),
        *map(str, Path.home().glob(f".pyenv/versions/{name}.*/bin/python")),
    ]
    for path in filter(None, candidates):
        if subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
            return path
    return None


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
