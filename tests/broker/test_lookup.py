"""A table that is looked up: each record meets the version of its batch, through kills, recoveries and an undo."""

from __future__ import annotations

import json
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, driver, finished, ledger, produce, rows

FLOWS = "tests.support.lookup_flows"
TOPIC = "sales_with_rates"
CURRENCIES = ("EUR", "CHF", "XXX")
"""The last one has no rate."""


class Shop:
    """A topic of sales and a table of rates, each version of which is known here."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.versions = bench, list[dict[str, int]]()
        self.sent = 0

    def rate(self, **rates: int) -> None:
        """Replace the table: its next version."""
        content = pa.table({"currency": list(rates), "rate": list(rates.values())})
        write_deltalake(str(self.bench.settings.tables / "rates"), content, mode="overwrite")
        self.versions.append(rates)

    def sell(self, number: int) -> None:
        sales = range(self.sent, self.sent + number)
        values = (json.dumps({"id": each, "currency": CURRENCIES[each % 3]}).encode() for each in sales)
        produce(self.bench.bootstrap, TOPIC, ((None, value) for value in values), partition=0)
        self.sent += number

    def recourse(self, *arguments: str, **environment: str) -> str:
        return self.bench.recourse(FLOWS, *arguments, **environment)

    def read(self, stream: str, **environment: str) -> None:
        self.recourse("streams", "run", stream, "--trigger", "available-now", **environment)

    def killed(self, stream: str, point: str) -> None:
        here = self.bench
        process = driver(
            here.settings, here.bootstrap, "--trigger", "available-now", "--streams", stream, flows=FLOWS,
            environment={"RECOURSE_CRASH": f"{stream}:{point}"},
        )  # fmt: skip
        code, output = finished(process)
        assert code == -signal.SIGKILL, output[-3000:]

    def looked_up(self, table: str) -> dict[int, int]:
        """The sale's id, which is its offset, -> the version that its batch looked up, by the table's own ledger."""
        found = {}
        for entry in ledger(self.bench.settings, table):
            for offset in range(entry.offsets[0].start.get(0, 0), entry.offsets[0].end[0]):
                found[offset] = entry.lookups["rates"].version
        return found

    def expected(self, version_of: dict[int, int], mark: int = 0) -> Counter[tuple[int, str, int | None]]:
        """The rows of `valued` in plain Python."""
        sales: Counter[tuple[int, str, int | None]] = Counter()
        for sale, version in version_of.items():
            rate = self.versions[version].get(currency := CURRENCIES[sale % 3])
            sales[sale, currency, None if rate is None else rate + mark] += 1
        return sales

    def valued(self) -> Counter[tuple[int, str, int | None]]:
        return Counter((row["id"], row["currency"], row["rate"]) for row in rows(self.bench.settings, "valued"))

    def sums(self) -> dict[str, tuple[int, int]]:
        return {row["currency"]: (row["total"], row["n"]) for row in rows(self.bench.settings, "value_sums")}

    def plan(self, stream: str, *target: str, **environment: str) -> dict[str, Any]:
        return dict(json.loads(self.recourse("recover", "plan", stream, *target, "--output", "json", **environment)))


def sums_of(sales: Counter[tuple[int, str, int | None]]) -> dict[str, tuple[int, int]]:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for (_, currency, rate), number in sales.items():
        if rate is not None:
            found[currency][0] += rate * number
            found[currency][1] += number
    return {currency: (total, n) for currency, (total, n) in found.items()}


@pytest.fixture
def shop(bench: BenchFactory) -> Iterator[Shop]:
    here = bench({"flows": [FLOWS], "stream.max_offsets_per_trigger": 100})
    here.topics.create(TOPIC, 1)
    yield Shop(here)
    here.topics.delete(TOPIC)


@pytest.mark.parametrize("stream", ["valued", pytest.param("value_sums", marks=pytest.mark.long)])
def test_a_repeated_batch_a_replay_and_an_undo_meet_the_versions_of_the_first_run(shop: Shop, stream: str) -> None:
    small, marked = {"RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "100"}, {"LOOKUP_MARK": "7"}

    def check(version_of: dict[int, int], mark: int = 0) -> None:
        sales = shop.expected(version_of, mark)
        if stream == "valued":
            assert shop.valued() == sales
        else:
            assert shop.sums() == sums_of(sales)

    shop.rate(EUR=1)
    shop.sell(250)
    shop.read(stream, **small)
    shop.rate(EUR=10, CHF=20)
    shop.sell(130)
    shop.killed(stream, "staged:3")
    shop.rate(EUR=100, CHF=200)  # between the kill and the repeated batch
    shop.sell(70)
    shop.read(stream, **small)
    first_run = shop.looked_up(stream)
    assert set(first_run) == set(range(450))
    assert set(first_run.values()) == {0, 1, 2}
    assert first_run[249] == 0 and first_run[250] == 1, "the repeated batch kept the version of its first attempt"
    check(first_run)

    shop.rate(EUR=1_000, CHF=2_000)
    shop.sell(50)
    plan = shop.plan(stream, "--to-batch", "-1", **marked)
    assert any("looks up table rates at versions 0 to 2" in note for note in plan["notes"])
    shop.recourse("recover", "apply", plan["id"], "--yes", **marked)  # in batches of another size
    since = dict.fromkeys(range(450, 500), 3)
    check({**first_run, **since}, mark=7)
    shop.rate(EUR=10_000)
    shop.recourse("recover", "undo", plan["id"], "--yes")
    check({**first_run, **since})  # records since are repeated at the versions that they met
    shop.sell(10)
    shop.read(stream, **small)
    check({**first_run, **since, **dict.fromkeys(range(500, 510), 4)})
