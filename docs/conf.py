"""The site: `make docs`. Needs the extra `docs`; uses no network, executes no notebook."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from dlm_lens_site.inventories import inventories  # noqa: E402  # after the path

import dlm_lens  # noqa: E402

project = "dlm_lens"
author = "The dlm_lens authors"
copyright = "The dlm_lens authors, Apache-2.0"
version = release = dlm_lens.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "dlm_lens_site",
]
# The checks of docs/tasks lie in tests/tasks: whoever solves a task has the site alone.
exclude_patterns = ["_build", "_ext", "_site", "tasks/*.py", "**.ipynb_checkpoints"]

# Markdown as GitHub reads it.
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
nb_execution_mode = "off"  # tests/test_docs.py and the notebooks' tests execute them
nb_merge_streams = True

smartquotes = False
default_role = "code"
nitpicky = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries = False

# Inventories are part of this repository, so that a build needs no network: see _ext/dlm_lens_site/inventories.py.
intersphinx_mapping = inventories()
intersphinx_disabled_reftypes = ["std:*"]

html_theme = "furo"
html_title = "dlm_lens"
html_static_path = ["_static", "_pages/search"]
html_css_files = ["site.css"]
html_js_files: list[str] = []
# What a block printed is not to be pasted.
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"
html_show_sphinx = False
html_copy_source = False
html_extra_path = ["llms.txt"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ee", "color-brand-content": "#7fb2ee"},
}
copybutton_prompt_text = r"^\$ "
copybutton_prompt_is_regexp = True
linkcheck_timeout = 10
