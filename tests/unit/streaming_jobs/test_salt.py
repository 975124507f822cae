"""A salt is refused where it would divide nothing; tests/spark/test_payments.py has its values."""

from __future__ import annotations

import pytest

from streaming_jobs import UsageError, salt


def test_a_salt_without_a_column_or_a_part_is_refused() -> None:
    with pytest.raises(UsageError, match="has no column"):
        salt(parts=4)
    with pytest.raises(UsageError, match=r"salt\(payer\) has 0 parts"):
        salt("payer", parts=0)
