"""Views of one step in a browser or a terminal."""
