"""Detectors, the rules that call a key a sink: `base` has the base class, every other file a rule or two."""
