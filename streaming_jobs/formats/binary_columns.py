"""Columns of bytes, from which binary values are joined, and the refusals of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.declare.format import Refusal
from streaming_jobs.formats.utf8 import utf8_refusal


@dataclass
class Encoded:
    """The bytes of each row, empty for a refused one, and the refusals by row."""

    values: pa.Array
    refused: dict[int, Refusal] = field(default_factory=dict)


def zigzags(numbers: np.ndarray) -> pa.Array:
    """Numbers as Avro has them: the sign in the lowest bit, seven bits a byte."""
    return varints(((numbers << 1) ^ (numbers >> 63)).view(np.uint64))


def varints(numbers: np.ndarray) -> pa.Array:
    """Numbers as 64 bits without a sign, seven bits a byte, the lowest ones first."""
    octets = np.zeros((len(numbers), 10), np.uint8)
    lengths = np.ones(len(numbers), np.int64)
    rest = numbers.view(np.uint64)
    for place in range(10):
        octets[:, place] = rest & np.uint64(0x7F)
        rest = rest >> np.uint64(7)
        if not (more := rest > 0).any():
            break
        octets[:, place] |= np.where(more, 0x80, 0).astype(np.uint8)
        lengths += more
    return slices(octets[np.arange(10) < lengths[:, None]].tobytes(), lengths)


def slices(content: bytes, lengths: np.ndarray) -> pa.Array:
    """The content in pieces of these lengths, as binary."""
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    buffers = [None, pa.py_buffer(borders.tobytes()), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def with_length(values: pa.Array, number: Callable[[np.ndarray], pa.Array]) -> pa.Array:
    """Bytes after their number, as `zigzags` or `varints` write it."""
    return joined(number(np.asarray(pc.binary_length(values)).astype(np.int64)), values)


def joined(*parts: pa.Array) -> pa.Array:
    """The bytes of each row, one after the other; null if one of them is."""
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def refusals(rows: Iterable[int], reason: str, detail: str) -> dict[int, Refusal]:
    return dict.fromkeys(map(int, rows), Refusal(reason, detail))


def runs(elements: pa.Array, lengths: np.ndarray) -> pa.Array:
    """The bytes of so many elements for each row."""
    ends = np.zeros(len(lengths) + 1, np.int32)
    content = pa.py_buffer(b"")
    if len(elements):
        _, offsets, content = elements.buffers()
        borders = np.concatenate([[0], np.cumsum(lengths)])
        ends = np.frombuffer(offsets, np.int32)[elements.offset :][borders]
    buffers = [None, pa.py_buffer(ends.tobytes()), content]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def not_utf8(array: pa.Array, place: str) -> dict[int, Refusal]:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        rows = [row for row, value in enumerate(array.cast(pa.binary()).to_pylist()) if utf8_refusal(value)]
        return refusals(rows, "not_utf8", f"the text of {place} is not UTF-8")
    return {}
