"""The package as a user installs and imports it."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import dlm_lens
from dlm_lens import public_names

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_importing_loads_neither_torch_nor_a_host() -> None:
    heavy = ("torch", "transformers", "nnsight", "transformer_lens", "numpy", "matplotlib", "pandas")
    loaded = python(f"import sys, dlm_lens; print([m for m in {heavy} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_importing_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import dlm_lens; print(time.perf_counter() - t)"
    best = min(float(python(code)) for _ in range(5))
    assert best < 0.05


@pytest.mark.long
def test_without_a_host_the_core_works() -> None:
    """The rooms up to hooks import neither nnsight nor TransformerLens."""
    code = (
        "import sys\n"
        "sys.modules['nnsight'] = sys.modules['transformer_lens'] = None\n"
        "import dlm_lens as dl\n"
        "from dlm_lens.testing import tiny\n"
        "run = dl.denoise(tiny('llada'), [[1, 2]], gen_length=8)\n"
        "print(dl.find_sinks(dl.received_over_steps(tiny('llada'), run), dl.TopK(1)))\n"
        "from dlm_lens.hooks import mask_positions\n"
    )
    assert python(code).startswith("Sinks(")


def test_every_public_name_resolves_and_none_is_a_module_too() -> None:
    assert {"load", "denoise", "find_sinks", "hooks", "viz"} <= set(dlm_lens.__all__)
    for name in dlm_lens.__all__:
        value = getattr(dlm_lens, name)
        assert value is not None
        if callable(value):
            with pytest.raises(ModuleNotFoundError):
                __import__(f"dlm_lens.{name}")


def test_the_first_page_is_short_and_the_rooms_names_are_found_from_it() -> None:
    rooms = {path.name for path in (ROOT / "dlm_lens").iterdir() if (path / "__init__.py").is_file()}
    assert len(set(dlm_lens.__all__) - rooms) <= 35
    # In a notebook the names of some rooms are found without the room.
    assert "eps_sweep" not in dlm_lens.__all__
    assert dlm_lens.eps_sweep is dlm_lens.sinks.eps_sweep
    assert dlm_lens.LogitLens is dlm_lens.probes.LogitLens
    with pytest.raises(AttributeError, match=r"dlm_lens has no 'eps_swep'"):
        _ = dlm_lens.eps_swep
    with pytest.raises(ImportError, match="eps_swep"):
        from dlm_lens import eps_swep  # noqa: F401
    for name, said in (
        ("mask_sinks", "has no 'mask_sinks'; it is dlm_lens.hooks.mask_sinks$"),
        ("explore", "has no 'explore'; it is dlm_lens.viz.explore$"),
        ("trajectoris", "has no 'trajectoris'; there is dlm_lens.trajectories, "),
        ("from_pretrained", "dlm_lens has no 'from_pretrained'; here it is dlm_lens.load"),
        ("qzqz", r"has no 'qzqz'; dir\(dlm_lens\) lists its names and packages$"),
    ):
        with pytest.raises(AttributeError, match=said):
            getattr(dlm_lens, name)


def test_a_room_says_where_a_name_is_or_which_names_are_like_it() -> None:
    for room, name, said in (
        (
            dlm_lens.probes,
            "activation_patch",
            "dlm_lens.probes has no 'activation_patch'; there is .*activation_patching",
        ),
        (dlm_lens.hooks, "find_sinks", "dlm_lens.hooks has no 'find_sinks'; it is dlm_lens.find_sinks$"),
        (
            dlm_lens.viz,
            "sink_position",
            "dlm_lens.viz has no 'sink_position'; there is dlm_lens.viz.sink_positions",
        ),
        (dlm_lens.sinks, "qzqz", r"has no 'qzqz'; dir\(dlm_lens.sinks\) lists its names and packages$"),
    ):
        with pytest.raises(AttributeError, match=said):
            getattr(room, name)


def test_a_word_for_what_has_another_name_leads_to_it() -> None:
    for name, place in public_names._KNOWN_AS.items():
        for room in (dlm_lens, dlm_lens.probes):
            if name in dir(room):
                continue  # of dlm_lens.training, for example
            with pytest.raises(AttributeError, match=f"has no '{name}'; here it is dlm_lens.{place}$"):
                room.__getattr__(name)
        found: Any = dlm_lens
        for part in place.split("."):
            found = getattr(found, part)
        assert callable(found)
    from dlm_lens.probes import clock  # a package has this name

    assert clock.__name__ == "dlm_lens.probes.clock"


def test_every_room_exports_what_it_lists() -> None:
    for room in ("attention", "adapters", "sampling", "sinks", "hooks", "viz", "testing"):
        module = getattr(dlm_lens, room)
        assert all(hasattr(module, name) for name in module.__all__)
        modules = {path.stem for path in Path(module.__file__).parent.iterdir() if path.suffix in ("", ".py")}
        assert not modules & set(module.__all__)


def test_hooks_are_the_top_level_folder() -> None:
    link = ROOT / "dlm_lens" / "hooks"
    assert link.is_symlink()
    assert os.readlink(link) == "../hooks"
    for path in (ROOT / "hooks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.level == 0, f"{path}: imports relatively"


@pytest.mark.long
def test_the_wheel_holds_hooks_types_and_checkpoints(tmp_path: Path) -> None:
    # In a copy: a build leaves files behind.
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 8_000_000  # of which the embedded models are 7 MB
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    for name in ("py.typed", "__init__.pyi", "hooks/__init__.py", "hooks/position_masking.py"):
        assert f"dlm_lens/{name}" in names
    for model in dlm_lens.adapters.embedded_models():
        assert f"dlm_lens/checkpoints/{model}/model.safetensors" in names
    code = "import dlm_lens, dlm_lens.hooks as h; print(dlm_lens.__file__, h.mask_positions(1))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert str(tmp_path / "installed") in done.stdout
    assert "mask_positions(1)" in done.stdout


def test_every_dependency_has_a_bound_and_a_tested_version() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    tested = {canonicalize_name(name): Version(version) for name, version in pins.items()}
    for requirement in map(Requirement, lines):
        if requirement.name == "dlm-lens" or requirement.name.startswith("types-"):
            continue
        lower = [bound for bound in requirement.specifier if bound.operator == ">="]
        assert lower, f"{requirement} has no lower bound"
        assert tested[canonicalize_name(requirement.name)] in requirement.specifier, (
            f"{requirement} is not what is tested"
        )


def test_the_lowest_versions_are_the_bounds_of_the_project(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["torch>=2.9", "a_b>=1.2,<3", "c>=0.5.1"]\n')
    assert checks.lowest(project) == ["a_b==1.2", "c==0.5.1"]
    project.write_text('[project]\ndependencies = ["a<3"]\n')
    with pytest.raises(AssertionError, match="no lower bound"):
        checks.lowest(project)


def test_the_citation_is_whole() -> None:
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= citation.keys()
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert citation["version"] == newest[1]
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= reference.keys()
        assert all({"family-names", "given-names"} <= author.keys() for author in reference["authors"])


def test_the_changelog_names_what_there_is() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("### Who used the repository before")[0]
    names = ("evaluation", "hooks", "probes", "recording", "sinks", "viz")
    rooms = [importlib.import_module(f"dlm_lens.{name}") for name in names]
    dotted = {name: name.split(".")[1:] for name in re.findall(r"`(dlm_lens(?:\.\w+)+)", text)}
    assert len(dotted) > 15
    for name, parts in dotted.items():
        place: Any = dlm_lens
        for part in parts:
            assert hasattr(place, part), name
            place = getattr(place, part)
    simple = {name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text) if not name.startswith("dlm_lens")}
    # A method of a bridge.
    assert {name for name in simple if not any(name in room.__all__ for room in rooms)} == {"denoise_with_cache"}


def test_the_version_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    assert dlm_lens.__version__ == version("dlm-lens")
