"""Scenarios that damage one thing on purpose and check that the next start refuses it in the right words.

Each runs a real driver on a home whose streams have read everything. State and tables are restored after each from a
copy that was taken before; the two damages of the topic are last, since a topic has no copy. Most need no JVM:
preflight refuses before there is one.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable

from streaming_jobs.errors import LeaseBusy, PermanentError
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import TOPIC
from streaming_jobs.examples.flights.feeder import PARTITIONS, feed
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import holder
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.sessions import Tell

STREAM = "flights_clean"
_REFUSED_WITHIN = 60.0
_MORE = 500
_POLL = 0.05
_ERROR = re.compile(r'(?:error|found)="(?:REC-\d+ )?(?P<found>.*?)(?:\\n  next: |" next=")(?P<next>.*?)"(?: |$)')
"""An error in a line of the driver's log, in the form of a stream's failure or of a session's."""


@dataclass(frozen=True)
class Scenario:
    """A damage, and the exit code and words that the next driver has to end with."""

    name: str
    damage: Callable[[Home], None]
    says: tuple[str, ...]
    exit_code: int = PermanentError.exit_code


@dataclass(frozen=True)
class DamageOutcome:
    name: str
    ok: bool
    exit_code: int | None
    said: str
    next_step: str


def run_scenarios(home: Home, tell: Tell) -> list[DamageOutcome]:
    """Run all scenarios; `home` has a broker, and no stream runs in it. The topic cannot be used afterwards."""
    outcomes = [_second_driver(home)]
    for scenario in SCENARIOS:
        with _put_back(home):
            scenario.damage(home)
            outcomes.append(_start(home, scenario))
    for scenario in ON_THE_TOPIC:
        scenario.damage(home)
        outcomes.append(_start(home, scenario))
    for outcome in outcomes:
        tell(f"{outcome.name}: {'refused' if outcome.ok else 'NOT as it should be'}: {outcome.said}")
    return outcomes


def _start(home: Home, scenario: Scenario) -> DamageOutcome:
    log = home.settings.logs / f"scenario-{scenario.name.replace(' ', '-')}.log"
    driver = DriverProcess.start((STREAM,), home.environment(), log)
    try:
        code = driver.wait(_REFUSED_WITHIN)
        refusal, next_step = _refusal(driver)
    finally:
        driver.end()
    ok = code == scenario.exit_code and all(words in refusal for words in scenario.says) and bool(next_step)
    return DamageOutcome(scenario.name, ok, code, refusal, next_step)


def _second_driver(home: Home) -> DamageOutcome:
    """Start a second driver beside a first one, which holds its lease before it has a JVM."""
    first = DriverProcess.start((STREAM,), home.environment(), home.settings.logs / "scenario-first-driver.log")
    try:
        deadline = time.monotonic() + _REFUSED_WITHIN
        while holder(home.settings, STREAM) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        held = f"stream {STREAM} is held by process {first.pid}"
        second = Scenario("second driver", lambda _: None, (held,), LeaseBusy.exit_code)
        return _start(home, second)
    finally:
        first.end()


def _refusal(driver: DriverProcess) -> tuple[str, str]:
    """Text and next step of the first error in the driver's last lines."""
    line = next((line for line in driver.words().splitlines() if "level=error" in line), driver.words(1))
    match = _ERROR.search(line)
    return (match["found"], match["next"]) if match else (line, "")


@contextmanager
def _put_back(home: Home) -> Iterator[None]:
    backup = home.folder / "kept"
    folders = {home.settings.state_folder: backup / "state", home.settings.tables_folder: backup / "tables"}
    for folder, copy in folders.items():
        shutil.copytree(folder, copy)
    try:
        yield
    finally:
        for folder, copy in folders.items():
            shutil.rmtree(folder)
            copy.rename(folder)
        backup.rmdir()


def _checkpoint(home: Home) -> Path:
    return Path(str(home.checkpoint(STREAM).folder))


def _last(home: Home) -> int:
    planned = home.checkpoint(STREAM).last_planned
    assert planned is not None, "the stream has read everything before"
    return planned


def _delete_checkpoint(home: Home) -> None:
    shutil.rmtree(_checkpoint(home))


def _truncate_checkpoint(home: Home) -> None:
    (_checkpoint(home) / "offsets" / str(_last(home))).write_text("v1\n")


def _old_checkpoint(home: Home) -> None:
    last = _last(home)
    for log in ("offsets", "commits"):
        (_checkpoint(home) / log / str(last)).unlink()


def _restore_table(home: Home) -> None:
    table = DeltaTable(home.settings.tables_folder / STREAM)
    table.restore(table.version() - 1)


def _cut_topic(home: Home) -> None:
    """Send more flights, and delete the first of them before anybody has read them."""
    bootstrap = bootstrap_servers(home.settings)
    topics = Topics.of(home.settings.kafka, bootstrap)
    before = topics.offsets(TOPIC)
    feed(home.settings, rate=None, share=min(1.0, (before.total + _MORE) / dataset.TOTAL))
    admin = AdminClient(client_config(home.settings.kafka, bootstrap))
    grown = [partition for partition, end in topics.offsets(TOPIC).latest.items() if end > before.latest[partition]]
    cuts = [TopicPartition(TOPIC, partition, before.latest[partition] + 1) for partition in grown]
    for future in admin.delete_records(cuts).values():
        future.result(timeout=home.settings.kafka.timeout.total_seconds())


def _recreate_topic(home: Home) -> None:
    topics = Topics.of(home.settings.kafka, bootstrap_servers(home.settings))
    topics.delete(TOPIC)
    topics.create(TOPIC, PARTITIONS)


SCENARIOS = (
    Scenario("checkpoint deleted", _delete_checkpoint, ("the checkpoint has no batch", "missing or an old copy")),
    Scenario("checkpoint truncated", _truncate_checkpoint, ("the checkpoint is damaged", "cannot be read")),
    Scenario("checkpoint of an old copy", _old_checkpoint, ("missing or an old copy",)),
    Scenario("table restored by hand", _restore_table, ("RESTORE", "was not written by stream flights_clean")),
)
ON_THE_TOPIC = (
    Scenario("topic truncated past the position", _cut_topic, ("are gone", "were never read")),
    Scenario("topic deleted and made anew", _recreate_topic, ("was deleted and made anew",)),
)
