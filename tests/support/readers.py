"""Readers of JSON with a fault each, for the test of the program that looks for such faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql.types import StructType

from streaming_jobs.declare.format import Block
from streaming_jobs.formats import Json


def ending(schema: StructType, values: Sequence[bytes | None]) -> Block:
    """End the process on a null, as a library that crashes would."""
    if None in values:
        os.kill(os.getpid(), signal.SIGKILL)
    return Json(schema).reader().read(values)


def failing(schema: StructType, values: Sequence[bytes | None]) -> Block:
    """Raise on a null."""
    if None in values:
        raise KeyError("a null")
    return Json(schema).reader().read(values)


def lenient(schema: StructType, values: Sequence[bytes | None]) -> Block:
    """Refuse no null."""
    block = Json(schema).reader().read(values)
    return replace(block, refused={i: refusal for i, refusal in block.refused.items() if values[i] is not None})
