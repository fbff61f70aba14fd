"""A package, so that one browser serves all its tests and is gone before any other."""
