"""`recourse state` as it is typed: what it prints of figures and entries that Spark has read, and its refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from orchestration.cli.state import _spark
from streaming_jobs.errors import UsageError
from streaming_jobs.inspection import operator_state
from streaming_jobs.inspection.operator_state import StateStore, StoreFigures
from streaming_jobs.platform import runtime
from streaming_jobs.platform.spark import ONE_COMPILER
from streaming_jobs.settings import Settings
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.testing import MemoryRuntime
from tests.support.life import Life
from tests.unit.orchestration.cli.conftest import Declare, Run

COUNT = "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
STORE = StateStore(0, "transformWithStateExec", "last", 4, {"stateVarName": "last"})
FIGURES = StoreFigures(STORE, {"key": "struct<user:string>"}, 1200, 2048, 800, 1, 1201)
PLACE = {"operator": 0, "store": "last", "partition": 3}
ENTRIES = {"ada": [{**PLACE, "key": {"user": "ada"}, "value": {"at": NOON, "tag": b"x"}}]}


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> MemoryRuntime:
    """The runtime that commands start, which has to be in a JVM of this machine."""
    started = MemoryRuntime()

    def local(settings: Settings) -> MemoryRuntime:
        extra = settings.spark.extra
        assert (settings.spark.master, extra[COUNT], extra["spark.ui.retainedJobs"]) == ("local[*]", "false", "7")
        assert extra["spark.driver.extraJavaOptions"] == f"{ONE_COMPILER} -Xmx1g", "Java takes the last one"
        return started

    monkeypatch.setattr(runtime, "LocalSpark", local)
    monkeypatch.setenv("RECOURSE_SPARK__MASTER", "spark://elsewhere:7077")
    user = {"spark.driver.extraJavaOptions": "-Xmx1g", "spark.ui.retainedJobs": "7"}
    monkeypatch.setenv("RECOURSE_SPARK__EXTRA", json.dumps(user))
    return started


@pytest.fixture
def life(tmp_path: Path, declare: Declare, spark: MemoryRuntime, monkeypatch: pytest.MonkeyPatch) -> Life:
    """A stream after two batches, with state that Spark reads as `FIGURES` and `ENTRIES`."""
    made = Life.begin(tmp_path)
    declare(made.stream)
    for number in range(2):
        made.batch(number)

    def figures(_: object, checkpoint: Checkpoint, batch: int | None) -> tuple[int, list[StoreFigures]]:
        return checkpoint.last_committed if batch is None else batch, [FIGURES]  # type: ignore[return-value]

    def entries(_: object, __: Checkpoint, key: str | Mapping[str, Any], ___: int | None) -> list[dict[str, Any]]:
        return ENTRIES.get(key if isinstance(key, str) else key["user"], [])

    monkeypatch.setattr(operator_state, "figures", figures)
    monkeypatch.setattr(operator_state, "entries_of", entries)
    (made.checkpoint().folder / "state" / "0").mkdir(parents=True)
    return made


def test_the_stores_of_a_stream_are_listed_with_their_figures(life: Life, run: Run, spark: MemoryRuntime) -> None:
    [row] = run.json("state", "list")
    assert row == {
        "stream": life.stream.name,
        "batch": 1,
        "operator": 0,
        "kind": STORE.kind,
        "name": "last",
        "partitions": 4,
        "columns": {"key": "struct<user:string>"},
        "rows": 1200,
        "bytes": 2048,
        "fullest": 800,
        "skew": 2.67,
        "before": 1,
        "rows_before": 1201,
    }
    printed = run.ended(0, "state", "list", life.stream.name, "--batch", "0").out
    assert "-1 since batch 1" in printed and "key struct<user:string>" in printed and "1,200" in printed
    assert (spark.names, spark.ends) == (["state", "state"], ["kill", "kill"])


@pytest.mark.parametrize("key", ["ada", '{"user": "ada"}'])
def test_the_entries_of_a_key_are_shown(life: Life, run: Run, key: str) -> None:
    shown = run.ended(0, "state", "show", life.stream.name, "--key", key).out
    assert shown == (
        'operator 0, last, partition 3: {"user": "ada"}\n'
        '  value: {"at": "2026-01-01 12:00:00+00:00", "tag": "b\'x\'"}\n'
    )
    value = {"at": "2026-01-01 12:00:00+00:00", "tag": "b'x'"}
    assert run.json("state", "show", life.stream.name, "--key", key) == [
        {**PLACE, "key": {"user": "ada"}, "value": value}
    ]


def test_a_key_without_entries_is_said(life: Life, run: Run) -> None:
    assert "the state has nothing of 7" in run.ended(0, "state", "show", life.stream.name, "--key", "7").err
    assert run.json("state", "show", life.stream.name, "--key", "7") == []


def test_a_stream_without_state_starts_no_spark(life: Life, run: Run, spark: MemoryRuntime) -> None:
    (life.checkpoint().folder / "state" / "0").rmdir()
    assert "no state: these streams have not run, or keep none" in run.ended(0, "state", "list").err
    assert "has no state" in run.ended(UsageError.exit_code, "state", "show", life.stream.name, "--key", "a").err
    assert spark.names == []


def test_a_value_of_the_user_takes_the_place_of_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Settings] = []
    monkeypatch.setattr(runtime, "LocalSpark", lambda settings: begun.append(settings) or MemoryRuntime())
    monkeypatch.setenv("RECOURSE_SPARK__EXTRA", json.dumps({COUNT: "true"}))
    with _spark(Settings.load()) as spark:
        spark()
    assert begun[0].spark.extra[COUNT] == "true"


def test_only_the_reports_of_py4j_are_silenced_and_the_root_logger_keeps_its_handlers(
    life: Life, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Py4J reports the end of the JVM by the root logger, from a thread of its own, so after the command's end too."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "filters", [])
    handlers = list(root.handlers)
    for _ in range(2):
        run.ended(0, "state", "list")
    report = "import logging; logging.error('Exception while sending command.')"
    exec(compile(report, "site-packages/py4j/java_gateway.py", "exec"))
    logging.error("of another library")
    assert caplog.messages == ["of another library"]
    assert root.handlers == handlers and len(root.filters) == 1
