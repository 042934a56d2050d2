"""Reducers: statistics that a recording keeps, one file per kind."""
