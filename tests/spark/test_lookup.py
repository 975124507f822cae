"""Tables that are looked up: equal to plain Python, whatever the batches and whenever the table changes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from streaming_jobs.errors import UsageError
from streaming_jobs.stream import Stream
from streaming_jobs.testing import StreamTest
from tests.support.lookup_flows import by_knowledge, value_sums, valued

CURRENCIES = ("EUR", "CHF", "XXX")


def run(test: StreamTest, seed: int) -> list[tuple[int, str, int | None]]:
    """Change the table, send and read in random parts, one of them killed; returns each sale with its rate then."""
    rng, expected, sold = random.Random(seed), list[tuple[int, str, int | None]](), 0
    rates = {"EUR": 1, "CHF": 1}
    for part in range(4):
        if part == 0 or rng.random() < 0.7:
            rates = {currency: rng.randint(1, 1_000) for currency in ("EUR", "CHF") if rng.random() < 0.9}
            test.lookup("rates", [{"currency": currency, "rate": rate} for currency, rate in rates.items()])
        for _ in range(rng.randint(1, 20)):
            currency = rng.choice(CURRENCIES)
            test.send({"id": sold, "currency": currency}, partition=rng.randrange(2))
            expected.append((sold, currency, rates.get(currency)))
            sold += 1
        if part == 1:
            test.crash_at(rng.choice(["staged", "primary_committed"]))
            test.run()
            test.lookup("rates", [{"currency": "EUR", "rate": -1}])  # the repeated batch does not see it
            test.run()
            test.lookup("rates", [{"currency": currency, "rate": rate} for currency, rate in rates.items()])
        test.run()
    return expected


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_have_the_rate_of_their_batch(stream_test: Callable[..., StreamTest], seed: int) -> None:
    test = stream_test(valued, partitions=2)
    expected = run(test, seed)
    assert sorted((row["id"], row["currency"], row["rate"]) for row in test.rows()) == expected
    versions = [entry.lookups["rates"].version for entry in sorted(test.batches, key=lambda entry: entry.batch)]
    assert versions == sorted(versions) and len(set(versions)) > 1


def test_state_has_the_rates_of_their_time(stream_test: Callable[..., StreamTest]) -> None:
    test, totals = stream_test(value_sums, partitions=2), defaultdict[str, list[int]](list)
    for _, currency, rate in run(test, 3):
        totals[currency] += [] if rate is None else [rate]
    found = {row["currency"]: (row["total"], row["n"]) for row in test.rows()}
    assert found == {currency: (sum(rates), len(rates)) for currency, rates in totals.items() if rates}


def test_all_tables_of_a_batch_look_up_one_version(stream_test: Callable[..., StreamTest]) -> None:
    test = stream_test(by_knowledge, partitions=2)
    expected = run(test, 4)
    known = sorted((row["id"], row["currency"], row["rate"]) for row in test.rows("known"))
    unknown = sorted((row["id"], row["currency"], None) for row in test.rows("unknown"))
    assert known == [sale for sale in expected if sale[2] is not None]
    assert unknown == [sale for sale in expected if sale[2] is None]


@pytest.mark.parametrize("one", [valued, by_knowledge])
def test_a_table_that_changes_while_the_query_runs_is_seen_by_the_next_batch(
    stream_test: Callable[..., StreamTest], monkeypatch: pytest.MonkeyPatch, one: Stream
) -> None:
    test = stream_test(one, settings={"stream": {"max_offsets_per_trigger": 4}})
    for number in range(12):
        test.send({"id": number, "currency": "EUR"})
    test.lookup("rates", [{"currency": "EUR", "rate": 0}])
    at = test._at

    def changed_after(point: str, stream: str, batch: int) -> None:
        if point == "primary_committed":
            test.lookup("rates", [{"currency": "EUR", "rate": batch + 1}])
        at(point, stream, batch)

    monkeypatch.setattr(test, "_at", changed_after)
    test.run()
    assert [(row["id"], row["rate"]) for row in test.rows()] == [(number, number // 4) for number in range(12)]
    assert [entry.lookups["rates"].version for entry in test.batches] == [0, 1, 2]


def test_a_test_names_what_does_not_fit_the_lookup(stream_test: Callable[..., StreamTest]) -> None:
    test = stream_test(valued)
    for table, rows, refusal in (
        ("prices", [], "does not look up table prices"),
        ("rates", [{"price": 1}], "has no column price"),
        ("rates", [{"rate": "high"}], "are no rows of table rates"),
    ):
        given: list[dict[str, Any]] = rows
        with pytest.raises(UsageError, match=refusal):
            test.lookup(table, given)
