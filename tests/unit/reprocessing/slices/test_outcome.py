"""The outcome of a rebuild that commits nothing."""

from __future__ import annotations

import pytest

from reprocessing.replay.difference import Difference
from reprocessing.slices.rebuild import nothing_committed

EMPTY, RIGHT = (Difference("t", rows, rows, 0, 0, 0, {}, ()) for rows in (0, 5))


@pytest.mark.parametrize(
    ("made", "dry_run", "outcome"),
    [
        (RIGHT, False, "unchanged"),
        (RIGHT, True, "dry run"),
        (EMPTY, False, "unchanged: no row is in the slice, before or after"),
        (EMPTY, True, "dry run: no row is in the slice, before or after"),
    ],
)
def test_a_slice_without_a_row_says_so(made: Difference, dry_run: bool, outcome: str) -> None:
    assert nothing_committed(made, dry_run) == outcome
