"""`recourse streams`: what is declared, what runs, what the ledger says; from files alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from orchestration import cli
from orchestration.cli.progress import observe, observe_all, with_lag
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import LeaseBusy
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.lag import lag_of
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import HealthFacts, Space, state_of
from streaming_jobs.state.lease import Owner, acquire, take
from streaming_jobs.state.requests import STOP
from streaming_jobs.state.status import Status, write_status
from streaming_jobs.state.stream_record import BoundTable, first, load, save
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.support.worlds import NoBytes
from tests.unit.orchestration.cli.conftest import Declare, Run

WORD = StructType([StructField("word", StringType(), False), StructField("at", TimestampType())])
COUNTS = StructType([StructField("word", StringType(), False), StructField("n", LongType(), False)])


@stream(
    source=KafkaTopic("words", value=NoBytes(WORD), event_time="at", lateness="6 hours"),
    sink=DeltaTable("counts", schema=COUNTS, keys=["word"]),
    owners=["team:words"],
)
def count(words: Any) -> Any:
    """How often each word was said.

    And more of it.
    """


@stream(source=KafkaTopic("words", value=NoBytes(WORD)), sink=DeltaTable("all_words"))
def keep(words: Any) -> Any:
    """Every word."""


@pytest.fixture(autouse=True)
def settings(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """An empty home and two declared streams, `count` and `keep`; no broker answers."""
    declare(count, keep)
    for name in ("RECOURSE_HOME", "RECOURSE_KAFKA__BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name)
    return Settings.load()


@pytest.fixture
def held(settings: Settings) -> Iterator[None]:
    """The lease of `count` is held by this process."""
    lease = acquire(settings, "count", purpose="session", wait=1.0)
    yield
    lease.release()


def running(**values: object) -> Status:
    """The status of a running session."""
    now = time.time()
    status = Status("count", "running", os.getpid(), generation=1, batch=7, heartbeat=now, rows_written=90)
    status = replace(status, started_at=now, committed_at=now, lag_at=now, lag_records=1200, lag_s=3.0)
    return replace(status, processed_rows_per_s=345.6, **{"watermark": "2013-01-02T03:00:00Z", **values})


def json_of(run: Run, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """The list that a command of `recourse streams` prints as JSON."""
    printed = run("streams", *arguments, "-o", "json")
    assert printed.code == code and isinstance(printed.value, list)
    return list(printed.value)


def test_list_prints_every_stream(run: Run) -> None:
    streams = json_of(run, "list")
    assert [(f["stream"], f["topics"], f["tables"]) for f in streams] == [
        ("count", ["words"], ["counts"]),
        ("keep", ["words"], ["all_words"]),
    ]
    text = run("streams", "list").out
    assert "How often each word was said." in text
    assert "And more of it" not in text


LOUD = KafkaTopic("loud", value=Json({"word": "string"}))


@stream(
    source=DeltaSource("all_words", schema=LOUD.records.schema),
    sink={"told": DeltaTable("told"), "loud": KafkaSink(LOUD)},
)
def tell(words: Any) -> Any:
    """Nothing."""


def test_list_prints_all_that_a_stream_reads_and_writes(declare: Declare, run: Run) -> None:
    declare(count, keep, tell)
    lines = run("streams", "list").out.split("\n")
    assert lines[0].split() == ["stream", "reads", "writes", "trigger", "description"]
    (line,) = [line for line in lines if line.startswith("tell")]
    assert "table all_words" in line and "told, topic loud" in line


def test_run_of_a_stream_that_another_process_runs_says_which_and_what_to_do(
    held: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orchestration.cli.preparations.broker_for_command", lambda settings: nullcontext())
    monkeypatch.setattr(
        "orchestration.cli.children.session_driver", lambda *_, **__: SimpleNamespace(start=lambda _: None)
    )
    monkeypatch.setattr("orchestration.cli.children.attend", lambda *_: LeaseBusy.exit_code)
    assert cli.main(["streams", "run", "count"]) == LeaseBusy.exit_code
    told = capfd.readouterr().err
    assert f"REC-011 stream count is held by process {os.getpid()} (session, since " in told
    assert "next: stop it first: recourse streams stop count" in told


def test_describe_prints_the_topology_as_text_and_the_schemas_as_json(run: Run) -> None:
    text = run("streams", "describe", "count").out
    assert "<- topic words as words, watermark at - 6 hours" in text
    assert "-> table counts (primary, upsert by word)" in text
    assert "stream keep" not in text
    (description,) = json_of(run, "describe", "count")
    assert description["sinks"][0]["columns"][1] == {"name": "n", "type": "bigint", "nullable": False}
    assert description["sources"][0]["lateness"] == "6 hours"


@pytest.mark.parametrize("command", ["describe", "status", "stop", "run", "ledger"])
def test_an_unknown_stream_is_a_usage_error(run: Run, command: str) -> None:
    assert "no stream is named 'nobody'" in run.said("streams", command, "nobody")


def test_status_where_nothing_ever_ran_is_an_error_that_names_the_home(settings: Settings, run: Run) -> None:
    count, keep = json_of(run, "status", code=1)
    assert count["state"] == keep["state"] == "never started"
    assert count["live"] is False
    assert count["home"] == str(settings.home.absolute())
    code, _, said = run("streams", "status")
    assert code == 1 and f"home {settings.home.absolute()}: none of these streams has ever run here" in said


@pytest.mark.usefixtures("held")
def test_status_of_a_running_stream(settings: Settings, run: Run) -> None:
    write_status(settings, running())
    (status,) = json_of(run, "status", "count")
    assert (status["state"], status["live"], status["batch"], status["lag_records"]) == ("running", True, 7, 1200)
    assert (status["verdict"], status["reasons"], status["recoveries"]) == ("well", [], 0)
    assert status["last_committed_batch"] == 7
    assert status["rows_written_since_session_began"] == status["rows_written"] == 90
    assert status["holder_pid"] == os.getpid()
    printed = run("streams", "status")
    assert printed.code == 0, "keep has never run, which is not red"
    row = next(line for line in printed.out.splitlines() if line.startswith("count")).split()
    assert row[:8] == ["count", "running", "well", "0", "7", "346", "1,200", "3"]


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"heartbeat": 1.0}, "silent"),
        ({"state": "failed", "error": {"code": "REC-020", "found": "x"}}, "failed"),
        ({"error": {"code": "REC-020", "found": "x"}}, "failing"),
        ({"started_at": 1.0, "committed_at": 2.0}, "stuck"),
        ({"lag_s": 3600.0}, "late"),
    ],
)
def test_status_fails_and_names_what_is_red(
    settings: Settings, run: Run, changes: dict[str, object], word: str
) -> None:
    write_status(settings, replace(running(), **changes))  # type: ignore[arg-type]
    (status,) = json_of(run, "status", "count", code=1)
    assert (status["verdict"], status["red"]) == ("red", True)
    assert [reason["word"] for reason in status["reasons"]] == [word]
    code, shown, _ = run("streams", "status")
    assert code == 1 and f"red: {word}" in shown


def test_status_shows_warnings_also_when_the_session_is_over(settings: Settings, run: Run) -> None:
    write_status(settings, running(state="stopped", warnings=["the watermark dropped records that came late"]))
    assert "count: the watermark dropped records that came late" in run("streams", "status", "count").err


def test_status_shows_a_dead_session_as_dead(settings: Settings, run: Run) -> None:
    write_status(settings, running(lag_at=time.time() - 300))
    (status,) = json_of(run, "status", "count", code=1)
    assert (status["state"], status["live"], status["holder_pid"]) == ("dead", False, None)
    assert status["lag_age_s"] == pytest.approx(300, abs=30)
    printed = run("streams", "status", "count")
    assert printed.code == 1
    assert "1,200 (5 min ago)" in printed.out, "no broker can be asked, so the figure says its age"
    assert "ended without saying so" in printed.err


@pytest.mark.parametrize(("holds", "shown"), [(True, 1200), (False, 1300)])
def test_the_ends_of_the_topics_are_looked_up_unless_a_driver_does(
    request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch, holds: bool, shown: int
) -> None:
    if holds:
        request.getfixturevalue("held")
    write_status(settings, running())
    monkeypatch.setattr(
        "streaming_jobs.runtime.lag.lag_now", lambda *_: {"count": lag_of(2e9, {"words": {0: 1300}}, 2e9)}
    )
    streams = Topology.of_settings(settings).select(["count"])
    (seen,) = with_lag(settings, streams, observe_all(settings, ["count"]))
    assert seen.status is not None and (seen.live, seen.status.lag_records) == (holds, shown)


def test_status_of_one_stream_shows_the_size_of_its_state_by_operator(settings: Settings, run: Run) -> None:
    operators = [{"name": "dedupe", "rows": 1200, "mb": 1.5}]
    write_status(settings, running(state="stopped", state_operators=operators, state_skew=2.25))
    shown = run("streams", "status", "count").err
    assert shown.count("count: dedupe keeps 1,200 rows, 1.5 MB in memory") == 1
    assert "count: skew 2.25 (fullest partition of the state : average one)" in shown
    assert "dedupe" not in run("streams", "status", "count", "count").err


def test_status_shows_why_a_stream_failed(settings: Settings, run: Run) -> None:
    error = {"code": "REC-022", "found": "offsets 5 to 9 of words are gone", "next": "recourse plan"}
    write_status(settings, running(state="failed", error=error))
    code, _, said = run("streams", "status", "count")
    assert code == 1 and "REC-022 offsets 5 to 9 of words are gone\n  next: recourse plan" in said


def test_status_names_the_recovery_at_work(settings: Settings, run: Run) -> None:
    write_status(settings, running(state="stopped"))
    STOP.ask_for(settings, "count", "count-0007")
    with take(settings, "count", purpose="recovery count-0007"):
        (status,) = json_of(run, "status", "count")
        assert (status["state"], status["verdict"]) == ("recovering", "recovering")
        code, _, said = run("streams", "status", "count")
    assert code == 0 and "count: is being recovered by plan count-0007 since 2" in said
    assert "until it is started again" not in said


NOBODY = Owner(2**22 + 1, 0.0, None, None, 0.0, "session")


@pytest.mark.parametrize(
    ("status", "owner", "expected"),
    [
        (None, None, "never started"),
        (None, NOBODY, "starting"),
        (Status("s", "running", pid=1, heartbeat=100), None, "dead"),
        (Status("s", "stopped", pid=1, heartbeat=100), None, "stopped"),
        (Status("s", "failed", pid=1, heartbeat=100), None, "failed"),
        (Status("s", "stopped", pid=1, heartbeat=100), NOBODY, "starting"),
        (Status("s", "idle", pid=NOBODY.pid, heartbeat=100), NOBODY, "idle"),
        (Status("s", "running", pid=NOBODY.pid, heartbeat=39), NOBODY, "silent"),
        (Status("s", "running", pid=NOBODY.pid, heartbeat=41), NOBODY, "running"),
        (Status("s", "stopped", pid=NOBODY.pid, heartbeat=39), NOBODY, "stopped"),
        (Status("s", "stopped", pid=1, heartbeat=39), replace(NOBODY, purpose="accept"), "stopped"),
        (Status("s", "running", pid=1, heartbeat=39), replace(NOBODY, purpose="recovery p"), "recovering"),
    ],
)
def test_the_state_shown_needs_status_and_lease_to_agree(
    status: Status | None, owner: Owner | None, expected: str
) -> None:
    seen = HealthFacts("s", 100.0, status, owner and replace(owner, since=99.0), "driver" if owner else None)
    assert state_of(seen, stale_after=60.0) == expected


def test_a_driver_of_which_only_the_jvm_lives_is_dead() -> None:
    assert state_of(HealthFacts("s", 100.0, Status("s", "running", pid=NOBODY.pid), NOBODY, "jvm"), 60.0) == "dead"


def test_stop_leaves_the_marker_for_keepalive_also_when_nothing_runs(settings: Settings, run: Run) -> None:
    (result,) = json_of(run, "stop", "count")
    assert result["stopped"] is True
    assert (settings.state / "count" / "stop").exists()
    assert observe(settings, "count").asked_to_stop


@pytest.mark.usefixtures("held")
def test_stop_fails_after_its_deadline_while_the_session_goes_on(settings: Settings, run: Run) -> None:
    write_status(settings, running())
    code, shown, said = run("streams", "stop", "count", "--timeout", "0.2")
    assert code == 1 and "count: still running after 0.2 s" in shown and "next:" in said


@pytest.mark.usefixtures("held")
def test_stop_is_done_when_the_session_says_so_though_it_runs_other_streams(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    write_status(settings, running())

    def session_obeys(_: float) -> None:
        assert (settings.state / "count" / "stop").exists(), "waiting before anything was asked"
        write_status(settings, running(state="stopped"))

    monkeypatch.setattr(time, "sleep", session_obeys)
    assert run("streams", "stop", "count")[:2] == (0, "count: stopped\n")


def commit(table: Path, version: int, entry: LedgerEntry | None, *actions: dict[str, object]) -> None:
    """One commit in a table's log."""
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    info: dict[str, object] = {"timestamp": 1_700_000_000_000 + version, "operation": "WRITE"}
    if entry:
        info["userMetadata"] = entry.encode()
    lines = [json.dumps(action) for action in ({"commitInfo": info}, *actions)]
    (log / f"{version:020d}.json").write_text("\n".join(lines) + "\n")


def entry(batch: int, table: str = "counts") -> LedgerEntry:
    offsets = OffsetRange("words", "topic-id", {0: 10 * batch, 1: 0}, {0: 10 * batch + 10, 1: 0})
    return LedgerEntry(
        "batch",
        "count",
        table,
        1,
        batch,
        (offsets,),
        {table: 9},
        {"count_dead_letters": 5},
        CodeVersion("abcdef0123", "1.0"),
    )


def test_ledger_prints_the_newest_entries_first(settings: Settings, run: Run) -> None:
    for version in range(5):
        commit(settings.tables / "counts", version, entry(version) if version != 2 else None)
    entries = json_of(run, "ledger", "count", "--limit", "3")
    assert [f["version"] for f in entries] == [4, 3, 1]
    assert entries[0]["offsets"] == {
        "words": {"id": "topic-id", "start": {"0": 40, "1": 0}, "end": {"0": 50, "1": 0}, "records": 10}
    }
    assert entries[0]["at"] == "2023-11-14T22:13:20.004+00:00"
    text = run("streams", "ledger", "count", "--limit", "1").out
    assert "words 0:40-50" in text and "g0001" in text


def test_ledger_reads_another_table_of_the_stream(settings: Settings, run: Run) -> None:
    commit(settings.tables / "count_dead_letters", 0, entry(3, "count_dead_letters"))
    (printed,) = json_of(run, "ledger", "count", "--sink", "count_dead_letters")
    assert printed["batch"] == 3
    assert "its tables are: counts, count_dead_letters" in run.said("streams", "ledger", "count", "--sink", "all_words")


def test_ledger_goes_on_in_the_file_beside_the_state_where_the_log_was_shortened(settings: Settings, run: Run) -> None:
    """500 versions are minutes at some rates; what the code was an hour ago has to be seen all the same."""
    file = ledger_file(settings, "count")
    codes = {0: "0ld0", 1: "0ld0", 2: "bad1", 3: "bad1", 4: "bad1", 5: "new2", 6: "new2"}
    made = {batch: replace(entry(batch), code=CodeVersion(code, "1.0")) for batch, code in codes.items()}
    for batch in range(7):
        file.append(made[batch], {"counts": batch})
    for batch in (4, 5, 6):
        commit(settings.tables / "counts", batch, made[batch])
    entries = json_of(run, "ledger", "count")
    assert [(f["batch"], f["version"], f["from"]) for f in entries] == [
        *((batch, batch, "table log") for batch in (6, 5, 4)),
        *((batch, batch, "ledger file") for batch in (3, 2, 1, 0)),
    ]
    assert len(json_of(run, "ledger", "count", "--limit", "5")) == 5
    changes = json_of(run, "ledger", "count", "--code-changes")
    assert [(f["batch"], f["code"]["hash"]) for f in changes] == [(5, "new2"), (2, "bad1"), (0, "0ld0")]
    assert "the log of counts has been shortened" in run("streams", "ledger", "count").err


def test_ledger_of_a_table_without_batches_is_empty(run: Run) -> None:
    assert json_of(run, "ledger", "keep") == []
    assert "no batch is in the ledger of all_words" in run("streams", "ledger", "keep").err


def test_accept_records_the_commit_and_the_reason(settings: Settings, run: Run) -> None:
    save(settings, replace(first("count"), tables=(BoundTable("counts", "id", "primary"),)))
    arguments = ["streams", "accept", "count", "--table", "counts", "--version", "12"]
    assert run(*arguments).code == 2, "a reason is required"
    assert run(*arguments, "--why", "removed on request").code == 2, "there is no such version"
    commit(settings.tables / "counts", 12, None, {"remove": {"path": "a.parquet", "dataChange": True}})
    assert run(*arguments, "--why", "removed on request").code == 0
    record = load(settings, "count")
    assert record is not None
    assert record.accepts("counts") == {12}
    assert record.accepted[0].why == "removed on request"
    assert run("streams", "accept", "count", "--table", "none", "--version", "1", "--why", "x").code == 2


def test_a_disk_that_fills_up_is_yellow_with_the_folder(
    settings: Settings, held: None, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    space = Space("yellow", "1,000 MB are free on the disk of /data")
    monkeypatch.setattr("streaming_jobs.state.health.disk_space", lambda _: space)
    write_status(settings, running())
    code, shown, said = run("streams", "status", "count")
    assert code == 0 and "yellow: disk" in shown
    assert "count: 1,000 MB are free on the disk of /data" in shown + said
