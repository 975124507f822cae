"""What a batch asks the JVM for: its rows, its session, its counts, in few calls and with PySpark's results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
import pytest
from py4j import java_gateway  # type: ignore[import-untyped]
from py4j.clientserver import ClientServerConnection  # type: ignore[import-untyped]
from py4j.java_gateway import GatewayConnection
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import ArithmeticException
from pyspark.sql import DataFrame, SparkSession, types
from structlog.testing import capture_logs

from streaming_jobs.platform import collected
from streaming_jobs.platform.collected import to_arrow
from streaming_jobs.runtime.query_handle import for_each_batch
from streaming_jobs.runtime.spark_plan import set_to

_MANY = (
    "select id, cast(id as string) text, cast(id as decimal(12,3)) amount, array(id) list, named_struct('a', id) pair, "
    "timestamp_seconds(id) at, map('k', id) map, if(id % 2 = 0, null, binary(string(id))) bytes from range(0, 50, 1, 4)"
)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of the JVM in the block, but for those that let go of its objects."""
    calls: list[str] = []
    with monkeypatch.context() as patched:
        for kind in (GatewayConnection, ClientServerConnection):
            send = kind.send_command

            def noted(self: Any, command: str, *rest: Any, _send: Any = send, **more: Any) -> Any:
                if not command.startswith("m\nd\n"):
                    calls.append(command)
                return _send(self, command, *rest, **more)

            patched.setattr(kind, "send_command", noted)
        yield calls


@pytest.mark.parametrize("query", [_MANY, f"{_MANY} where id < 0", "select 1 a where false"])
@pytest.mark.parametrize("large", ["false", "true"])
def test_rows_are_those_of_pyspark_in_their_order(spark: SparkSession, query: str, large: str) -> None:
    with set_to(spark, "spark.sql.execution.arrow.useLargeVarTypes", large):
        frame = spark.sql(query)
        rows, expected = to_arrow(frame), frame.toArrow()
    assert rows.schema.equals(expected.schema)
    assert rows.equals(expected)


def test_rows_take_few_calls_of_the_jvm(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = spark.sql(_MANY)
    to_arrow(frame)
    with counted(monkeypatch) as calls:
        to_arrow(frame)
    assert len(calls) <= 2, calls


def test_what_fails_raises_what_pyspark_raises(spark: SparkSession) -> None:
    frame = spark.sql("select 1 div (id - id) from range(3)")
    with pytest.raises(ArithmeticException) as expected:
        frame.toArrow()
    with pytest.raises(ArithmeticException) as raised:
        to_arrow(frame)
    assert raised.value.getCondition() == expected.value.getCondition() == "DIVIDE_BY_ZERO"
    assert to_arrow(spark.range(3)).num_rows == 3, "the next frame is collected"


@pytest.mark.parametrize("lacks", ["class", "name", "right to open memory of this process"])
def test_without_the_private_interface_rows_are_collected_in_pysparks_own_way(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def no_class(*_: object) -> None:
        raise Py4JError("does not compile")

    if lacks == "class":
        monkeypatch.setattr(collected, "new_object", no_class)
    elif lacks == "name":
        monkeypatch.delattr(types, "_parse_datatype_json_string")
    else:
        monkeypatch.setattr(collected, "_memory", lambda: nullcontext((0, "/proc/self/fd/0/none")))
    monkeypatch.setattr(collected, "_BY_GATEWAY", WeakKeyDictionary())
    with capture_logs() as logged:
        rows = [to_arrow(spark.range(3)).num_rows for _ in range(2)]
    assert rows == [3, 3]
    assert [line["event"] for line in logged] == ["rows are collected by PySpark's own way"]


def test_a_frame_of_ours_is_collected_by_itself() -> None:
    rows = pa.table({"n": [1]})
    frame: Any = SimpleNamespace(toArrow=lambda: rows)
    assert to_arrow(frame) is rows


def test_the_batches_of_a_query_share_a_session_that_is_sparks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, SparkSession, str, int]] = []

    def batch(frame: DataFrame, number: int) -> None:
        with counted(monkeypatch) as calls:
            rows = to_arrow(frame)
        if number:
            assert len(calls) <= 2, calls
        phases = frame._jdf.queryExecution().tracker().phases()
        assert phases.contains("analysis") and not phases.contains("optimization"), "planned once more"
        seen.append((number, frame.sparkSession, str(frame._jdf.sparkSession()), rows.num_rows))

    for name in ("a", "b"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(f"{name}\n")
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(tmp_path / "in"))
    writer = lines.writeStream.option("checkpointLocation", str(tmp_path / "state"))
    assert for_each_batch(writer, batch) is writer
    writer.trigger(availableNow=True).start().awaitTermination()
    assert [(number, rows) for number, _, _, rows in seen] == [(0, 1), (1, 1)]
    (_, first, java, _), (_, second, java_then, _) = seen
    assert first is second and java == java_then == str(first._jsparkSession)


def test_without_the_private_interface_batches_come_in_pysparks_own_way(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, calls, rows = java_gateway.java_import, [], []

    def missing_at_first(*of: Any) -> None:
        calls.append(of)
        if len(calls) == 1:
            raise AttributeError("no such helper")
        there(*of)

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a\n")
    lines = spark.readStream.text(str(tmp_path / "in"))
    writer = lines.writeStream.option("checkpointLocation", str(tmp_path / "state"))
    monkeypatch.setattr(java_gateway, "java_import", missing_at_first)
    with capture_logs() as logged:
        for_each_batch(writer, lambda frame, _: rows.append(frame.count()))
    assert [line["event"] for line in logged] == ["each batch has a session of its own in Python"]
    writer.trigger(availableNow=True).start().awaitTermination()
    assert rows == [1]


def test_what_a_batch_raises_ends_its_query(spark: SparkSession, tmp_path: Path) -> None:
    def batch(*_: object) -> None:
        raise ValueError("no such batch")

    writer = spark.readStream.format("rate").load().writeStream.option("checkpointLocation", str(tmp_path))
    query = for_each_batch(writer, batch).start()
    with pytest.raises(Exception, match="no such batch"):
        query.awaitTermination(60)
