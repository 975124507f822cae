"""The streams of the kill loop, and the rows that each makes of a record: known here before they have run.

`recourse verify` uses none of this: it has the declarations and the recorded plans (`declared.py`).
"""

from __future__ import annotations

from streaming_jobs.verification.subject import Elsewhere, Subject
from streaming_jobs.verification.table_rules import Newest, Places, Total, Windows

FLIGHTS = (
    Subject(
        "flights_clean",
        "flights_clean",
        "flights",
        Places("source_partition", "source_offset", key=("carrier", "flight")),
    ),
    Subject("airport_hours", "airport_hours", "flights", Windows(("window_start", "origin"), "flights")),
    Subject("carrier_totals", "carrier_totals", "flights", Total("carrier", "flights")),
)
"""The three shipped streams."""
SPLIT = Subject(
    "flights_split",
    "flights_short",
    "flights",
    Places("source_partition", "source_offset", key=("carrier", "flight")),
    secondary=(Elsewhere("flights_long", "source_partition", "source_offset"),),
)
"""The stream of two tables that only the kill loop runs (`streams.py`)."""
JUDGED = Subject(
    "flights_judged",
    "flights_judged",
    "flights",
    Places("source_partition", "source_offset", key=("carrier", "flight")),
    secondary=(Elsewhere("flights_judged_quarantine", "source_partition", "source_offset"),),
)
NEWEST = Subject(
    "flights_newest",
    "flights_newest",
    "flights",
    Newest("source_partition", "source_offset", key=("carrier", "flight")),
    secondary=(Elsewhere("flights_newest_quarantine", "source_partition", "source_offset"),),
)
"""The streams with row rules that only the kill loop runs; a quarantine commits before its table."""
