"""The bytes of binary records, read in two ways that give the same values: many records side by side, or one.

    Lanes     a position per record of a block; each step moves all of them, in numpy
    Cursor    a position in one record; it raises Refused, with the words of the refusal

A lane that meets a fault is marked as `bad` and read no further than its own end. The record is then read again by a
cursor, which decides: it may also accept what lanes are not made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streaming_jobs.declare.format import Refused
from streaming_jobs.formats.utf8 import utf8_refusal

MAX_DEPTH = 100
"""Records within each other; a deeper record is refused."""
LARGEST_BLOCK = 1 << 30
"""Bytes that lanes read at once: Arrow's offsets have 31 bits."""
MALFORMED = "malformed"
_PAD = 16
_HIGH = np.uint64(0x8080808080808080)
_ONE, _LOW_BITS = np.uint64(1), np.uint64(0x7F)
_COMPACTED = tuple(
    (np.uint64(left), np.uint64(shift), np.uint64(right))
    for left, shift, right in (
        (0x7F007F007F007F00, 1, 0x007F007F007F007F),
        (0x3FFF00003FFF0000, 2, 0x00003FFF00003FFF),
        (0x0FFFFFFF00000000, 4, 0x000000000FFFFFFF),
    )
)


@dataclass(frozen=True)
class _Joined:
    """The bytes of a block, and `_PAD` zeros: what is read past the last record is there."""

    content: bytes

    @cached_property
    def octets(self) -> NDArray[Any]:
        return np.frombuffer(self.content, np.uint8)

    @cached_property
    def buffer(self) -> pa.Buffer:
        return pa.py_buffer(self.content)

    def numbers(self, kind: str) -> NDArray[Any]:
        """A number that begins at each byte, little-endian, most of them at odd addresses."""
        width = np.dtype(kind).itemsize
        return np.ndarray((len(self.content) - width + 1,), kind, self.content, strides=(1,))

    @cached_property
    def words(self) -> NDArray[Any]:
        return self.numbers("<u8")


class Lanes:
    """Positions `at` in a block of bytes, before `end`; lanes are in the order of their bytes."""

    def __init__(self, joined: _Joined, at: np.ndarray, end: np.ndarray, bad: np.ndarray) -> None:
        self._joined = joined
        self.at = at
        self.end = end
        self.bad = bad
        self.depth = 0
        """Of records within each other."""

    @classmethod
    def of(cls, values: Sequence[bytes], lengths: np.ndarray, skip: int) -> Lanes:
        """A lane per value after its first `skip` bytes; `lengths` are the values', `LARGEST_BLOCK` in all at most."""
        end = np.cumsum(lengths)
        joined = _Joined(b"".join([*values, bytes(_PAD)]))
        return cls(joined, end - lengths + skip, end, np.zeros(len(values), np.bool_))

    def __len__(self) -> int:
        return len(self.at)

    def some(self, rows: np.ndarray) -> Lanes:
        """The lanes of these rows, to be moved alone, and then put back by `moved`."""
        lanes = Lanes(self._joined, self.at[rows], self.end[rows], self.bad[rows])
        lanes.depth = self.depth
        return lanes

    def moved(self, rows: np.ndarray, lanes: Lanes) -> None:
        """Take over the positions and faults of `some` of the lanes."""
        self.at[rows] = lanes.at
        self.bad[rows] = lanes.bad

    def fail(self, rows: np.ndarray) -> None:
        """Mark these lanes; they are at their end."""
        self.bad[rows] = True
        self.at[rows] = self.end[rows]

    def begin_with(self, mark: bytes) -> NDArray[Any]:
        """True for lanes whose next bytes, seven at most, are these; without moving."""
        if len(mark) == 1:  # of many lanes, numpy gathers bytes five times as fast as words at odd addresses
            one: NDArray[Any] = (self.octets() == mark[0]) & (self.at < self.end)
            return one
        mask, wanted = (np.uint64(int.from_bytes(each, "little")) for each in (b"\xff" * len(mark), mark))
        same: NDArray[Any] = (self._joined.words[self.at] & mask == wanted) & (self.at + len(mark) <= self.end)
        return same

    def within(self, begin: np.ndarray, end: np.ndarray) -> Lanes:
        """Lanes of the same records, of parts of them."""
        lanes = Lanes(self._joined, begin.copy(), end, self.bad.copy())
        lanes.depth = self.depth
        return lanes

    def octets(self) -> NDArray[Any]:
        """The next byte of each lane, without moving."""
        octets: NDArray[Any] = self._joined.octets[self.at]
        return octets

    def varints(self) -> NDArray[Any]:
        """The next number of seven bits a byte, the lowest ones first, as 64 bits without a sign."""
        octets = self.octets()
        if (octets < 0x80).all():
            self.skip(1)
            return octets.astype(np.uint64)
        words: NDArray[Any] = self._joined.words[self.at]
        stops = ~words & _HIGH
        lowest = stops & (~stops + _ONE)  # 0 where eight bytes hold no end
        kept = words & (lowest - _ONE) & ~_HIGH
        for left, shift, right in _COMPACTED:
            kept = ((kept & left) >> shift) | (kept & right)
        lengths = (np.bitwise_count(lowest - _ONE).astype(np.int64) + 1) // 8
        if not stops.all():
            rows = np.flatnonzero(stops == 0)
            ninth, tenth = (self._joined.octets[self.at[rows] + place].astype(np.uint64) for place in (8, 9))
            more = ninth >= 0x80
            kept[rows] |= ((ninth & _LOW_BITS) << np.uint64(56)) | np.where(more, tenth << np.uint64(63), 0)
            lengths[rows] = 9 + more
            self.bad[rows[more & (tenth > 1)]] = True
        self.skip(lengths)
        return kept

    def zigzags(self) -> NDArray[Any]:
        """The next number of Avro: a varint whose lowest bit is the sign."""
        return signed(self.varints())

    def skip(self, lengths: np.ndarray | int) -> None:
        """Move on; a lane without that many bytes is bad."""
        self.at = self.at + lengths
        if (over := self.at > self.end).any():
            self.fail(over)

    def span(self, lengths: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Begin and end of the next bytes; empty for a lane that has no such number of bytes."""
        begin = self.at
        wrong = (lengths < 0) | (lengths > self.end - begin)  # before the sum, which could pass 64 bits
        if wrong.any():
            self.bad |= wrong
            lengths = np.where(wrong, 0, lengths)
        self.at = begin + lengths
        return begin, self.at

    def fixed(self, kind: str) -> NDArray[Any]:
        """The next number of a fixed width, such as `<f8`."""
        numbers: NDArray[Any] = self._joined.numbers(kind)[self.at]
        self.skip(np.dtype(kind).itemsize)
        return numbers

    def numbers_at(self, places: np.ndarray, kind: str) -> NDArray[Any]:
        """Numbers of a fixed width at places that `span` has returned."""
        numbers: NDArray[Any] = self._joined.numbers(kind)[places]
        return numbers

    def slices(self, begin: np.ndarray, end: np.ndarray, kind: pa.DataType) -> pa.Array:
        """The bytes of spans, in the order of the lanes, as binary or text, which is not checked."""
        if not len(begin):
            return pa.array([], kind)
        borders = np.empty(2 * len(begin), np.int32)
        borders[0::2], borders[1::2] = begin, end
        buffers = [None, pa.py_buffer(borders), self._joined.buffer]
        with_gaps = pa.Array.from_buffers(kind, len(borders) - 1, buffers)
        return with_gaps.take(pa.array(np.arange(0, len(borders), 2)))

    def texts(self, begin: np.ndarray, end: np.ndarray) -> pa.Array:
        """The texts of spans; a lane whose text is not UTF-8 is bad, and its text empty."""
        texts = self.slices(begin, end, pa.string())
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            wrong = np.array([utf8_refusal(value) is not None for value in texts.cast(pa.binary()).to_pylist()])
            self.fail(wrong)
            return self.slices(begin, np.where(wrong, begin, end), pa.string())
        return texts

    def before(self, end: np.ndarray, width: int) -> NDArray[Any]:
        """The `width` bytes that end at each place, a row each, whoever they belong to."""
        octets: NDArray[Any] = self._joined.octets[np.maximum(end[:, None] + np.arange(-width, 0), 0)]
        return octets


def listed(pieces: Sequence[pa.Array], owners: Sequence[np.ndarray], lanes: int, kind: pa.DataType) -> pa.Array:
    """Lists of elements that were read in pieces: `owners` has the lane of each, in whose order they are."""
    owner = np.concatenate([*owners, np.zeros(0, np.int64)])
    values = pa.concat_arrays(pieces) if pieces else pa.array([], kind.value_type)
    if len(pieces) > 1:
        values = values.take(pa.array(np.argsort(owner, kind="stable")))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=lanes))])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def spread(piece: pa.Array, rows: np.ndarray, lanes: int, absent: pa.Array | None = None) -> pa.Array:
    """A column of which only these lanes have a value; the others are null, or have the one value of `absent`."""
    places = np.full(lanes, -1 if absent is None else len(piece))
    places[rows] = np.arange(len(rows))
    if absent is not None:
        return pa.concat_arrays([piece, absent]).take(pa.array(places))
    return piece.take(pa.array(places, mask=places < 0))


def signed(numbers: np.ndarray) -> NDArray[Any]:
    """Numbers of 64 bits whose lowest bit is the sign, as numbers with a sign."""
    made: NDArray[Any] = ((numbers >> _ONE) ^ (~(numbers & _ONE) + _ONE)).view(np.int64)
    return made


def signed_number(number: int) -> int:
    """As `signed`, of one number."""
    return (number >> 1) ^ -(number & 1)


class Cursor:
    """A position in one record. Its methods raise Refused for bytes that are not there."""

    def __init__(self, content: bytes, at: int = 0) -> None:
        self.content = content
        self.at = at
        self.depth = 0

    @property
    def left(self) -> int:
        """Bytes to the end of the record."""
        return len(self.content) - self.at

    def varint(self) -> int:
        number = 0
        for place, octet in enumerate(self.content[self.at : self.at + 10]):
            number |= (octet & 0x7F) << (7 * place)
            if octet < 0x80:
                self.at += place + 1
                if number >> 64:
                    break
                return number
        else:
            if self.left < 10:
                raise Refused(MALFORMED, f"the record ends within a number, at byte {len(self.content)}")
        raise Refused(MALFORMED, f"a number at byte {self.at} is longer than 64 bits")

    def zigzag(self) -> int:
        return signed_number(self.varint())

    def take(self, length: int) -> bytes:
        if not 0 <= length <= self.left:
            raise Refused(MALFORMED, f"expected {length} bytes at byte {self.at}, found {self.left}")
        self.at += length
        return self.content[self.at - length : self.at]

    def text(self, length: int) -> str:
        begin = self.at
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            octet = self.content[begin + error.start]
            raise Refused("invalid_utf8", f"byte 0x{octet:02x} at byte {begin + error.start} is not UTF-8") from None

    def deeper(self) -> None:
        """Enter a record within the record; `depth` is reduced after it."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused(MALFORMED, f"records are nested deeper than {MAX_DEPTH}")
