"""Files on disk stay readable: homes of earlier versions are opened, continue, and undo their recoveries."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from tests.homes.flows import BEGIN, KEYS, STEP
from tests.homes.make import ARCHIVES, RECORDS, STREAMS, TOPIC, event, recourse
from tests.support.driver import produce, rows

MORE = 60


@pytest.fixture(params=sorted(ARCHIVES.glob("*.tar.xz")), ids=lambda path: path.name.removesuffix(".tar.xz"))
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The home of an archive, unpacked."""
    subprocess.run(["tar", "-C", str(tmp_path), "-xJf", str(request.param)], check=True)
    return tmp_path / "home"


@pytest.fixture
def bootstrap(home: Path) -> Iterator[str]:
    """The home's own broker, with the records of then."""
    with Broker(Settings.load({"home": home})) as broker:
        yield broker.start()


def compare(settings: Settings, count: int) -> None:
    """Every table holds what `count` records make."""
    numbers = range(count)
    assert sorted(row["n"] for row in rows(settings, "every")) == list(numbers)
    assert len(rows(settings, "every_dead_letters")) == 1
    prices: dict[str, Decimal] = {}
    for number in numbers:
        key = KEYS[number % len(KEYS)]
        prices[key] = prices.get(key, Decimal(0)) + number + Decimal("0.25")
    totals = {row["k"]: (row["c"], row["s"]) for row in rows(settings, "totals")}
    assert totals == {key: (len(numbers[i::6]), prices[key]) for i, key in enumerate(KEYS)}
    last = {KEYS[number % 6]: number for number in numbers}
    gone = {key for key, number in last.items() if key == "x" and number % 18 == 5}
    assert {row["k"]: row["n"] for row in rows(settings, "newest")} == {
        key: number for key, number in last.items() if key not in gone
    }
    ended = BEGIN + (count - 1) * STEP - timedelta(seconds=10)
    windows = Counter(BEGIN + timedelta(seconds=number // 10 * 10) for number in numbers)
    over = {start: records for start, records in windows.items() if start + timedelta(seconds=10) <= ended}
    assert {row["start"]: row["c"] for row in rows(settings, "windows")} == over


def versions(settings: Settings) -> dict[str, int]:
    """The version of each stream's table."""
    return {name: DeltaTable(settings.tables / name).version() for name in STREAMS}


def test_a_home_of_an_earlier_version_goes_on_and_its_recovery_can_be_undone(home: Path, bootstrap: str) -> None:
    settings = Settings.load({"home": home})
    compare(settings, RECORDS)
    before = versions(settings)
    produce(bootstrap, TOPIC, (event(number) for number in range(RECORDS, RECORDS + MORE)))
    recourse(home, bootstrap, "streams", "run", *STREAMS, "--trigger", "available-now")
    compare(settings, RECORDS + MORE)
    assert all(after > before[name] for name, after in versions(settings).items())
    plans: list[dict[str, Any]] = json.loads(recourse(home, bootstrap, "recover", "list", "-o", "json"))
    assert {plan["plan"] for plan in plans} >= {"every-0001", "totals-0001"}
    recourse(home, bootstrap, "recover", "undo", "every-0001", "--yes")
    compare(settings, RECORDS + MORE)
    recourse(home, bootstrap, "streams", "run", "every", "--trigger", "available-now")
    compare(settings, RECORDS + MORE)
