"""Likelihoods of given answers."""
