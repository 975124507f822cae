"""What became of a record: through batches, topics, tables and recoveries, in homes that are laid by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from reprocessing import trace as traces
from reprocessing.plan.journal import journal_of
from reprocessing.trace import Records, origins, places, trace
from streaming_jobs import (
    DeltaSource,
    DeltaTable,
    Json,
    KafkaSink,
    KafkaTopic,
    NotNull,
    Stream,
    Topology,
    UsageError,
    stream,
)
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.table_sources.versions import TableVersions
from tests.support.timelines import MONDAY, lay_ledger, ledger_line
from tests.support.written_table import WrittenTable

ORDERS = KafkaTopic("orders", value=Json({"id": "bigint"}))
PARTS = KafkaTopic("parts", value=Json({"id": "bigint"}))


@stream(
    source=ORDERS,
    sink={"rows": DeltaTable("clean"), "records": KafkaSink(PARTS, key="id")},
    rules={"rows": [NotNull("id", on_fail="quarantine")]},
)
def clean(orders: Any) -> Any:
    return {"rows": orders, "records": orders}


@stream(source=PARTS, sink=DeltaTable("totals"))
def totals(parts: Any) -> Any:
    return parts


@stream(source=DeltaSource("totals", schema={"id": "bigint"}), sink=DeltaTable("report"))
def report(totals: Any) -> Any:
    return totals


TOPOLOGY = Topology.of([clean, totals, report])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def line(of: Stream, batch: int, read: tuple[str, int, int], *, generation: int = 1, **more: Any) -> str:
    """A batch that read [first, end) of partition 0."""
    name, first, end = read
    offsets = {name: {"id": "i", "start": {"0": first}, "end": {"0": end}}}
    table = of.primary.name
    made = {"table": table, "versions": {table: batch + 1}, "offsets": offsets, **more}
    return ledger_line(batch, MONDAY + 60 * generation + batch, generation=generation, **made)


def replaced(line: str, values: Mapping[str, Any]) -> str:
    return json.dumps({**json.loads(line), **values}, separators=(",", ":"))


def written(topic: str, first: int, end: int) -> list[list[Any]]:
    return [[topic, "i", 0, first, end, end - first]]


def lay(settings: Settings, of: Stream, *lines: str, generations: tuple[Generation, ...] = ()) -> None:
    record = stream_record.first(of.name)
    stream_record.save(settings, replace(record, generations=(*record.generations, *generations)))
    lay_ledger(settings, lines, of.name)


def seen(settings: Settings, start: str) -> list[tuple[str, str, str, bool]]:
    found = trace(settings, TOPOLOGY, Records.parse(start))
    assert found.complete
    return [(str(b.read), b.stream, str(b.txn), b.present) for b in found.batches]


def test_a_record_is_followed_through_topics_and_tables_of_later_streams(settings: Settings) -> None:
    lay(
        settings,
        clean,
        line(clean, 0, ("orders", 0, 10), written=written("parts", 0, 12)),
        line(clean, 1, ("orders", 10, 20), written=written("parts", 12, 30)),
    )
    lay(
        settings,
        totals,
        *(line(totals, n, ("parts", first, end)) for n, (first, end) in enumerate([(0, 15), (15, 40)])),
    )
    lay(settings, report, *(line(report, n, ("totals", n, n + 1)) for n in range(3)))
    assert seen(settings, "orders/0:12") == [
        ("orders/0:12", "clean", "g0001 batch 1", True),
        ("parts/0:12-14", "totals", "g0001 batch 0", True),
        ("parts/0:15-29", "totals", "g0001 batch 1", True),
        ("totals/0:1", "report", "g0001 batch 1", True),
        ("totals/0:2", "report", "g0001 batch 2", True),
    ]
    assert seen(settings, "totals:2") == [("totals/0:2", "report", "g0001 batch 2", True)]
    assert seen(settings, "orders/0:20") == seen(settings, "orders/1:12") == []
    (origin,) = origins(settings, TOPOLOGY, Records.parse("parts/0:13"))
    assert (origin.stream, str(origin.txn), [str(each) for each in origin.read]) == (
        "clean",
        "g0001 batch 1",
        ["orders/0:10-19"],
    )
    assert origins(settings, TOPOLOGY, Records.parse("orders/0:12")) == []


def test_batches_that_a_recovery_has_replaced_are_told_apart(settings: Settings) -> None:
    lay(
        settings,
        clean,
        line(clean, 0, ("orders", 0, 10)),
        line(clean, 1, ("orders", 10, 20)),
        line(clean, 1, ("orders", 10, 20), generation=2, versions={}),
        generations=(Generation(2, MONDAY, "recovery", from_generation=1, from_batch=0),),
    )
    assert seen(settings, "orders/0:5") == [("orders/0:5", "clean", "g0001 batch 0", True)]
    assert seen(settings, "orders/0:12") == [
        ("orders/0:12", "clean", "g0001 batch 1", False),
        ("orders/0:12", "clean", "g0002 batch 1", True),
    ]


def noted(settings: Settings, position: list[str] | None) -> None:
    outputs = {"format": 1, "code": {"c": {"clean": {"nodes": ["Project"], "position": position}}}}
    StreamFolder.of(settings, "clean").output_plans.put(json.dumps(outputs).encode())


def table(settings: Settings, name: str, *rows: Mapping[str, Any]) -> None:
    write_deltalake(str(settings.tables / name), pa.Table.from_pylist(list(rows)))


def test_the_rows_of_the_record_itself_are_shown_where_rows_have_the_place_of_theirs(settings: Settings) -> None:
    counts = {"rows": {"written": 9, "quarantined:clean": 1}}
    lay(settings, clean, replaced(line(clean, 0, ("orders", 0, 10)), counts))
    noted(settings, ["p", "o"])
    table(settings, "clean", {"id": 7, "p": 0, "o": 3}, {"id": 8, "p": 0, "o": 4}, {"id": 9, "p": 1, "o": 3})
    kept = {"id": None, "p": 0, "o": 5, "_reasons": "id_not_null"}
    table(settings, "clean_quarantine", kept, {**kept, "o": 6})
    (batch,) = trace(settings, TOPOLOGY, Records.parse("orders/0:3")).batches
    assert batch.placed == ("clean",) and batch.of_record == {"clean": ({"id": 7, "p": 0, "o": 3},)}
    (aside,) = trace(settings, TOPOLOGY, Records.parse("orders/0:5")).batches
    assert aside.of_record == {"clean_quarantine": (kept,)}
    (without,) = trace(settings, TOPOLOGY, Records.parse("orders/0:8")).batches
    assert without.placed == ("clean",) and without.of_record == {}
    assert [str(each) for each in places(settings, TOPOLOGY, "clean", "id >= 8", 20)] == ["orders/0:4", "orders/1:3"]

    noted(settings, None)
    (unknown,) = trace(settings, TOPOLOGY, Records.parse("orders/0:3")).batches
    assert unknown.placed == ()
    with pytest.raises(UsageError, match="do not say of which record"):
        places(settings, TOPOLOGY, "clean", "id >= 8", 20)


def test_a_dead_letter_is_the_record_s(settings: Settings) -> None:
    counts = {"rows": {"written": 9, "dead_letters": 1}}
    lay(settings, clean, replaced(line(clean, 0, ("orders", 0, 10)), counts))
    noted(settings, ["p", "o"])
    table(settings, "clean", {"id": 7, "p": 0, "o": 1})  # and no quarantine: its rule is newer
    letter = {"topic": "orders", "partition": 0, "offset": 3, "reason": "malformed_json"}
    table(settings, "clean_dead_letters", letter, {**letter, "offset": 4})
    (batch,) = trace(settings, TOPOLOGY, Records.parse("orders/0:3")).batches
    assert batch.taken_out == {"dead letters": 1} and batch.of_record == {"clean_dead_letters": (letter,)}
    assert [str(r) for r in places(settings, TOPOLOGY, "clean_dead_letters", '"offset" = 4', 20)] == ["orders/0:4"]


@pytest.mark.parametrize("text", ["orders", "orders/0", "orders/x:1", ":5", "a/0:-1", "a/b/0:1"])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no record"):
        Records.parse(text)


def test_a_topic_that_nobody_reads_is_refused(settings: Settings) -> None:
    with pytest.raises(UsageError, match="no stream reads nothing"):
        trace(settings, TOPOLOGY, Records.parse("nothing/0:1"))


def test_a_trace_without_end_is_cut(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST", 3)
    lay(settings, clean, line(clean, 0, ("orders", 0, 10), written=written("parts", 0, 9)))
    lay(settings, totals, *(line(totals, n, ("parts", n, n + 1)) for n in range(9)))
    found = trace(settings, TOPOLOGY, Records.parse("orders/0:1"))
    assert len(found.batches) == 3 and not found.complete


@pytest.mark.slow
def test_ten_thousand_batches_of_each_stream_are_searched_within_seconds(settings: Settings) -> None:
    lay(
        settings,
        clean,
        *(
            line(clean, n, ("orders", n * 10, n * 10 + 10), written=written("parts", n * 9, n * 9 + 9))
            for n in range(10_000)
        ),
    )
    lay(settings, totals, *(line(totals, n, ("parts", n * 9, n * 9 + 9)) for n in range(10_000)))
    lay(settings, report, *(line(report, n, ("totals", n, n + 1)) for n in range(10_000)))
    began = time.process_time()
    assert len(trace(settings, TOPOLOGY, Records.parse("orders/0:50005")).batches) == 3
    assert time.process_time() - began < 10


def test_a_batch_names_the_files_that_its_versions_added(settings: Settings) -> None:
    table = WrittenTable(settings.tables / "totals").make()
    table.batch(1)
    table.batch(2)
    lay(settings, totals, *(line(totals, n, ("parts", n, n + 1)) for n in range(3)))
    files = [trace(settings, TOPOLOGY, Records.parse(f"parts/0:{n}")).batches[0].files for n in range(3)]
    names = [file.path for version in (1, 2) for file in TableVersions(table.path).version(version).files]
    assert files == [{"totals": (names[0],)}, {"totals": (names[1],)}, {}], "the log has no third version"


def test_rows_of_a_replay_are_followed_to_the_streams_that_have_read_them_in_the_same_recovery(
    settings: Settings,
) -> None:
    opened = Generation(2, MONDAY, "recovery totals-0001", from_generation=1, from_batch=0)
    of_replay = line(totals, 1, ("parts", 10, 20), generation=2, versions={})
    lay(settings, totals, of_replay, line(totals, 2, ("parts", 20, 30), generation=2), generations=(opened,))
    lay(settings, report, line(report, 1, ("totals", 2, 8)))
    journal_of(settings, "totals-0001").of("totals").write("fence", "done", {"versions": {"totals": 7}})
    published = [{"table": "totals", "version": 9, "came": 1}]
    journal_of(settings, "totals-0001").of("totals").write("publish", "done", {"tables": published})
    assert seen(settings, "parts/0:12") == [
        ("parts/0:12", "totals", "g0002 batch 1", True),
        ("totals/0:7", "report", "g0001 batch 1", True),
    ]
    replayed, read = trace(settings, TOPOLOGY, Records.parse("parts/0:12")).batches
    assert (replayed.published, replayed.rebuilt) == ({"totals": 9}, {"totals": 7})
    later = trace(settings, TOPOLOGY, Records.parse("parts/0:25")).batches[0]
    assert later.versions and not any((later.published, later.rebuilt, read.published, read.rebuilt))
