"""The registry of pictures: a file of `viz/figures` or `viz/views` declares them with `@plot`.

Declarations are read from the source of the files, so that `dlm-lens plot` can list pictures and check options
before a model library is imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dlm_lens.arguments import near_name
from dlm_lens.declarations import Declaration, by_name, declarations
from dlm_lens.files.atomic_writes import write_figure
from dlm_lens.files.paths import check_file
from dlm_lens.viz.plot_options import PLOT_OPTIONS

if TYPE_CHECKING:
    from dlm_lens.viz.plot_options import PlotOptions

FOLDERS = ("figures", "views")
"""Folders of `dlm_lens.viz` whose files declare pictures."""

FORMATS = (".png", ".pdf", ".svg")
"""What a matplotlib figure is written as."""

SHARP = 300
"""Dots per inch of what is an image in a PDF or SVG file (`draw_cells`)."""

Draw = TypeVar("Draw", bound="Callable[[PlotOptions], Any]")


@dataclass(frozen=True)
class Plot:
    """One picture of `dlm-lens plot`, as `@plot` declares it.

    Args:
        name: on the command line; with _ for -, the name of its function in `dlm_lens.viz`.
        about: what it shows.
        options: the options that it takes (`PLOT_OPTIONS`).
        needs: the statistic that must be recorded; empty for none.
        several: whether it takes several recordings.
        formats: suffixes of the files that it can be written to.
        module: the module that declares it.
        function: the function there that draws it.

    Raises:
        ValueError: an option that does not exist.
    """

    name: str
    about: str
    options: tuple[str, ...] = ()
    needs: str = ""
    several: bool = False
    formats: tuple[str, ...] = FORMATS
    module: str = ""
    function: str = ""

    def __post_init__(self) -> None:
        if unknown := set(self.options) - set(PLOT_OPTIONS):
            raise ValueError(
                f"{self.name} takes {', '.join(sorted(unknown))}; the options are {', '.join(PLOT_OPTIONS)}"
            )

    def draw(self, options: "PlotOptions") -> Any:
        """The matplotlib figure or the `View`."""
        return getattr(import_module(self.module), self.function)(options)


def plot(
    name: str,
    about: str,
    *,
    options: tuple[str, ...] = (),
    needs: str = "",
    several: bool = False,
    formats: tuple[str, ...] = FORMATS,
) -> Callable[[Draw], Draw]:
    """Declare a picture of `dlm-lens plot`; the decorated function draws it of `PlotOptions`.

    The arguments are those of `Plot`. They must be literals, since they are read from the source.

    Raises:
        ValueError: an option that does not exist.
    """
    Plot(name, about, options, needs, several, formats)
    return lambda draw: draw


@cache
def plots() -> Mapping[str, Plot]:
    """Every picture by its name, in alphabetical order.

    Raises:
        ValueError: two files declare the same name.
    """
    room = Path(__file__).parent
    found = [one for folder in FOLDERS for one in declarations(room / folder, f"dlm_lens.viz.{folder}")]
    return by_name((_plot(one) for one in found if one.callee == "plot" and one.function), "pictures")


def _plot(declared: Declaration) -> Plot:
    (name, about), settings = declared.arguments()
    return Plot(name, about, **settings, module=declared.module, function=declared.function)


def find_plot(name: str) -> Plot:
    """The picture of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in plots():
        hint = near_name(name, plots(), {})
        raise ValueError(f"there is no picture {name!r}{hint}; there are {', '.join(plots())}")
    return plots()[name]


def check_plot(name: str, options: frozenset[str], recordings: int, out: Path) -> None:
    """Raise where a picture takes no such option, or cannot be written to such a file.

    Args:
        name: of the picture.
        options: the options that the user gave.
        recordings: how many.
        out: the file.

    Raises:
        ValueError: an option that the picture does not take, too many recordings, or another format.
        FileNotFoundError: the file's directory does not exist.
    """
    found = find_plot(name)
    if foreign := sorted(options - set(found.options)):
        flags, taken = (" ".join(f"--{option}" for option in chosen) for chosen in (foreign, found.options))
        raise ValueError(f"{name} takes no {flags}; it takes {taken or 'no options'}")
    if recordings > 1 and not found.several:
        raise ValueError(f"{name} is of one recording, not of {recordings}")
    if out.suffix.lower() not in found.formats:
        raise ValueError(
            f"{out} ends in {out.suffix or 'nothing'}; {name} is written as {', '.join(found.formats)}"
        )
    check_file(out)


def write_plot(name: str, options: "PlotOptions", out: Path) -> Path:
    """Draw a picture and write it.

    Args:
        name: of the picture.
        options: what of.
        out: the file; its suffix chooses the format.

    Raises:
        ValueError: a statistic that was not recorded, or what the picture raises.
        DiskFullError: there is no space for the file; what was there before is unchanged.
    """
    found = find_plot(name)
    for label, recording in options.recordings.items():
        if found.needs and (statistic := options.statistic(found.needs)) not in recording.specs:
            held = ", ".join(recording.specs) or "none"
            raise ValueError(f"{label} has no {statistic}, which {name} needs; it has {held}")
    made = found.draw(options)
    if hasattr(made, "savefig"):
        return write_figure(out, made) if out.suffix.lower() == ".png" else write_figure(out, made, dpi=SHARP)
    written: Path = made.save(out)
    return written
