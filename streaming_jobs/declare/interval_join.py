"""An interval join: two streams joined by keys and a bound on their times, with a piece of the time in the key."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.errors import UsageError
from streaming_jobs.text.durations import parse_duration
from streaming_jobs.text.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_RIGHT, _BUCKET = "__right_", "__bucket"
"""What the keys of the right frame are renamed with, and the column of a row's bucket."""
_WIDTHS = 2
"""Length of a bucket in lengths of the bound: a row of the copied side is in 1.5 buckets on average (docs/speed.md)."""
_DAY = 86_400_000_000
_INSTEAD = {
    "full": "join the frames with DataFrame.join(..., 'full') and the bound in its condition (docs/operators.md)",
    "left_anti": "use how='left', and keep the rows without a partner (where)",
}


def interval_join(
    left: DataFrame,
    right: DataFrame,
    on: str | Sequence[str],
    *,
    times: tuple[str, str],
    before: str = "0 seconds",
    after: str = "0 seconds",
    how: Literal["inner", "left", "right", "left_semi"] = "inner",
) -> DataFrame:
    """Pairs of rows with equal keys `on`, the right time from `before` ahead of the left time to `after` behind it.

        after = confirmations.select("account", F.col("id").alias("confirmation"), F.col("at").alias("confirmed_at"))
        interval_join(payments, after, "account", times=("at", "confirmed_at"), after="1 second")

    `times` names the event time of the left and of the right frame. Both bounds count themselves in. With `left`
    (`right`), a row of that frame without a partner comes once, when the watermark excludes a partner, with nulls in
    the other frame's columns; with `left_semi`, a left row with a partner comes once, without the right columns. Null
    matches nothing; a row without a partner whose time is null never comes, as in Spark's join, so declare the field
    `not null`. The result has the columns of `left`, then those of `right` without its keys. If both have a
    `_source`, that of the frame whose rows are kept stays (with `right`, the right one).

    Rows have the same meaning as of `DataFrame.join` with the bound in its condition, which compares a row with all
    rows of its key in the other frame's state. Here, both frames are divided into buckets of time, which are part of
    the key: the frame whose rows are not kept without a partner has a copy of a row in each bucket that its bound
    touches, and the other frame each row in its own bucket, so that no pair is there twice. Raises UsageError for
    another kind of join, no key, a column that a frame lacks, or one that both have; ConfigurationError for a bound
    that is no duration.
    """
    from pyspark.sql import functions as F

    if how not in ("inner", "left", "right", "left_semi"):
        remedy = _INSTEAD.get(how, "it has 'inner', 'left', 'right' and 'left_semi'")
        raise UsageError(f"interval_join() has no how={how!r}", remedy)
    keys = [on] if isinstance(on, str) else list(on)
    if SOURCE_COLUMN in left.columns and SOURCE_COLUMN in right.columns:
        if how == "right":
            left = left.drop(SOURCE_COLUMN)
        else:
            right = right.drop(SOURCE_COLUMN)
    _check_columns(left, right, keys, times)
    earlier, later = (_micros(text, name) for text, name in ((before, "before"), (after, "after")))
    width = max((earlier + later) * _WIDTHS, 1)
    left_time, right_time = times

    def column(name: str) -> Column:
        return F.col(quoted(name, "spark"))

    def bucket(time: str, shift: int = 0) -> Column:
        # In doubles, which round: a later time is never in an earlier bucket, and that is enough.
        return F.floor((F.unix_micros(column(time)) + F.lit(shift)) / F.lit(width))

    def in_own(frame: DataFrame, time: str) -> DataFrame:
        return frame.withColumn(_BUCKET, bucket(time))

    def in_each(frame: DataFrame, time: str, back: int, ahead: int) -> DataFrame:
        known = frame.where(" AND ".join(f"{quoted(key, 'spark')} IS NOT NULL" for key in keys))
        return known.withColumn(_BUCKET, F.explode(F.sequence(bucket(time, -back), bucket(time, ahead))))

    back, ahead = _reach(earlier), _reach(later)
    if how == "right":
        left, right = in_each(left, left_time, back, ahead), in_own(right, right_time)
    else:
        left, right = in_own(left, left_time), in_each(right, right_time, ahead, back)
    right = right.withColumnsRenamed({name: f"{_RIGHT}{name}" for name in (*keys, _BUCKET)})
    met, at = quoted(right_time, "spark"), quoted(left_time, "spark")
    bound = f"{met} BETWEEN {at} - {_interval(earlier)} AND {at} + {_interval(later)}"
    condition = [column(name) == column(f"{_RIGHT}{name}") for name in (*keys, _BUCKET)] + [F.expr(bound)]
    joined = left.join(right, condition, how)
    if how == "right":
        joined = joined.withColumns({key: column(f"{_RIGHT}{key}") for key in keys})
    return joined.drop(_BUCKET, *(f"{_RIGHT}{name}" for name in (*keys, _BUCKET)))


def _check_columns(left: DataFrame, right: DataFrame, keys: Sequence[str], times: tuple[str, str]) -> None:
    if not keys:
        raise UsageError(
            "interval_join() has no column to join on", "name the key: interval_join(left, right, 'account')"
        )
    for frame, side, time in ((left, "left", times[0]), (right, "right", times[1])):
        if missing := [name for name in (*keys, time) if name not in frame.columns]:
            raise UsageError(
                f"the {side} frame of interval_join() has no column {', '.join(missing)}, "
                f"but {', '.join(frame.columns)}",
                "keys have the same name in both frames; rename them with withColumnRenamed",
            )
    taken = {name.lower() for name in left.columns} - {name.lower() for name in keys}  # Spark does not tell them apart
    if twice := [name for name in right.columns if name.lower() in taken]:
        raise UsageError(
            f"both frames of interval_join() have a column {', '.join(twice)}",
            "select the columns of the right frame that you need, under names of their own: "
            f"right.select(..., F.col('{twice[0]}').alias('right_{twice[0]}'))",
        )


def _micros(text: str, of: str) -> int:
    return parse_duration(text, f"{of} of interval_join()") // timedelta(microseconds=1)


def _reach(micros: int) -> int:
    """The longest that a bound may be: Spark adds days by the session's time zone, whose days may have 27 hours.

    Casey in Antarctica had such days until 2023, Troll has some of 26 each year.
    """
    return micros if micros < _DAY else micros + _DAY // 8


def _interval(micros: int) -> str:
    """In seconds: Spark counts fractions of seconds to the microsecond."""
    return f"INTERVAL '{micros // 1_000_000}.{micros % 1_000_000:06}' SECOND"
