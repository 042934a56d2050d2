"""Figures 1 and 3 and Tables 1 to 5 of "One Token Is Enough" (2601.19657), in miniature and with its settings."""
