"""The status of a stream before its first batch in a session: the totals of its life, from status file and ledger."""

from __future__ import annotations

from dataclasses import replace

from streaming_jobs.state.status import first_status, write_status
from tests.conftest import SettingsFactory
from tests.support.worlds import STREAM, Disk, entry


def test_batches_whose_status_a_kill_took_are_counted_from_the_ledger(settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0, 1)
    write_status(disk.settings, first_status(disk.settings, STREAM))
    disk.run(2, 3)
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.batch == 3
    assert totals.records == sum(r.records for b in range(4) for r in entry(b, "evens").offsets)


def test_rows_that_broke_a_rule_are_counted_from_the_ledger_too(settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0)
    rules = {"evens": {"price_between": 3}}
    disk.ledger_file.append(replace(entry(1, "evens"), rules=rules, note="said"), {}, 0.1)
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.batch == 1
    assert totals.broken == {"evens.price_between": 3} and list(totals.broken_at) == ["evens.price_between"]


def test_a_ledger_file_that_cannot_be_read_costs_a_figure_and_no_stream(settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0)
    (disk.ledger_file.folder / "2020-01-01.jsonl.gz").write_bytes(b"\x1f\x8b cut off")
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.records == 0
