"""Measurements; each is run by hand, none is part of the package."""
