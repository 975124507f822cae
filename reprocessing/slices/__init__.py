"""Slices: a range of an output table, such as a day, rebuilt by a batch read while its stream goes on."""
