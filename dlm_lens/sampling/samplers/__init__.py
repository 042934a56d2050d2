"""Samplers: one file per algorithm."""
