"""The base of a slice, and the outcome of a rebuild that commits nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake

from reprocessing.replay.commit_wait import committed_or_withdrawn
from reprocessing.replay.difference import Difference
from reprocessing.slices.base import SliceOpen, late_records, take_base
from reprocessing.slices.rebuild import Tools, nothing_committed, slice_offsets
from streaming_jobs.declare.slices import Slices
from streaming_jobs.errors import OffsetsLost, PreflightRefused, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.runtime.sliceable import sliceable
from streaming_jobs.sinks.tables import existing_table
from streaming_jobs.state.lease import take
from streaming_jobs.state.stream_record import Accepted, Generation
from tests.support.days import HOURS, Days, Topics, declared, guarded, range_of, rows_of
from tests.support.stream_on_disk import lay_offsets

DAY = 3


@pytest.fixture
def life(tmp_path: Path) -> Days:
    return Days.of(tmp_path, 5)


def base(life: Days, topics: Topics | None = None, day: int = DAY) -> Any:
    return take_base(life.settings, sliceable(life.stream), range_of(day), topics or Topics())


def test_the_records_are_those_from_the_lower_bound_to_the_ledger_s_end(life: Days) -> None:
    """An event time is at most a day after its record's timestamp, so the day before belongs to it."""
    made = base(life)
    assert (dict(made.offsets.start), dict(made.offsets.end)) == ({0: (DAY - 1) * HOURS}, {0: 5 * HOURS})
    assert made.table.version == life.stored().version and made.entry.batch == 4
    tools = Tools(life.settings, Topics(), "", None)  # type: ignore[arg-type]
    assert slice_offsets(tools, sliceable(life.stream), f"2013-03-{1 + DAY:02}", None) == made.offsets


def test_reach_comes_on_top_of_it(tmp_path: Path) -> None:
    made = Days.of(tmp_path, 5, declared(Slices("at", reach="2 hours")))
    assert dict(base(made).offsets.start) == {0: (DAY - 1) * HOURS - 2}


@pytest.mark.parametrize(
    "stream",
    [
        declared(topic={"max_ahead": None}),
        declared(Slices("at", event_time="at"), {"event_time": None, "lateness": None}),
    ],
)
def test_where_nothing_bounds_the_event_time_all_records_are_read(tmp_path: Path, stream: Any) -> None:
    assert dict(base(Days.of(tmp_path, 5, stream)).offsets.start) == {0: 0}


def test_records_that_are_gone_and_needed_make_it_impossible(life: Days) -> None:
    with pytest.raises(OffsetsLost, match=r"offsets 0 to 47 are gone"):
        base(life, Topics(first=(DAY - 1) * HOURS))
    with pytest.raises(OffsetsLost, match=r"offsets 0 to 59 are gone"):
        base(life, Topics(first=60))
    assert base(life, Topics(first=(DAY - 1) * HOURS - 1)).offsets.start[0] == (DAY - 1) * HOURS


def test_another_topic_and_a_stream_that_has_not_run_are_refused(life: Days, tmp_path: Path) -> None:
    with pytest.raises(OffsetsLost, match="no longer the topic"):
        base(life, Topics(topic_id="topic-2"))
    with pytest.raises(UsageError, match="not finished a batch"):
        base(Days.of(tmp_path / "new", 0))


def test_offsets_that_a_recovery_skipped_are_named(life: Days) -> None:
    void = {"generation": 1, "topic": "days", "partition": 0, "from": 60, "to": 70}
    life.save(replace(life.record, void_ranges=(void,)))
    with pytest.raises(PreflightRefused, match="skipped offsets 60 to 69"):
        base(life)
    life.save(replace(life.record, void_ranges=({**void, "from": 5, "to": 48},)))
    assert base(life)


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (lambda life: write_deltalake(life.sink().path, rows_of(9), mode="append"), "not written by stream days"),
        (
            lambda life: life.stored().mark(LedgerEntry("fence", "days", "days", 2, -1, plan="p1")),
            "the recovery plan p1 of table days is under way",
        ),
        (
            lambda life: life.save(
                replace(life.record, generations=(*life.record.generations, Generation(2, 0.0, "recovery p", None, -1)))
            ),
            "table days is in generation 1, stream days in 2: one of them was put back from a copy",
        ),
    ],
)
def test_a_recovery_under_way_and_a_change_of_somebody_else_are_refused(
    life: Days, happens: Callable[[Days], object], words: str
) -> None:
    happens(life)
    with pytest.raises(PreflightRefused, match=words):
        base(life)


def test_records_from_before_a_recovery_that_began_anew_are_refused(life: Days) -> None:
    topic = replace(life.record.topics[0], start={0: 60})
    anew = Generation(1, 0.0, "recovery p", None, -1, restarts=True)
    life.save(replace(life.record, topics=(topic,), generations=(anew,)))
    with pytest.raises(PreflightRefused, match="begun anew at offset 60"):
        base(life)
    assert base(life, day=4).offsets.start[0] == 72


@pytest.mark.parametrize(("watermark", "open_"), [(4 * 86_400, False), (4 * 86_400 - 1, True), (0, True)])
def test_a_windowed_slice_is_closed_once_the_watermark_is_past_its_last_window(
    life: Days, watermark: int, open_: bool
) -> None:
    life.save(replace(life.record, state_fingerprint={"0": "Aggregate"}))
    ms = (1_362_096_000 + watermark) * 1000 if watermark else 0
    path = life.checkpoint().folder / "offsets" / "4"
    path.unlink()
    lay_offsets(life.checkpoint().folder, 4, life.ends(4), starts=life.ends(-1))
    path.write_text(path.read_text().replace('"batchWatermarkMs": 0', f'"batchWatermarkMs": {ms}'))
    if open_:
        with pytest.raises(SliceOpen, match="still open"):
            base(life)
    else:
        assert base(life).entry.batch == 4


def test_late_records_are_those_of_the_batches_that_read_these_offsets(life: Days) -> None:
    entry = life.entry(5)
    life.ledger_file.append(replace(entry, rows={"written": 1, "late": 7}), {})
    offsets = base(life).offsets
    assert late_records(life.settings, life.record, offsets) == 7
    later = replace(offsets, start={0: 6 * HOURS})
    assert late_records(life.settings, life.record, later) == 0


def test_a_batch_that_comes_while_the_table_is_looked_at_is_the_stream_s_own(
    life: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are not in the version that was opened, and stay beside the slice: they must not be in it too."""
    opened: list[Any] = []

    def opened_before_a_batch(*arguments: Any) -> Any:
        opened.append(existing_table(*arguments))
        if len(opened) == 2:  # the primary table, then the one to slice
            life.batch(5)
        return opened[-1]

    monkeypatch.setattr("reprocessing.slices.base.existing_table", opened_before_a_batch)
    made = base(life)
    assert (made.entry.batch, dict(made.offsets.end)) == (4, {0: 5 * HOURS})
    assert made.table.version == life.stored().version - 1


def test_what_was_accepted_is_not_taken_back_unless_somebody_says_so(life: Days) -> None:
    life.save(replace(life.record, accepted=(Accepted("days", 3, "an erasure", 1.0),)))
    with pytest.raises(PreflightRefused, match="version 3 of table days was changed by somebody else"):
        base(life)
    made = take_base(life.settings, sliceable(life.stream), range_of(DAY), Topics(), despite_accepted=True)
    assert made.entry.batch == 4


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


def test_a_quarantine_that_no_rule_of_today_has_is_refused(tmp_path: Path) -> None:
    life = Days.of(tmp_path, 5, guarded())
    assert base(life).quarantine is not None
    life.stream = declared()
    with pytest.raises(PreflightRefused, match="a row would be in both"):
        base(life)


def test_the_wait_ends_for_a_change_that_the_driver_could_not_read(life: Days) -> None:
    request = life.rebuilt("a", 2, 77)
    life.requests.ask(request)

    def unreadable(_: str) -> None:
        (waiting,) = (life.requests.folder / "waiting").glob("*.json")
        waiting.rename(waiting.with_suffix(".unreadable"))

    with (
        take(life.settings, "days", purpose="live", wait=0.0),
        pytest.raises(PreflightRefused, match="set change a aside as unreadable"),
    ):
        committed_or_withdrawn(life.settings, life.requests, request, lambda _: None, 0.3, unreadable)
