"""Figures: one function per picture; each returns a matplotlib `Figure` and touches no global state.

Save with `figure.savefig(path, bbox_inches="tight")`.
"""

from dlm_lens.viz.emerging import emerging_lines
from dlm_lens.viz.incoming import incoming_attention
from dlm_lens.viz.positions import sink_positions

__all__ = ["emerging_lines", "incoming_attention", "sink_positions"]
