"""Values that are not UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

from streaming_jobs.declare.format import Refusal


def joined(values: Sequence[bytes | None]) -> bytes:
    """The values with a newline between them, so that no sequence of bytes or escapes spans two of them."""
    try:
        return b"\n".join(values)  # type: ignore[arg-type]
    except TypeError:  # a null among them, which is rare
        return b"\n".join(value or b"" for value in values)


def not_utf8(values: Sequence[bytes | None], block: bytes) -> dict[int, Refusal]:
    """The refusals of the values that are not UTF-8, by index; `block` is the values joined."""
    try:
        block.decode()
    except UnicodeDecodeError:
        refusals = ((index, utf8_refusal(value)) for index, value in enumerate(values) if value)
        return {index: refusal for index, refusal in refusals if refusal is not None}
    return {}


def utf8_refusal(value: bytes) -> Refusal | None:
    """The refusal of bytes that are not UTF-8; None if they are."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        byte = value[error.start]
        return Refusal("invalid_utf8", f"byte 0x{byte:02x} at byte {error.start} is not UTF-8")
    return None
