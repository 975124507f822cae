"""From the time at which a record was sent to the time at which it was readable in the output, ms, record by record.

A record of the stateless work is readable with its own row; of the running total with the first total of its account
that counts it. A window is readable with its row, and is counted from the first record that lets it close: the first
one whose event is as late as the window's end and the lateness after it. The same rules hold for every contestant.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.speed.records import ACCOUNTS, LATENESS_MS, PARTITIONS, WINDOW_MS, Floats, Integers, Records, Work
from benchmarks.speed.watch import SEEN


def latencies(records: Records, arrivals: pa.Table, work: Work, *, since_ms: float, until_ms: float) -> Floats:
    """Of what was sent (or could close) in that time, ms since 1970. Rows that came twice count when they came first.

    Raises LookupError for a record that never became readable.
    """
    measures = {"stateless": _stateless, "windowed": _windowed, "running": _running}
    sent, seen = measures[work](records, arrivals)
    mine = (sent >= since_ms) & (sent < until_ms)
    if np.isnan(seen[mine]).any():
        raise LookupError(f"{int(np.isnan(seen[mine]).sum())} records of {work} never became readable")
    found: Floats = seen[mine] - sent[mine]
    return found


def _stateless(records: Records, arrivals: pa.Table) -> tuple[Floats, Floats]:
    seen = np.full(len(records), np.nan)
    np.fmin.at(seen, arrivals["id"].to_numpy(), arrivals[SEEN].to_numpy() * 1000)
    kept = ~records.dropped
    return records.sent_ms[kept], seen[kept]


def _windowed(records: Records, arrivals: pa.Table) -> tuple[Floats, Floats]:
    end = arrivals["start"].cast(pa.int64()).to_numpy() + WINDOW_MS
    reached = np.maximum.accumulate(records.at_ms)
    closes = np.searchsorted(reached, end + LATENESS_MS, side="left")
    return records.sent_ms[closes], arrivals[SEEN].to_numpy() * 1000


def _running(records: Records, arrivals: pa.Table) -> tuple[Floats, Floats]:
    account = pc.cast(pc.utf8_slice_codeunits(arrivals["account"], 1), pa.int64()).to_numpy()
    count = arrivals["count"].to_numpy()
    when = arrivals[SEEN].to_numpy() * 1000
    seen = np.full(len(records), np.nan)
    mine = _places(records.account)
    theirs = _places(account)
    for number in range(ACCOUNTS + PARTITIONS):
        own = mine[number]
        totals = np.maximum.accumulate(count[theirs[number]])
        place = np.searchsorted(totals, np.arange(1, len(own) + 1), side="left")
        there = place < len(totals)
        seen[own[there]] = when[theirs[number]][place[there]]
    return records.sent_ms, seen


def _places(account: Integers) -> list[Integers]:
    """The places of each account, in order."""
    order = np.argsort(account, kind="stable")
    borders = np.searchsorted(account[order], np.arange(1, ACCOUNTS + PARTITIONS))
    return list(np.split(order, borders))
