"""Redrives on a real broker: beside a running stream, killed at each border, verified, recovered over and undone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.broker.conftest import BenchFactory
from tests.broker.test_slices import running
from tests.support import ROOT
from tests.support.driver import Bench, command, driver, finished, rows, until, variables
from tests.support.redrive_flows import priced

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


@pytest.mark.timeout(400)
def test_a_running_stream_takes_redrives_that_killed_commands_have_left(bench: BenchFactory, topic: str) -> None:
    made = begun(bench, topic)
    with running(made, priced(topic, "right")):
        killed = recourse(made, topic, "deadletters", "replay", "priced", RECOURSE_CRASH="priced:redrive_asked:0")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        until(lambda: len(rows(made.settings, "priced_dead_letters")) == 5, 60, "the driver's commit")
        report = done(made, topic, "quarantine", "replay", "priced")
        assert (report["outcome"], report["outcomes"]) == ("committed", {"row": 10})
        send(made, topic, range(40, 48))
        until(lambda: len(rows(made.settings, "priced")) >= 42, 60, "the records after it")
    check(made, topic, 48)
    again = done(made, topic, "deadletters", "replay", "priced")
    assert (again["outcome"], again["outcomes"]) == ("nothing has changed", {"dead again": 6})
    listed = done(made, topic, "deadletters", "list", "--redrives")
    assert [(each["state"], each["outcomes"]) for each in listed] == [("committed", {"row": 15, "dead again": 5})]


@pytest.mark.long
@pytest.mark.timeout(400)
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
@pytest.mark.timeout(400)
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
@pytest.mark.timeout(600)
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
