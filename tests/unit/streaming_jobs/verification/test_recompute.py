"""Rows computed again at once: what of them is compared, with the outcome of Spark's part given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import write_deltalake
from pyspark.sql.types import IntegerType, LongType, StructField, StructType, TimestampType

from streaming_jobs.declare.error_policy import ErrorPolicy
from streaming_jobs.formats import Json
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from streaming_jobs.verification import recompute as module
from streaming_jobs.verification.delta_log import Entry, Range, versions
from streaming_jobs.verification.lineage import Coverage
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.recompute import recompute
from streaming_jobs.verification.subject import Comparison
from streaming_jobs.verification.verifier import StreamVerdict

ROWS = StructType(
    [
        StructField("at", TimestampType()),
        StructField("part", IntegerType()),
        StructField("off", LongType()),
        StructField("n", LongType()),
    ]
)


def numbers(value: Any) -> Any:
    """The stream's function; Spark is not there to call it on frames."""
    return value


PLAIN = Stream(
    "numbers",
    numbers,
    {"value": KafkaTopic("numbers", Json(ROWS), event_time="at", lateness="1 minute")},
    {"numbers": DeltaTable("numbers")},
)
KEYED = Stream("numbers", numbers, PLAIN.sources, {"numbers": DeltaTable("numbers", keys=["off"])})
TODAY = "today"
"""Stands for the hash of the stream that is compared."""
PER_BATCH = 10


def rows(spans: list[Span], change: Mapping[int, int] = {}, add: int = 0) -> pa.Table:
    """A row for each offset; `change` has other values of some, `add` is what the code of then added to all."""
    offsets = [offset for span in spans for offset in range(span.start, span.end)]
    made = [{"part": 0, "off": at, "n": change.get(at, at + add)} for at in offsets]
    return pa.Table.from_pylist(made, pa.schema([("part", pa.int32()), ("off", pa.int64()), ("n", pa.int64())]))


def batch(number: int) -> Span:
    return Span("numbers", 0, number * PER_BATCH, (number + 1) * PER_BATCH)


class Reader:
    """A topic that holds everything."""

    def __init__(self) -> None:
        self.low = {0: 0}


class Home:
    """A table of a few batches, by number the code of each; `plan` is how Spark shows the function's plan."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings, self.plan, self.place = Settings(home=folder), "Project", ["part", "off"]
        self.staged: Any = lambda table: ArrowAppend(None, table)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "_read", self.read)
        monkeypatch.setattr(module, "analysed", lambda frame: self.plan)
        monkeypatch.setattr(module, "open_sink", lambda *_: SimpleNamespace(declared=None, schema=None))
        monkeypatch.setattr(module, "fitted", lambda declared, schema, spans, topics, rules: spans)
        monkeypatch.setattr(module, "prepare_write", lambda sink, spans, **_: self.staged(self.good(rows(spans))))

    def read(self, source: KafkaSource, spark: None, spans: list[Span], reader: Reader) -> list[Span]:
        self.aside = source.aside
        return spans

    def good(self, made: pa.Table) -> pa.Table:
        """The rows without those of records that are set aside."""
        return pa.Table.from_pylist(
            [r for r in made.to_pylist() if (r["part"], r["off"]) not in self.aside], made.schema
        )

    def compare(
        self, codes: list[str], table: pa.Table, *, stream: Stream = PLAIN, late: int = 0, dropped: int = 0
    ) -> Comparison:
        """The comparison of the only table."""
        codes = [code_version(stream, self.settings.flows).hash if code == TODAY else code for code in codes]
        state = self.settings.state / "numbers"
        state.mkdir(parents=True, exist_ok=True)
        life = {"number": 1, "opened_at": 0.0, "reason": "first start", "from_generation": None, "from_batch": -1}
        record = {"generations": [life], "topics": [], "accepted": [], "void_ranges": []}
        (state / "stream.json").write_text(json.dumps(record))
        plans = {"numbers": {"nodes": ["Project"], "position": self.place}}
        output_plans.write(StreamFolder.of(self.settings, "numbers").output_plans, dict.fromkeys(codes, plans))
        path = self.settings.tables / "numbers"
        write_deltalake(path, table, mode="overwrite")
        entries = []
        for number, code in enumerate(codes):
            ends = Range("numbers", "id", {0: number * PER_BATCH}, {0: (number + 1) * PER_BATCH})
            counts = {"late": late} if late and not number else {}
            counts |= {"dropped:numbers": dropped} if dropped else {}
            entries.append(Entry("batch", "numbers", "numbers", 1, number, (ends,), counts, code))
        covered = Coverage(proved=[batch(number) for number in range(len(codes))], entries=entries)
        verdict = StreamVerdict(
            "numbers",
            "numbers",
            versions(path)[-1],
            batches=len(codes),
            coverage=covered,
            position=(1, len(codes) - 1),
        )
        readers: Any = {"numbers": Reader()}
        (comparison,) = recompute(self.settings, stream, None, "nowhere", verdict, readers)  # type: ignore[arg-type]
        return comparison


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


ALL = [batch(number) for number in range(4)]
OLD, NEW = ALL[:2], ALL[2:]
CHANGED = ["old", "old", TODAY, TODAY]


def test_every_row_is_compared_where_all_are_of_todays_code(home: Home) -> None:
    assert home.compare([TODAY] * 4, rows(ALL)).verdict == "ok"
    comparison = home.compare([TODAY] * 4, rows(ALL, {7: 8}))
    assert comparison.verdict == "wrong" and "1 rows missing, first part=0 off=7 n=7" in comparison.text


def test_rows_of_other_code_are_left_out_where_rows_name_their_record(home: Home) -> None:
    table = pa.concat_tables([rows(OLD, add=1000), rows(NEW)])
    comparison = home.compare(CHANGED, table)
    assert comparison.verdict == "ok" and comparison.text.startswith("20 rows are")
    assert comparison.text.endswith("not compared: batches 0 to 1 of other code")
    lost = home.compare(CHANGED, table.slice(0, 39))
    assert lost.verdict == "wrong" and "1 rows missing, first part=0 off=39" in lost.text


def test_records_on_which_the_function_raised_are_not_computed_again(home: Home) -> None:
    letters = [
        {"topic": "numbers", "partition": 0, "offset": 7, "reason": "function_raised"},
        {"topic": "numbers", "partition": 0, "offset": 8, "reason": "null_key"},
        {"topic": "others", "partition": 0, "offset": 9, "reason": "function_raised"},
    ]
    write_deltalake(home.settings.tables / PLAIN.dead_letters, pa.Table.from_pylist(letters))
    there = rows(ALL).filter(pc.not_equal(rows(ALL)["off"], 7))
    assert home.compare([TODAY] * 4, there).verdict == "ok"
    assert home.compare([TODAY] * 4, rows(ALL)).verdict == "wrong"


def test_where_records_were_dropped_on_which_the_function_raises_nothing_is_computed_again(home: Home) -> None:
    dropping = replace(PLAIN, errors=ErrorPolicy(function="drop"))
    comparison = home.compare([TODAY] * 4, rows(ALL[1:]), stream=dropping, dropped=1)
    assert comparison.verdict == "not compared" and "the function may raise on some of them" in comparison.text
    assert home.compare([TODAY] * 4, rows(ALL), stream=dropping).verdict == "ok"


@pytest.mark.parametrize("how", ["state", "upsert", "no place"])
def test_rows_that_cannot_be_told_apart_by_code_are_not_compared(home: Home, how: str) -> None:
    home.plan = "Aggregate [k]" if how == "state" else "Project"
    home.place = None if how == "no place" else home.place  # type: ignore[assignment]
    table = pa.concat_tables([rows(OLD, add=1000), rows(NEW)])
    comparison = home.compare(CHANGED, table, stream=KEYED if how == "upsert" else PLAIN)
    assert comparison.verdict == "not compared" and comparison.text.startswith("batches 0 to 1 of other code")


def test_nothing_of_todays_code_is_nothing_to_compare(home: Home) -> None:
    comparison = home.compare(["old", "older"], rows(OLD, add=1))
    assert comparison == Comparison("numbers", "recomputed", "not compared", "batches 0 to 1 of other code")


@pytest.mark.parametrize("stream", [PLAIN, KEYED], ids=["append", "update"])
def test_late_records_that_were_dropped_are_unproved_where_there_is_state(home: Home, stream: Stream) -> None:
    table = rows(ALL, {7: 6})
    assert home.compare([TODAY] * 4, table, stream=stream, late=3).verdict == "wrong", "no state drops no record"
    home.plan = "Aggregate [k]"
    assert home.compare([TODAY] * 4, table, stream=stream).verdict == "wrong"
    comparison = home.compare([TODAY] * 4, table, stream=stream, late=3)
    assert comparison.verdict == "unproved"
    assert (
        comparison.text.startswith("3 late records were dropped behind the watermark; ")
        and "; 1 row differs: " in comparison.text
    )


def test_what_is_larger_than_the_driver_takes_is_not_compared(home: Home) -> None:
    def larger(_: pa.Table) -> Any:
        raise RuntimeError("Total size of serialized results is bigger than spark.driver.maxResultSize (1024.0 MiB)")

    home.staged = larger
    comparison = home.compare([TODAY], rows(ALL[:1]))
    assert comparison.verdict == "not compared" and "larger than the driver takes" in comparison.text

    def broken(_: pa.Table) -> Any:
        raise RuntimeError("something else")

    home.staged = broken
    with pytest.raises(RuntimeError, match="something else"):
        home.compare([TODAY], rows(ALL[:1]))
