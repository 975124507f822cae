"""The salt of a group that is too large for one task: a column by which the group is divided into parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import Column


def salt(*by: str, parts: int, where: Column | None = None) -> Column:
    """The part of its group to which a record belongs: 0 to `parts` - 1 by the columns `by`, or 0 if not `where`.

        parts = payments.groupBy(window, "account", salt("payer", parts=16, where=hot).alias("salt")).agg(...)
        totals = parts.groupBy("window", "account").agg(F.sum("payments").alias("payments"))

    It follows from the record alone, so a batch that is repeated, or replayed, makes the same parts. Results of parts
    have to be added up: counts, sums, minima and maxima can be; a number of different values can if `by` is the column
    of these values; a mean is a sum and a count. Raises UsageError for no column and for no part.
    """
    from pyspark.sql import functions as F

    if not by:
        raise UsageError("salt() has no column", "name the column by which the group is divided: salt('payer', ...)")
    if parts < 1:
        raise UsageError(f"salt({', '.join(by)}) has {parts} parts", "give it as many as there are cores, or more")
    part = F.pmod(F.xxhash64(*by), F.lit(parts))
    return (part if where is None else F.when(where, part).otherwise(F.lit(0))).cast("int")
