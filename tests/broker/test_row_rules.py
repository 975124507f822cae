"""Row rules in real sessions: every batch adds up, after kills too, and a rule that stops a stream stops it once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.orphan_files import find
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import read_status
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.driver import command, driver, finished, ledger, produce, rows
from tests.support.judged import order

COUNT = 3000
FLOWS = "tests.support.judged"
NUMBERS = [n for n in range(COUNT) if n % 500 != 499]


@pytest.fixture
def fed(settings: SettingsFactory, broker: Broker) -> tuple[Settings, str]:
    """The topic `orders` with 3,000 records on two partitions, every 500th of them junk."""
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe("orders"):
        topics.delete("orders")
    topics.create("orders", 2)
    produce(bootstrap, "orders", (order(number) for number in range(COUNT)))
    return made, bootstrap


def price(number: int) -> int:
    return -1 if number % 11 == 0 else number % 101


def never_listed(settings: Settings, table: str) -> list[Path]:
    """Parquet files of a table that none of its versions lists."""
    path = settings.tables / table
    live = DeltaTable(path).get_add_actions()["path"].to_pylist()
    return [file.path for file in find(path, live) if not file.removed and file.path.suffix == ".parquet"]


def run(fed: tuple[Settings, str], streams: str, size: int = 600, **environment: str) -> tuple[int, str]:
    arguments = ("--trigger", "available-now", "--set", f"stream.max_offsets_per_trigger={size}", "--streams", streams)
    return finished(driver(*fed, *arguments, flows=FLOWS, environment=environment))


@pytest.mark.long
@pytest.mark.parametrize("path", ["driver", "executor"])
def test_every_batch_adds_up_after_kills_at_its_commits(fed: tuple[Settings, str], path: str) -> None:
    settings, bootstrap = fed
    way: dict[str, Any] = {"RECOURSE_STREAM__PATH": path, "size": 600 if path == "driver" else 1500}
    kills = ("orders_clean:secondary_committed:1", "orders_split:secondary_committed:2")
    for kill in kills if path == "driver" else (*kills[:1], "orders_newest:primary_committed:1"):
        code, output = run(fed, kill.partition(":")[0], RECOURSE_CRASH=kill, **way)
        assert code == -signal.SIGKILL, f"{kill}: {output[-3000:]}"
    code, output = run(fed, "orders_clean,orders_split,orders_newest", **way)
    assert code == 0, output[-3000:]

    aside = [n for n in NUMBERS if n % 7 == 0]
    dropped = [n for n in NUMBERS if n % 7 and price(n) < 0]
    assert sorted(row["n"] for row in rows(settings, "orders_clean")) == sorted({*NUMBERS} - {*aside} - {*dropped})
    quarantine = rows(settings, "orders_clean_quarantine")
    assert sorted(row["n"] for row in quarantine) == aside
    assert {tuple(row["_rules"]) for row in quarantine} == {("customer_not_null",)}
    for name in ("orders_clean_quarantine", "newest_quarantine"):
        assert not never_listed(settings, name), "a repeated batch left files of rows that were set aside before"
    entries = ledger(settings, "orders_clean")
    for entry in entries:
        assert sum(r.records for r in entry.offsets) == sum(n for name, n in entry.rows.items() if name != "late"), (
            entry
        )
        assert entry.rows["quarantined:orders_clean"] == sum(row["_batch"] == entry.batch for row in quarantine)
    broken = [entry.rules["orders_clean"] for entry in entries]
    assert sum(each["customer_not_null"] for each in broken) == len(aside)
    assert sum(each["price_between"] for each in broken) == sum(price(n) < 0 for n in NUMBERS)
    assert sum(each["not fifty"] for each in broken) == sum(price(n) == 50 for n in NUMBERS)
    assert not any("n_unique" in each for each in broken)

    dear = [n for n in NUMBERS if price(n) >= 60]
    assert sorted(row["n"] for row in rows(settings, "dear_quarantine")) == [n for n in dear if n % 7 == 0]
    assert sorted(row["n"] for row in rows(settings, "dear")) == [n for n in dear if n % 7 and price(n) <= 90]
    split = ledger(settings, "cheap")
    assert sum(e.rows.get("dropped:dear", 0) for e in split) == sum(price(n) > 90 and n % 7 != 0 for n in dear)
    assert {n for e in split for n in e.rules} == {"dear"}

    newest: dict[str, int] = {}
    for n in (n for n in NUMBERS if n % 7 and price(n) >= 0):
        newest[f"c{n % 30}"] = n
    assert {row["customer"]: row["n"] for row in rows(settings, "newest")} == newest
    assert sorted(row["n"] for row in rows(settings, "newest_quarantine")) == dropped

    status = read_status(settings, "orders_clean")
    assert status is not None and status.totals is not None
    assert (status.totals.quarantined, status.totals.dropped) == (len(aside), len(dropped))
    assert status.totals.broken["orders_clean.customer_not_null"] == len(aside)
    _verify(settings, bootstrap)


def _verify(settings: Settings, bootstrap: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RECOURSE_HOME": str(settings.home),
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "RECOURSE_FLOWS": json.dumps([FLOWS]),
    }
    streams = ("orders_clean", "orders_split", "orders_newest")
    done = command(settings.home.parent, environment, "verify", *streams, "--strict", "--recompute", "-o", "json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    verdicts: dict[str, Any] = json.loads(done.stdout)
    outcomes = {f"{one['table']}: {one['what']}": one for v in verdicts["streams"] for one in v["comparisons"]}
    records, dead = COUNT, COUNT // 500
    sums = (len([n for n in NUMBERS if n % 7 == 0]), sum(n % 7 != 0 and price(n) < 0 for n in NUMBERS))
    assert outcomes["orders_clean: equation"]["text"].endswith(
        f"in all {records:,} records = {records - sum(sums) - dead:,} written + {sums[0]:,} quarantined + {sums[1]:,} "
        f"dropped + {dead:,} dead letters"
    )
    for what in ("orders_clean: recomputed", "newest: recomputed", "dear: recomputed", "orders_clean: records"):
        assert outcomes[what]["verdict"] == "ok", outcomes[what]
    assert outcomes["orders_clean_quarantine: row counts"]["verdict"] == "ok"


def test_a_rule_that_fails_stops_the_stream_for_good_and_nothing_of_the_batch_is_visible(
    fed: tuple[Settings, str],
) -> None:
    settings, _ = fed
    code, output = run(fed, "orders_strict")
    assert code == 78, output[-3000:]
    status = read_status(settings, "orders_strict")
    assert status is not None and status.error is not None and status.state == "failed"
    assert status.error["code"] == "REC-029" and status.error["permanent"]
    assert "rows break customer_not_null" in status.error["found"] and "customer null" in status.error["found"]
    assert not rows(settings, "strict") and not ledger(settings, "strict")
