"""Formats: decoding the bytes of a record into columns. Open `json.py` first."""

from streaming_jobs.formats.json import REQUIRED_CONF, Json

__all__ = ["REQUIRED_CONF", "Json"]
