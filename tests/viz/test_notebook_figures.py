"""Figures in a notebook: shown where they are a cell's value, once, with and without `%matplotlib inline`."""

import base64
import io
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.style
import numpy as np
import pytest
import torch
from matplotlib import image as plt_image
from matplotlib.figure import Figure

import dlm_lens as dl
from dlm_lens.probes import proposed_commitment
from dlm_lens.sinks import Received
from dlm_lens.testing import tiny
from dlm_lens.viz import incoming_attention
from dlm_lens.viz.figures.notebook_figure import COLOURS

CELL = """
import torch
from dlm_lens.sinks import Received
from dlm_lens.viz import incoming_attention
received = Received(torch.rand(3, 1, 1, 1, 5), torch.ones(3, 1, 1, 1, 5), torch.full((3, 1), 5), layers=(0,))
"""
VALUE = "incoming_attention(received, layer=0, head=0)"
SIGNATURE = b"\\x89PNG".decode("unicode_escape").encode("latin-1")

SHELL = f"""
import os
import sys
import torch
from dlm_lens.sinks import Received
from dlm_lens.viz import incoming_attention
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
class Shell(InteractiveShell):
    def enable_gui(self, gui=None):
        pass
# What a shell imports is imported once; each is a process of its own.
if os.fork() == 0:
    magic = ""
else:
    if os.wait()[1]:
        sys.exit("without the magic")
    magic = "inline"
shell = Shell.instance()
setup, value = {CELL!r}, {VALUE!r}
assert shell.run_cell(setup).success
if magic:
    shell.run_line_magic("matplotlib", magic)
elif "matplotlib.pyplot" in sys.modules:
    print("pyplot")
with capture_output() as captured:
    # A kernel publishes a cell's value as `display` does.
    assert shell.run_cell(f"from IPython.display import display\\ndisplay({{value}})").success
    # What the inline backend does at the end of a cell.
    if magic:
        from matplotlib_inline.backend_inline import flush_figures
        flush_figures()
shown = [output.data for output in captured.outputs]
kinds = [sorted(data) for data in shown]
print(f"{{magic}}:", len(shown), kinds, [data.get("image/png") is not None for data in shown])
"""


def figure():
    received = Received(torch.rand(3, 1, 1, 1, 5), torch.ones(3, 1, 1, 1, 5), torch.full((3, 1), 5), layers=(0,))
    return incoming_attention(received, layer=0, head=0)


def test_a_figure_is_its_png():
    data = figure()._repr_png_()
    assert data.startswith(SIGNATURE)
    assert len(data) > 5000


@pytest.fixture(scope="module")
def ipython():
    return pytest.importorskip("IPython", reason="IPython is not installed; pip install -e '.[dev]'")


@pytest.mark.long
def test_a_shell_shows_a_figure_once(ipython):
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    data, _ = shell.display_formatter.format(figure())
    shown = data["image/png"]
    assert (shown if isinstance(shown, bytes) else base64.b64decode(shown)).startswith(SIGNATURE)
    assert set(data) == {"image/png", "text/plain"}
    with capture_output() as captured:
        shell.run_cell(CELL)
        shell.run_cell(f"from IPython.display import display\n{VALUE}\ndisplay({VALUE})")
    pictures = [output for output in captured.outputs if "image/png" in output.data]
    assert len(pictures) == 1


@pytest.mark.long
def test_a_fresh_shell_with_and_without_the_magic(ipython):
    made = subprocess.run([sys.executable, "-c", SHELL], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    assert [line for line in made.stdout.splitlines() if "image/png" in line] == [
        f"{magic}: 1 [['image/png', 'text/plain']] [True]" for magic in ("", "inline")
    ]
    assert "pyplot" not in made.stdout


def pixels(drawn: Figure) -> np.ndarray:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=60)
    return plt_image.imread(io.BytesIO(buffer.getvalue()))


def test_a_style_of_matplotlib_does_not_change_the_colours():
    """Black lines were black on a dark page, and grids were drawn over maps."""
    prompts, reducers = [[5, 6, 7, 8], [8, 9]], [dl.ReceivedAttention(), dl.RegionMass(), dl.ValueNorm()]
    recording = dl.record(tiny("llada"), prompts, reducers, steps=4, gen_length=8)
    norms = dl.value_norms(recording, dl.find_sinks(recording, dl.AboveMean(0.3)))
    draws = (
        lambda: dl.viz.sink_strength(recording),
        lambda: dl.viz.region_mass(recording, queries=("all", "masked")),
        lambda: dl.viz.incoming_attention(recording, layer=0, head=0),
        lambda: dl.viz.sink_positions(recording, layer=0, head=0),
        lambda: dl.viz.sinks_over_eps(recording),
        lambda: dl.viz.value_norm_scatter(norms),
        lambda: dl.viz.commitment_map(proposed_commitment(recording)),
    )
    fonts = {name: value for name, value in matplotlib.rcParamsDefault.items() if name.startswith("font.")}
    styles = {}
    for style in ("dark_background", "ggplot"):
        named = matplotlib.style.library[style].items()
        styles[style] = {name: value for name, value in named if name in COLOURS}
        assert len(styles[style]) > 5
    for draw in draws:
        wanted = pixels(draw())
        for style, colours in styles.items():
            with matplotlib.rc_context(fonts | colours):
                before = dict(matplotlib.rcParams)
                np.testing.assert_array_equal(pixels(draw()), wanted, err_msg=style)
                assert dict(matplotlib.rcParams) == before  # the user's style stays


def test_every_figure_has_its_own_colours():
    """A function that makes figures and is not decorated would follow a dark style."""
    folder = Path(dl.viz.__file__).parent / "figures"
    found = [text for file in folder.glob("*.py") for text in file.read_text().split("\n\n\n")]
    public = [text for text in found if "NotebookFigure(figsize" in text.replace("\n        ", "")]
    assert len(public) >= 21
    for text in public:
        assert "@own_colours()\ndef " in text, text[:200]
