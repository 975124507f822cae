"""Redrives on a real broker: beside a running stream, killed at each border, verified, recovered over and undone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import pytest
from confluent_kafka import Producer

from reprocessing.redrive.redrive import RedriveReport, redrive
from reprocessing.redrive.selection import choice
from reprocessing.slices.rebuild import Tools, Waits, rebuild
from streaming_jobs.runtime.sliceable import sliceable
from tests.broker.conftest import BenchFactory
from tests.broker.test_slices import running
from tests.support import ROOT
from tests.support.driver import Bench, command, driver, finished, rows, variables
from tests.support.redrive_flows import hourly, limited, priced
from tests.support.waiting import wait_for

FLOWS = "tests.support.redrive_flows"
PRICES = [b"1", b"0.5", b"70", b"2.5", b"99.5", b"3", b"80", b"{"]
"""Of each 8 records: 3 with a fraction, 2 above 50 without one, 1 that no code reads."""


def send(bench: Bench, topic: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": bench.bootstrap, "enable.idempotence": True})
    for number in numbers:
        price = PRICES[number % 8]
        value = price if price == b"{" else b'{"id": %d, "price": %s}' % (number, price)
        producer.produce(topic, key=b"k", value=value, partition=number % 2)
    assert producer.flush(30) == 0


def begun(bench: BenchFactory, topic: str, count: int = 40) -> Bench:
    """A home whose stream has read the records with the wrong code."""
    made = bench()
    made.topics.create(topic, 2)
    send(made, topic, range(count))
    made.run(priced(topic, "wrong"))
    assert len(rows(made.settings, "priced_dead_letters")) == count // 2
    assert len(rows(made.settings, "priced_quarantine")) == count // 4
    return made


def environment(bench: Bench, topic: str, **further: str) -> dict[str, str]:
    return {**variables(bench.settings.home, bench.bootstrap, FLOWS), "REDRIVE_TOPIC": topic, **further}


def recourse(bench: Bench, topic: str, *arguments: str, **further: str) -> subprocess.CompletedProcess[str]:
    return command(ROOT, environment(bench, topic, **further), *arguments)


def done(bench: Bench, topic: str, *arguments: str) -> Any:
    ended = recourse(bench, topic, *arguments, "-o", "json")
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def check(bench: Bench, topic: str, count: int) -> None:
    """Every record is in one place, as if the right code had run from the start; `verify` agrees."""
    wanted = {(n, float(PRICES[n % 8])) for n in range(count) if PRICES[n % 8] != b"{"}
    there = rows(bench.settings, "priced")
    assert {(r["id"], r["price"]) for r in there} == wanted and len(there) == len(wanted)
    assert all((r["p"], r["o"]) == (r["id"] % 2, r["id"] // 2) for r in there)
    letters = rows(bench.settings, "priced_dead_letters")
    assert sorted((each["partition"], each["offset"]) for each in letters) == sorted(
        (n % 2, n // 2) for n in range(count) if PRICES[n % 8] == b"{"
    )
    assert not rows(bench.settings, "priced_quarantine")
    verified = recourse(bench, topic, "verify")
    assert verified.returncode == 0, verified.stdout


def test_a_running_stream_takes_redrives_that_killed_commands_have_left(bench: BenchFactory, topic: str) -> None:
    made = begun(bench, topic)
    with running(made, priced(topic, "right")):
        killed = recourse(made, topic, "deadletters", "replay", "priced", RECOURSE_CRASH="priced:redrive_asked:0")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        wait_for(lambda: len(rows(made.settings, "priced_dead_letters")) == 5, "the driver's commit")
        report = done(made, topic, "quarantine", "replay", "priced")
        assert (report["outcome"], report["outcomes"]) == ("committed", {"row": 10})
        send(made, topic, range(40, 48))
        wait_for(lambda: len(rows(made.settings, "priced")) >= 42, "the records after it")
    check(made, topic, 48)
    again = done(made, topic, "deadletters", "replay", "priced")
    assert (again["outcome"], again["outcomes"]) == ("nothing has changed", {"dead again": 6})
    listed = done(made, topic, "deadletters", "list", "--redrives")
    assert [(each["state"], each["outcomes"]) for each in listed] == [("committed", {"row": 15, "dead again": 5})]


@pytest.mark.long
@pytest.mark.parametrize("point", ["redrive_staged:0", "redrive_next:0", "redrive_next:1", "redrive_ended:0"])
def test_a_command_that_is_killed_without_a_driver_is_simply_run_again(
    bench: BenchFactory, topic: str, point: str
) -> None:
    made = begun(bench, topic)
    killed = recourse(made, topic, "deadletters", "replay", "priced", RECOURSE_CRASH=f"priced:{point}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done(made, topic, "deadletters", "replay", "priced")
    done(made, topic, "quarantine", "replay", "priced")
    check(made, topic, 40)


@pytest.mark.long
@pytest.mark.parametrize("point", ["redrive_next:0", "redrive_next:1", "redrive_ended:0"])
def test_a_driver_that_is_killed_within_a_redrive_is_followed_by_one_that_ends_it(
    bench: BenchFactory, topic: str, point: str
) -> None:
    made = begun(bench, topic)
    killed = recourse(made, topic, "deadletters", "replay", "priced", RECOURSE_CRASH="priced:redrive_asked:0")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    send(made, topic, range(40, 48))
    own = {"REDRIVE_TOPIC": topic, "RECOURSE_CRASH": f"priced:{point}"}
    arguments = ("--streams", "priced", "--trigger", "available-now")
    code, output = finished(driver(made.settings, made.bootstrap, *arguments, flows=FLOWS, environment=own))
    assert code == -signal.SIGKILL, output[-2000:]
    made.run(priced(topic, "right"))
    done(made, topic, "quarantine", "replay", "priced")
    check(made, topic, 48)


@pytest.mark.long
def test_a_recovery_over_redriven_records_doubles_none_and_its_undo_brings_them_back(
    bench: BenchFactory, topic: str
) -> None:
    made, rng = begun(bench, topic), random.Random(3)
    parts = [f"{topic}/0", f"{topic}/1:0-9", f"{topic}/1:10-19"]
    rng.shuffle(parts)
    for part in parts:
        done(made, topic, "deadletters", "replay", "priced", "--offsets", part)
    done(made, topic, "quarantine", "replay", "priced", "--rule", "cheap")
    check(made, topic, 40)
    plan = done(made, topic, "recover", "plan", "priced", "--to-batch", "-1", "--max-changed", "100%")["id"]
    applied = recourse(made, topic, "recover", "apply", plan, "--yes")
    assert applied.returncode == 0, applied.stderr[-3000:]
    check(made, topic, 40)
    undone = recourse(made, topic, "recover", "undo", plan, "--yes")
    assert undone.returncode == 0, undone.stderr[-3000:]
    check(made, topic, 40)


# Windows: the slices of the records are rebuilt.

START = datetime(2026, 1, 1, tzinfo=UTC)
AMOUNTS = ["1", "0.5", "3", "2.5", "70", "4", "{", "5", "1.5", "2", "6"]
"""Of each 11 records the wrong code refuses 3 with a fraction, it raises on 1 above 50, and no code takes 1."""
COUNT = 22
LAST = START + timedelta(days=40)
NEVER = [number for number in range(COUNT) if number % 11 == 6]
DEAD = [number for number in range(COUNT) if number % 11 in (1, 3, 4, 6, 8)] + [COUNT + 1]
"""The events that the wrong code does not take; the last one is in a window that is open."""


def event(number: int) -> tuple[datetime, str]:
    """Three records an hour, on two days that are not in a row."""
    hour = number // 3
    return START + timedelta(days=hour // 4 * 3, hours=hour % 4 * 5, minutes=number % 3 * 20), AMOUNTS[number % 11]


def send_events(bench: Bench, topic: str, events: Sequence[tuple[datetime, str]], first: int = 0) -> None:
    producer = Producer({"bootstrap.servers": bench.bootstrap, "enable.idempotence": True})
    for number, (at, amount) in enumerate(events, first):
        value = amount if amount == "{" else f'{{"at": "{at:%Y-%m-%dT%H:%M:%SZ}", "amount": {amount}}}'
        producer.produce(topic, value=value.encode(), partition=number % 2)
    assert producer.flush(30) == 0


def windowed(bench: BenchFactory, topic: str) -> Bench:
    """A home whose stream has read the events with the wrong code."""
    made = bench()
    made.topics.create(topic, 2)
    send_events(made, topic, [*map(event, range(COUNT)), (LAST, "1"), (LAST, "70")])
    made.run(hourly(topic, "wrong"))
    assert len(rows(made.settings, "hourly_dead_letters")) == len(DEAD)
    return made


def check_windows(bench: Bench, left: Sequence[int], *, last: float | None = None) -> None:
    """The sums of a run in which the right code ran from the start; dead letters are those of `left`."""
    wanted: dict[datetime, float] = {}
    for number in (n for n in range(COUNT) if n not in NEVER):
        at, amount = event(number)
        wanted[at.replace(minute=0)] = wanted.get(at.replace(minute=0), 0.0) + float(amount)
    if last is not None:
        wanted[LAST] = last
    there = rows(bench.settings, "hourly")
    assert {row["begin"]: row["total"] for row in there} == wanted and len(there) == len(wanted)
    letters = [(each["partition"], each["offset"]) for each in rows(bench.settings, "hourly_dead_letters")]
    assert sorted(letters) == sorted((number % 2, number // 2) for number in left)


class Killed(BaseException):
    """Ends a redrive at a crash point."""


def test_a_redrive_that_was_killed_before_its_mark_has_each_record_of_a_window_once(
    bench: BenchFactory, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, right = windowed(bench, topic), hourly(topic, "right")
    tools = Tools(made.settings, made.topics, made.bootstrap, lambda: made.spark, waits=Waits(commit=60.0))

    def redriven(*offsets: str) -> RedriveReport:
        return redrive(tools, right, "dead letters", choice(None, None, None, None, None, offsets))

    def killed(name: str, *_: object) -> None:
        if name == "redrive_rebuilt":
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("reprocessing.redrive.redrive.crash_point", killed)
        redriven(f"{topic}/1")
    assert len(rows(made.settings, "hourly_dead_letters")) == len(DEAD), "no letter is marked before its slice is there"
    report = redriven()
    assert report.outcome == "committed" and set(report.counts) == {"rebuilt", "dead again"}
    ((still_open, why),) = report.left
    assert still_open.place == (topic, 1, 11) and "windows are open" in why and "recover plan hourly" in why
    check_windows(made, [*NEVER, COUNT + 1])


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "slice_staged:0",
        "slice_asked:0",
        "slice_linked:0",
        "slice_committed:0",
        "slice_ended:0",
        "redrive_rebuilt:0",
        "redrive_staged:0",
        "redrive_asked:0",
        "redrive_next:0",
        "redrive_ended:0",
    ],
)
def test_a_redrive_of_windows_that_is_killed_is_simply_run_again(bench: BenchFactory, topic: str, point: str) -> None:
    made = windowed(bench, topic)
    killed = recourse(made, topic, "deadletters", "replay", "hourly", RECOURSE_CRASH=f"hourly:{point}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    report = done(made, topic, "deadletters", "replay", "hourly")
    assert [each["because"].split(" until")[0] for each in report["left"]] == ["its windows are open"]
    check_windows(made, [*NEVER, COUNT + 1])
    verified = recourse(made, topic, "verify", "hourly")
    assert verified.returncode == 0, verified.stdout


@pytest.mark.long
def test_windows_are_redriven_beside_the_running_stream_and_put_back_by_a_recovery(
    bench: BenchFactory, topic: str
) -> None:
    made = windowed(bench, topic)
    before = rows(made.settings, "hourly")
    dry = done(made, topic, "deadletters", "replay", "hourly", "--dry-run")
    assert (dry["outcome"], dry["outcomes"]["rebuilt"]) == ("dry run", 8) and rows(made.settings, "hourly") == before
    with running(made, hourly(topic, "right")):
        done(made, topic, "deadletters", "replay", "hourly")
        check_windows(made, [*NEVER, COUNT + 1])
        after = [(LAST + timedelta(hours=9), "5")] * 2  # closes the last window
        send_events(made, topic, after, COUNT + 2)
        wait_for(lambda: any(row["begin"] == LAST for row in rows(made.settings, "hourly")), "the window's row")
        report = done(made, topic, "deadletters", "replay", "hourly")
        assert (report["outcomes"], report["left"]) == ({"rebuilt": 1, "dead again": len(NEVER)}, [])
        check_windows(made, NEVER, last=71.0)
    verified = recourse(made, topic, "verify", "hourly")
    assert verified.returncode == 0, verified.stdout
    plan = done(made, topic, "recover", "plan", "hourly", "--to-batch", "-1", "--max-changed", "100%")["id"]
    applied = recourse(made, topic, "recover", "apply", plan, "--yes")
    assert applied.returncode == 0, applied.stderr[-3000:]
    check_windows(made, NEVER, last=71.0)
    undone = recourse(made, topic, "recover", "undo", plan, "--yes")
    assert undone.returncode == 0, undone.stderr[-3000:]
    check_windows(made, NEVER, last=71.0)


# Quarantined rows of windows: their slices are rebuilt, and the quarantine has what is set aside of them today.

SUMS = [(0, 0, 5), (0, 1, 20), (1, 0, 60), (1, 1, 30), (80, 0, 55), (80, 1, 40), (960, 0, 20)]
"""Hour, parity and amount of each record; the rows of hours 0, 1 and 80 are written, the last window is open."""


def send_amounts(bench: Bench, topic: str, amounts: Sequence[tuple[int, int, int]]) -> None:
    producer = Producer({"bootstrap.servers": bench.bootstrap, "enable.idempotence": True})
    for hour, odd, amount in amounts:
        at = START + timedelta(hours=hour)
        value = f'{{"at": "{at:%Y-%m-%dT%H:%M:%SZ}", "amount": {amount}, "number": {odd}}}'
        producer.produce(topic, value=value.encode(), partition=odd)
    assert producer.flush(30) == 0


def with_limits(bench: BenchFactory, topic: str) -> Bench:
    """A home whose stream has set sums aside by a rule that was too strict; then a record came too late."""
    made = bench()
    made.topics.create(topic, 2)
    send_amounts(made, topic, SUMS)
    made.run(limited(topic, "wrong"))
    send_amounts(made, topic, [(1, 0, 1)])
    made.run(limited(topic, "wrong"))
    assert sums_of(made) == ({(0, 0): 5}, {(0, 1): 20, (1, 0): 60, (1, 1): 30, (80, 0): 55, (80, 1): 40})
    return made


def sums_of(bench: Bench) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """By hour and parity the sums in the table, and those in the quarantine; each is there once."""
    found = []
    for name in ("limited", "limited_quarantine"):
        there = [
            (((r["begin"] - START) // timedelta(hours=1), r["odd"]), r["total"]) for r in rows(bench.settings, name)
        ]
        found.append(dict(there))
        assert len(found[-1]) == len(there)
    return found[0], found[1]


RIGHT = ({(0, 0): 5, (0, 1): 20, (1, 1): 30, (80, 1): 40}, {(1, 0): 61, (80, 0): 55})
"""The sums with the rule of today, the late record among them."""


def test_quarantined_rows_of_windows_become_rows_of_their_rebuilt_slices_once(bench: BenchFactory, topic: str) -> None:
    made, right = with_limits(bench, topic), limited(topic, "right")
    tools = Tools(made.settings, made.topics, made.bootstrap, lambda: made.spark, waits=Waits(commit=60.0))

    def replayed(*, dry_run: bool = False) -> RedriveReport:
        return redrive(tools, right, "quarantine", choice(None, None, None, "small", None, None), dry_run=dry_run)

    before = sums_of(made)
    assert replayed(dry_run=True).counts == {"rebuilt": 4, "quarantined": 1} and sums_of(made) == before
    rebuilt = rebuild(tools, sliceable(right), f"{START:%Y-%m-%d}", None)
    assert rebuilt.quarantine is not None
    assert rebuilt.quarantine.figures == {"before": 3, "after": 1, "gone": 3, "came": 1}
    of_the_day = {key: total for key, total in RIGHT[0].items() if key[0] < 24}
    assert sums_of(made) == (of_the_day, {(1, 0): 61, (80, 0): 55, (80, 1): 40}), "a rebuilt day needs no replay"
    report = replayed()
    assert (report.outcome, report.counts, report.known) == ("committed", {"rebuilt": 1, "quarantined": 1}, 1)
    assert not report.rows and sums_of(made) == RIGHT
    assert replayed() == RedriveReport("limited", "limited_quarantine", "nothing to redrive", known=2, seconds=ANY)
    verified = recourse(made, topic, "verify", "limited")
    assert verified.returncode == 0, verified.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "slice_staged:0",
        "slice_asked:0",
        "slice_linked:0",
        "slice_committed:0",
        "slice_linked:1",
        "slice_committed:1",
        "slice_ended:0",
        "redrive_rebuilt:0",
    ],
)
def test_a_replay_of_quarantined_windows_that_is_killed_is_simply_run_again(
    bench: BenchFactory, topic: str, point: str
) -> None:
    made = with_limits(bench, topic)
    killed = recourse(made, topic, "quarantine", "replay", "limited", RECOURSE_CRASH=f"limited:{point}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done(made, topic, "quarantine", "replay", "limited")
    assert sums_of(made) == RIGHT
    verified = recourse(made, topic, "verify", "limited")
    assert verified.returncode == 0, verified.stdout


@pytest.mark.long
def test_quarantined_windows_are_redriven_beside_the_running_stream_and_put_back_by_a_recovery(
    bench: BenchFactory, topic: str
) -> None:
    made = with_limits(bench, topic)
    with running(made, limited(topic, "right")):
        report = done(made, topic, "quarantine", "replay", "limited")
        assert report["outcomes"] == {"rebuilt": 4, "quarantined": 1} and sums_of(made) == RIGHT
    listed = done(made, topic, "quarantine", "list", "--redrives")
    assert [(each["state"], each["records"]) for each in listed] == [("committed", 5)]
    shown = done(made, topic, "quarantine", "show", "limited", "--redrive", listed[0]["id"])
    assert {each["outcome"] for each in shown} == {"rebuilt", "quarantined"}
    plan = done(made, topic, "recover", "plan", "limited", "--to-batch", "-1", "--max-changed", "100%")["id"]
    applied = recourse(made, topic, "recover", "apply", plan, "--yes")
    assert applied.returncode == 0, applied.stderr[-3000:]
    assert sums_of(made)[0].keys() | sums_of(made)[1].keys() == RIGHT[0].keys() | RIGHT[1].keys()
    undone = recourse(made, topic, "recover", "undo", plan, "--yes")
    assert undone.returncode == 0, undone.stderr[-3000:]
    assert sums_of(made) == RIGHT
    verified = recourse(made, topic, "verify", "limited")
    assert verified.returncode == 0, verified.stdout
