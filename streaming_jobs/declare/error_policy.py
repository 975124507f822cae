"""What a stream does with a record or row that fails, by layer, and how many may fail before the stream stops.

    @stream(source=..., sink=..., errors=ErrorPolicy(function="dead_letter", budget="100 per hour"))

| layer      | what fails there                                                                | default       |
|------------|---------------------------------------------------------------------------------|---------------|
| `decode`   | the format refuses the record                                                   | `dead_letter` |
| `function` | the stream's function raises on the record                                      | `fail`        |
| `write`    | a table or topic cannot hold the row, or the row has no key                     | `dead_letter` |

`fail` stops the stream before the batch is visible, `dead_letter` moves the record to `<stream>_dead_letters`, `drop`
counts the record and writes it nowhere. Row rules have an action each, `on_fail` (`rules.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from streaming_jobs.declare.names import checked_choice, checked_time
from streaming_jobs.errors import UsageError

ErrorAction = Literal["fail", "dead_letter", "drop"]
LAYERS = ("decode", "function", "write")
DEFAULT_BUDGET = "100 per hour"
"""The budget of records on which the function raises, if none is declared: a bug raises on all of them."""
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_RATE = re.compile(r"(\d+) per (.+)")


@dataclass(frozen=True)
class Budget:
    """At most `number` records within a time; or a `share` of a batch's records, but always one record."""

    number: int = 0
    within: timedelta = timedelta(0)
    share: float | None = None

    def allowed(self, records: int, spent: int) -> int:
        """The records that may fail in a batch of `records`, after `spent` others within the budget's time."""
        return max(self.number - spent, 0) if self.share is None else max(int(self.share * records), 1)


@dataclass(frozen=True)
class ErrorPolicy:
    """The action of each layer on a record or row that fails there.

    `budget` is a share of a batch's records, "1%", or a number per time, "100 per hour". Above it the stream stops.
    It counts the records and rows of all layers. Without a budget only those of `function` are bounded, by
    `DEFAULT_BUDGET`.
    """

    decode: ErrorAction = "dead_letter"
    function: ErrorAction = "fail"
    write: ErrorAction = "dead_letter"
    budget: str | None = None

    def __post_init__(self) -> None:
        for layer in LAYERS:
            checked_choice("errors", layer, getattr(self, layer), get_args(ErrorAction))
        if self.budget is not None:
            parse_budget(self.budget)

    @property
    def bound(self) -> Budget:
        return parse_budget(self.budget or DEFAULT_BUDGET)


DEFAULT_POLICY = ErrorPolicy()


def parse_budget(text: str) -> Budget:
    """Read "1%" or "100 per hour"; raises UsageError for anything else."""
    if (share := _SHARE.fullmatch(text)) and 0 < float(share[1]) <= 100:
        return Budget(share=float(share[1]) / 100)
    if (rate := _RATE.fullmatch(text)) and int(rate[1]) > 0:
        time = rate[2] if rate[2][0].isdigit() else f"1 {rate[2]}"
        return Budget(int(rate[1]), checked_time("errors", "budget", time))
    raise UsageError(
        f"errors: budget='{text}' is neither a share of a batch nor a number per time",
        'write budget="1%" or budget="100 per hour"',
    )
