"""Each stream of docs/operators.md, run with an error in its function: previewed, recovered and put back."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from deltalake import DeltaTable

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import topic_records
from tests.support import ROOT
from tests.support.driver import command, produce
from tests.support.operator_events import JOINED, TRUTHS, Change, Event, changes, events, keyed, seen, time
from tests.support.pages import code_of
from tests.support.topic_reader import committed

SOME, FEWER = "id % 7 <> 0", "id % 5 <> 0"
ERRORS = {
    "large_events": ('F.col("v") * 2', 'F.col("v") * 3'),
    "single_events": ('F.col("v") / 10', 'F.col("v") / 11'),
    "events_by_size": ("v >= 50", "v >= 40"),
    "both_kinds": ('F.lit("event")', 'F.lit("evnt")'),
    "newest": ('select("k", "id"', 'selectExpr("k", "id + 1 AS id"'),
    **dict.fromkeys(
        ("totals", "totals_twice", "minutes", "hops"), ("events.groupBy", f'events.where("{SOME}").groupBy')
    ),
    "sessions": ("k IS NOT NULL", f"k IS NOT NULL AND {SOME}"),
    **dict.fromkeys(("numbered", "just_before", "priced"), ("price(events)", f'price(events.where("{SOME}"))')),
    "once": ("events.drop", f'events.where("{SOME}").drop'),
    **dict.fromkeys(("pairs", "unpaired"), ("near(events,", f'near(events.where("{SOME}"),')),
    **dict.fromkeys(("paired", "others_paired", "all_paired"), ("near(events,", f'near(events.where("{FEWER}"),')),
    "pairs_by_time": ("join(events,", f'join(events.where("{SOME}"),'),
    "events_by_key": ('select("k", "id")', 'selectExpr("k", "id + 1 AS id")'),
    "joined_tables": ('alias("offset"), "v")', 'alias("offset"), F.expr("v + 1").alias("v"))'),
    "orders_with_names": ("id IS NOT NULL", "id IS NOT NULL AND id <> '3'"),
}
"""What stands in the function, and the error in its place."""
BEFORE = 50
"""The records before the error is deployed."""
CI = ("hops",)
TO_TOPIC = "events_by_key"
"""The stream that writes a topic; the others write tables."""
TOPICS = ("events", "others", "left_table", "right_table", "orders_by_id", "customers_by_id", TO_TOPIC)
PROCESSORS = ("numbered", "just_before", "priced", *JOINED)
"""The JVM's own worker of a processor imports the project's module, whose folder a warm JVM does not know."""


class Project:
    """The page's streams as a project."""

    def __init__(self, folder: Path, stream: str, bootstrap: str) -> None:
        self.folder, self.stream, self.bootstrap = folder, stream, bootstrap
        (folder / "code").mkdir()
        self.settings = Settings.load({"home": folder})

    def deploy(self, *, wrong: bool = False) -> None:
        code = code_of("operators.md")
        if wrong:
            before, function, after = code.partition(f"def {self.stream}(")
            right, error = ERRORS[self.stream]
            assert right in after.partition("\n@stream")[0], "the function has it"
            code = before + function + after.replace(right, error, 1)
        (self.folder / "code" / "operator_flows.py").write_text(code)

    def sent(self) -> Sequence[Event] | Sequence[Change]:
        """The records of the stream's topics, the same each time."""
        seed = 100 + list(ERRORS).index(self.stream)
        return changes(self.stream, seed) if self.stream in JOINED else events(seed)

    def truth(self) -> dict[str, Counter[Any]]:
        if self.stream == TO_TOPIC:
            return {TO_TOPIC: keyed(cast("list[Event]", self.sent()))}
        truths: dict[str, Callable[[Any], dict[str, Counter[Any]]]] = {**TRUTHS, **JOINED}
        return truths[self.stream](self.sent())

    def send(self, sent: Sequence[Event] | Sequence[Change]) -> None:
        for each in sent:
            value = None if each.value is None else json.dumps(each.value, default=datetime.isoformat).encode()
            if isinstance(each, Change):
                produce(self.bootstrap, each.topic, [(each.key.encode(), value)], partition=each.partition)
            else:
                options = {"partition": each.id % 2, "timestamp": int(time(each.at).timestamp() * 1000)}
                produce(self.bootstrap, each.topic, [(None, value)], **options)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        environment = {
            **os.environ,
            "RECOURSE_HOME": str(self.folder),
            "RECOURSE_FLOWS": '["operator_flows"]',
            "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap,
            "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "60",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder / "code"), str(ROOT)]),
        }
        done = command(self.folder, environment, *arguments, prefix=("env",) if self.stream in PROCESSORS else ())
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout or done.stderr

    def read(self) -> None:
        self("streams", "run", self.stream, "--trigger", "available-now")

    def rows(self) -> dict[str, Counter[Any]]:
        """The rows of the stream's tables, or the records of its topic."""
        if self.stream == TO_TOPIC:
            return {TO_TOPIC: self._records()}
        return {name: seen(self._table(name)) for name in self.truth()}

    def _records(self) -> Counter[Any]:
        """Those that are not void."""
        record = topic_records.load(self.settings, TO_TOPIC)
        void = [] if record is None else record.holding_ranges()
        found: Counter[Any] = Counter()
        for message in committed(self.bootstrap, TO_TOPIC, 2):
            place, offset = message.partition(), message.offset() or 0
            if not any(each.partition == place and each.begin <= offset < each.end for each in void):
                key = message.key()
                found[None if key is None else key.decode(), json.loads(message.value() or b"")["id"]] += 1
        return found

    def _table(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = DeltaTable(self.settings.tables / name).to_pyarrow_table().to_pylist()
        return rows


@pytest.fixture
def topics(broker: Broker) -> Iterator[str]:
    bootstrap = broker.start()
    admin = Topics.of(Settings.load({}).kafka, bootstrap)
    for name in TOPICS:
        admin.create(name, 2)
    yield bootstrap
    for name in (*TOPICS, f"__recourse.{TO_TOPIC}.{TO_TOPIC}"):
        if admin.describe(name) is not None:
            admin.delete(name)


@pytest.mark.parametrize(
    "stream", [name if name in CI else pytest.param(name, marks=pytest.mark.long) for name in ERRORS]
)
def test_an_operator_is_right_again_after_an_error_and_wrong_again_after_the_undo(
    topics: str, tmp_path: Path, stream: str
) -> None:
    project = Project(tmp_path, stream, topics)
    sent, truth = project.sent(), project.truth()
    project.deploy()
    project.send(sent[:BEFORE])
    project.read()
    savepoint = json.loads(project("savepoints", "create", stream, "--output", "json"))["savepoint"]

    project.deploy(wrong=True)
    project.send(sent[BEFORE:-2])
    project.read()
    project.send(sent[-2:])
    project.read()
    wrong = project.rows()
    assert wrong != truth

    project.deploy()
    preview = partial(project, "preview", stream, "--from-savepoint", savepoint, "--output", "json")
    if stream == TO_TOPIC:
        assert "give a copy of the stream a Delta table as its sink" in preview(code=2)
    else:
        assert json.loads(preview(code=10))["verdict"] == "different"
    assert project.rows() == wrong, "a preview changes nothing"
    plan = json.loads(project("recover", "plan", stream, "--savepoint", savepoint, "--output", "json"))
    project("recover", "apply", plan["id"], "--yes")
    assert project.rows() == truth
    assert "wrong" not in project("verify", stream, "--finished")

    project("recover", "undo", plan["id"], "--yes")
    assert project.rows() == wrong


def test_every_stream_of_the_page_has_an_error() -> None:
    assert ERRORS.keys() == {*TRUTHS, *JOINED, TO_TOPIC}


@pytest.mark.parametrize("stream", [name for name, (_, error) in ERRORS.items() if " % " in error])
def test_an_error_that_leaves_records_out_changes_the_rows(tmp_path: Path, stream: str) -> None:
    sent = cast("list[Event]", Project(tmp_path, stream, "").sent())
    factor = 7 if SOME in ERRORS[stream][1] else 5
    left = [event for n, event in enumerate(sent) if n < BEFORE or event.topic == "others" or event.id % factor]
    assert TRUTHS[stream](left) != TRUTHS[stream](sent)
