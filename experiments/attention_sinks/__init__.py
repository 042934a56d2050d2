"""Figures 1, 3 to 10 and Table 1 of "Attention Sinks in Diffusion Language Models" (2510.15731), and beyond."""
