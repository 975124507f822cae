"""Formats: decoding the bytes of a record into columns. Open `json.py` first."""

from streaming_jobs.formats.json import Json
from streaming_jobs.formats.raw import Raw, Text

__all__ = ["Json", "Raw", "Text"]
