"""The steps that read Avro: each one type of a writer's schema, of many records (`lanes`) or of one (`one`).

`avro_resolution.py` chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from streaming_jobs.declare.format import Refused
from streaming_jobs.formats.wire import MALFORMED, MAX_DEPTH, Cursor, Lanes, listed

WRONG_TYPE, OUT_OF_RANGE = "wrong_type", "out_of_range"
_WIDE = 64
"""Lanes, and elements of each, from which on arrays are read side by side."""
_MOST_EMPTY = 1_000
"""Elements of an array that have no bytes."""
_INT = (-(1 << 31), (1 << 31) - 1)


class Step(Protocol):
    """Reads one type of the writer. `type` is that of the column; None: the bytes are skipped."""

    type: pa.DataType | None

    def lanes(self, lanes: Lanes) -> pa.Array:
        """The column; what it has for a bad lane means nothing."""

    def one(self, cursor: Cursor) -> Any:
        """The value, as Arrow takes it for this type; raises Refused."""


@dataclass
class Numbers:
    """An int or a long, multiplied and divided; outside of the bounds it is refused."""

    kind: str
    type: pa.DataType | None
    first: int
    last: int
    factor: int = 1
    divisor: int = 1

    def lanes(self, lanes: Lanes) -> pa.Array:
        numbers = lanes.zigzags()
        first, last = -(-self.first * self.divisor // self.factor), self.last * self.divisor // self.factor
        if self.kind == "int":
            first, last = max(first, _INT[0]), min(last, _INT[1])
        lowest, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        if first > lowest or last < highest:
            outside = (numbers < max(first, lowest)) | (numbers > min(last, highest))
            if outside.any():
                lanes.bad |= outside
                numbers = np.where(outside, 0, numbers)
        if self.type is None:
            return None
        if self.factor > 1 or self.divisor > 1:
            numbers = numbers * self.factor // self.divisor
        if pa.types.is_date32(self.type):
            return pa.array(numbers.astype(np.int32)).view(self.type)
        if pa.types.is_timestamp(self.type):
            return pa.array(numbers).view(self.type)
        return pa.array(numbers.astype(self.type.to_pandas_dtype()))

    def one(self, cursor: Cursor) -> Any:
        read = cursor.zigzag()
        number = read * self.factor // self.divisor
        if (self.kind == "int" and not _INT[0] <= read <= _INT[1]) or not self.first <= number <= self.last:
            raise Refused(OUT_OF_RANGE, f"{read} is out of the range of {self._words}")
        if self.type is not None and pa.types.is_floating(self.type):
            return np.int64(number).astype(self.type.to_pandas_dtype())
        return number

    @property
    def _words(self) -> str:
        temporal = self.type is not None and pa.types.is_temporal(self.type)
        return "the years 1 to 9999" if temporal else self.kind


@dataclass
class Floats:
    """A float or a double, of `width` bytes."""

    width: int
    type: pa.DataType | None

    @property
    def kind(self) -> str:
        return f"<f{self.width}"

    def lanes(self, lanes: Lanes) -> pa.Array:
        return self._of(lanes.fixed(self.kind))

    def many(self, lanes: Lanes, counts: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        """So many numbers of each lane, which lie side by side, and how many of each are there."""
        begin, end = lanes.span(counts * self.width)
        counts = (end - begin) // self.width
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._of(lanes.numbers_at(np.repeat(begin, counts) + within * self.width, self.kind)), counts

    def _of(self, numbers: np.ndarray) -> pa.Array:
        if self.type is None:
            return None
        with np.errstate(invalid="ignore"):  # of a NaN
            return pa.array(numbers.astype(self.type.to_pandas_dtype()))

    def one(self, cursor: Cursor) -> float:
        return float(np.frombuffer(cursor.take(self.width), self.kind)[0])


@dataclass
class Booleans:
    type: pa.DataType | None

    def lanes(self, lanes: Lanes) -> pa.Array:
        octets = lanes.octets()
        lanes.skip(1)
        lanes.bad |= octets > 1
        return None if self.type is None else pa.array(octets == 1)

    def one(self, cursor: Cursor) -> bool:
        (octet,) = cursor.take(1)
        if octet > 1:
            raise Refused(MALFORMED, f"byte {octet} is no boolean")
        return octet == 1


@dataclass
class Strings:
    """Bytes or a text; of `size` bytes, if it is fixed."""

    type: pa.DataType | None
    size: int | None = None

    def lanes(self, lanes: Lanes) -> pa.Array:
        begin, end = lanes.span(lanes.zigzags() if self.size is None else self.size)
        if self.type is None:
            return None
        return lanes.texts(begin, end) if self.type == pa.string() else lanes.slices(begin, end, self.type)

    def one(self, cursor: Cursor) -> Any:
        length = cursor.zigzag() if self.size is None else self.size
        return cursor.text(length) if self.type == pa.string() else cursor.take(length)


@dataclass
class Decimals:
    """A decimal: a whole number, the highest byte first, in bytes or in `size` of them."""

    type: pa.DataType
    size: int | None = None

    def lanes(self, lanes: Lanes) -> pa.Array:
        begin, end = lanes.span(lanes.zigzags() if self.size is None else self.size)
        lengths = end - begin
        octets = lanes.before(end, 16)
        negative = octets[np.arange(len(lanes)), 16 - np.clip(lengths, 1, 16)] >= 0x80
        octets = np.where(np.arange(16) < 16 - lengths[:, None], np.where(negative, 255, 0)[:, None], octets)
        lanes.bad |= (lengths < 1) | (lengths > 16)
        octets[lanes.bad] = 0
        array = self._array(octets)
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:  # more digits
            whole = (int.from_bytes(row.astype(np.uint8).tobytes(), "big", signed=True) for row in octets)
            wrong = np.array([abs(number) >= 10**self.type.precision for number in whole])
            lanes.bad |= wrong
            octets[wrong] = 0
            array = self._array(octets)
        return array

    def _array(self, octets: np.ndarray) -> pa.Array:
        content = octets[:, ::-1].astype(np.uint8).tobytes()
        return pa.Array.from_buffers(self.type, len(octets), [None, pa.py_buffer(content)])

    def one(self, cursor: Cursor) -> Decimal:
        content = cursor.take(cursor.zigzag() if self.size is None else self.size)
        if not content:
            raise Refused(MALFORMED, "a decimal has no bytes")
        number = int.from_bytes(content, "big", signed=True)
        if abs(number) >= 10**self.type.precision:
            raise Refused(OUT_OF_RANGE, f"a decimal of {len(content)} bytes has more than {self.type.precision} digits")
        return Decimal(f"{number}E-{self.type.scale}")


@dataclass
class Symbols:
    """A symbol of an enum, as text; None for one that the reader's schema does not have."""

    type: pa.DataType | None
    symbols: Sequence[str | None]
    written: Sequence[str]

    def lanes(self, lanes: Lanes) -> pa.Array:
        index = lanes.zigzags()
        known = np.array([*(symbol is not None for symbol in self.symbols), False])
        index = np.where((index < 0) | (index >= len(self.symbols)), len(self.symbols), index)
        lanes.bad |= ~known[index]
        return None if self.type is None else pa.array([*self.symbols, None], pa.string()).take(pa.array(index))

    def one(self, cursor: Cursor) -> str:
        index = cursor.zigzag()
        if not 0 <= index < len(self.symbols):
            raise Refused(MALFORMED, f"symbol {index} of an enum of {len(self.symbols)}")
        symbol = self.symbols[index]
        if symbol is None:
            raise Refused(WRONG_TYPE, f"the symbol '{self.written[index]}' is not in the declared enum")
        return symbol


@dataclass
class Constants:
    """No bytes: a null, or the default of a field that the writer does not have."""

    type: pa.DataType | None
    value: Any = None

    def lanes(self, lanes: Lanes) -> pa.Array:
        if self.type is None or self.value is None:
            return None if self.type is None else pa.nulls(len(lanes), self.type)
        return pa.repeat(pa.array([self.value], self.type)[0], len(lanes))

    def one(self, cursor: Cursor) -> Any:  # noqa: ARG002 - there are none
        return self.value


@dataclass
class Unreadable:
    """A branch of the writer's union that the reader's schema does not have."""

    type: pa.DataType | None
    words: str

    def lanes(self, lanes: Lanes) -> pa.Array:
        lanes.fail(np.ones(len(lanes), np.bool_))
        return None if self.type is None else pa.nulls(len(lanes), self.type)

    def one(self, cursor: Cursor) -> Any:  # noqa: ARG002 - they are not read
        raise Refused(WRONG_TYPE, self.words)


@dataclass
class Choices:
    """A union of the writer: the number of a branch, then the branch."""

    type: pa.DataType | None
    branches: Sequence[Step]

    def lanes(self, lanes: Lanes) -> pa.Array:
        if not len(lanes):  # of a record that holds itself there is no end
            return None if self.type is None else pa.nulls(0, self.type)
        index = lanes.zigzags()
        lanes.fail((index < 0) | (index >= len(self.branches)))
        pieces, places, size = [], np.full(len(lanes), -1), 0
        for number, branch in enumerate(self.branches):
            rows = np.flatnonzero((index == number) & ~lanes.bad)
            if len(rows) == len(lanes):
                return branch.lanes(lanes)
            if not len(rows) or (isinstance(branch, Constants) and branch.value is None):
                continue
            chosen = lanes.some(rows)
            pieces.append(branch.lanes(chosen))
            lanes.moved(rows, chosen)
            places[rows] = np.arange(size, size + len(rows))
            size += len(rows)
        if self.type is None:
            return None
        if not pieces:
            return pa.nulls(len(lanes), self.type)
        return pa.concat_arrays(pieces).take(pa.array(places, mask=places < 0))

    def one(self, cursor: Cursor) -> Any:
        index = cursor.zigzag()
        if not 0 <= index < len(self.branches):
            raise Refused(MALFORMED, f"branch {index} of a union of {len(self.branches)}")
        return self.branches[index].one(cursor)


@dataclass
class Lists:
    """An array or a map: blocks of elements, each with their number, until an empty one."""

    type: pa.DataType | None
    element: Step

    def lanes(self, lanes: Lanes) -> pa.Array:
        pieces, owners = [], []
        rest = np.zeros(len(lanes), np.int64)
        active, rounds = np.arange(len(lanes)), 0
        while len(active := active[~lanes.bad[active]]):
            if len(fresh := active[rest[active] == 0]):
                rest[fresh] = self._counts(lanes, fresh)
                active = active[rest[active] > 0]
            if rounds >= _WIDE > len(active):  # a cursor is quicker
                lanes.fail(active)
            elif len(active):
                chosen = lanes.some(active)
                if isinstance(self.element, Floats):
                    piece, counts = self.element.many(chosen, rest[active])
                    pieces.append(piece)
                    owners.append(np.repeat(active, counts))
                    rest[active] = 0
                else:
                    pieces.append(self.element.lanes(chosen))
                    owners.append(active)
                    rest[active] -= 1
                lanes.moved(active, chosen)
                rounds += 1
        if self.type is None:
            return None
        return listed(pieces, owners, len(lanes), self.type)

    @staticmethod
    def _counts(lanes: Lanes, rows: np.ndarray) -> np.ndarray:
        """The number of elements in the next block of these lanes; 0: there is none."""
        chosen = lanes.some(rows)
        counts = chosen.zigzags()
        # A negative count is followed by the size of the block, which writers rarely give: a cursor checks both.
        chosen.fail((counts < 0) | (counts > chosen.end - chosen.at))
        counts[chosen.bad] = 0
        lanes.moved(rows, chosen)
        return counts

    def one(self, cursor: Cursor) -> list[Any]:
        values: list[Any] = []
        while count := cursor.zigzag():
            sized = count < 0
            end = cursor.zigzag() + cursor.at if sized else 0
            count = abs(count)
            if count > max(cursor.left, _MOST_EMPTY - len(values)):
                raise Refused(MALFORMED, f"expected {count} elements at byte {cursor.at}, found {cursor.left} bytes")
            for _ in range(count):
                try:
                    values.append(self.element.one(cursor))
                except Refused as refused:
                    raise refused.within(f"[{len(values)}]") from None
            if sized and cursor.at != end:
                raise Refused(MALFORMED, f"a block of elements ends at byte {cursor.at}, not {end}, as its size says")
        return values


@dataclass
class Fields:
    """A record: the writer's fields in their order, with their place in the columns; then the defaults."""

    type: pa.DataType | None
    read: Sequence[tuple[str, Step]]
    added: Sequence[tuple[str, Step]] = ()

    def columns(self, lanes: Lanes) -> dict[str, pa.Array]:
        """By name the columns of the fields that are not skipped."""
        built = {name: step.lanes(lanes) for name, step in (*self.read, *self.added)}
        return {name: array for name, array in built.items() if array is not None}

    def lanes(self, lanes: Lanes) -> pa.Array:
        lanes.depth += 1
        if lanes.depth > MAX_DEPTH:
            lanes.fail(np.ones(len(lanes), np.bool_))
            return None if self.type is None else pa.nulls(len(lanes), self.type)
        columns = self.columns(lanes)
        lanes.depth -= 1
        if self.type is None:
            return None
        return pa.StructArray.from_arrays([columns[each.name] for each in self.type], fields=list(self.type))

    def one(self, cursor: Cursor) -> dict[str, Any]:
        cursor.deeper()
        values = {}
        for name, step in (*self.read, *self.added):
            try:
                values[name] = step.one(cursor)
            except Refused as refused:
                raise refused.within(f".{name}") from None
        cursor.depth -= 1
        return values
