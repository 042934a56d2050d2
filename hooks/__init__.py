"""Interventions on activations, as small frozen values."""
