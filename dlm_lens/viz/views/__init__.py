"""Views of a run in a browser (circuitsvis) or a terminal."""
