"""Analyses of sinks: one file per question."""
