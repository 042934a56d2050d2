"""Links from names in code to the reference, and from annotations to other projects' pages."""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

from dlm_lens_site.api_pages import documented, public_names, rooms

_NAME = re.compile(r"^(?:dlm_lens\.|dl\.)?((?:\w+\.)?)(\w+)((?:\.\w+)*)(?:\(.*\))?$", re.DOTALL)
_PIECE = re.compile(r"[\[\]'\"~ /]|^[A-Z]$|^\d")
"""Pieces of an annotation that Sphinx could not take apart: a type variable, a part of a shape, a bracket."""

DEPENDENCIES = (
    "torch",
    "anywidget",
    "numpy",
    "transformers",
    "transformer_lens",
    "nnsight",
    "xarray",
    "rich",
    "pandas",
    "jaxtyping",
)
"""Their names that are in no inventory are text without a link."""

SHORT = {
    "Tensor": "torch.Tensor",
    "Module": "torch.nn.Module",
    "nn.Module": "torch.nn.Module",
    "Figure": "matplotlib.figure.Figure",
    "DataFrame": "pandas.DataFrame",
    "NoRunError": "ValueError",
    "Cache": "transformers.Cache",
    "pd.DataFrame": "pandas.DataFrame",
    "t.Any": "typing.Any",
    "Path": "pathlib.Path",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.utils.data.dataset.IterableDataset": "torch.utils.data.IterableDataset",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}
"""Names as annotations write them -> names in the inventories."""


def full_name(code: str) -> str | None:
    """The reference's name for a piece of code that is a public name: `dl.find_sinks(x)`, `probes.replay`, `TopK`.

    A bare name is one only if it has a capital letter or an underscore: `load` and `record` are also words.
    """
    match = _NAME.match(code.strip())
    if match is None or match[3]:
        return None
    room, name = match[1].rstrip("."), match[2]
    candidates = documented().get(name, [])
    if room:
        return next((full for full in candidates if full == f"dlm_lens.{room}.{name}"), None)
    qualified = code.strip().startswith(("dl.", "dlm_lens."))
    if qualified or (len(candidates) == 1 and (not name.islower() or "_" in name)):
        return candidates[0] if candidates else None
    return None


def link_public_names(app: Sphinx, doctree: nodes.document) -> None:
    """Let code in running text that is a public name lead to the reference."""
    for node in list(doctree.findall(nodes.literal)):
        inside = isinstance(node.parent, (nodes.reference, addnodes.pending_xref, nodes.title))
        if inside or any(isinstance(up, addnodes.desc_signature) for up in _ancestors(node)):
            continue
        full = full_name(node.astext())
        if full is None:
            continue
        link = addnodes.pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=full,
            refexplicit=True,
            refwarn=False,
            refdoc=app.env.docname,
        )
        node.replace_self(link)
        link += node


def _ancestors(node: nodes.Node) -> list[nodes.Node]:
    found = []
    while (node := node.parent) is not None:
        found.append(node)
    return found


def resolve(app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Lead annotations to the public name of an object; what is internal to the package stays text.

    A name of the package that no room exports is not a broken link: it is shown without one.
    """
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    full = public_names().get(target) or full_name(target) or _only(target.rsplit(".", 1)[-1])
    if full is not None and full in env.domains["py"].objects:
        entry = env.domains["py"].objects[full]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, full)
    if target in SHORT:
        from sphinx.ext.intersphinx import missing_reference

        node["reftarget"] = SHORT[target]
        node["reftype"] = "obj"
        return missing_reference(app, env, node, content) or content
    return content if _without_page(target) else None


def _only(name: str) -> str | None:
    candidates = documented().get(name, [])
    return candidates[0] if len(candidates) == 1 else None


def _without_page(target: str) -> bool:
    """Whether no page has this name: internal, of a dependency, or a piece of an annotation."""
    return target.split(".")[0] in {"dlm_lens", *rooms(), *DEPENDENCIES} or bool(_PIECE.search(target))
