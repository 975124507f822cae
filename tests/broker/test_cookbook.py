"""The recipes of docs/cookbook.md, as the page has them, write what the page says."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import pytest
from deltalake import DeltaTable, QueryBuilder

from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, produce, rows
from tests.support.pages import code_of


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's Python blocks as a module, beside the file that it looks up."""
    file = tmp_path_factory.mktemp("recipes") / "recipes.py"
    file.write_text(code_of("cookbook.md"), encoding="utf-8")
    file.with_name("countries.csv").write_text("code,country\nDE,Germany\nNO,Norway\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("recipes", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["recipes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["recipes"]


@pytest.fixture(autouse=True)
def names_are_free(bench: BenchFactory, recipes: ModuleType) -> Iterator[None]:
    """The page's topics have ordinary names, which other tests of the shared broker use too."""
    topics = bench().topics
    streams = [each for each in vars(recipes).values() if isinstance(each, Stream)]
    before = topics.names() - {topic.name for each in streams for topic in each.topics}
    for name in topics.names() - before:
        topics.delete(name)
    yield
    for name in topics.names() - before:
        topics.delete(name)


def at(minute: int) -> datetime:
    return datetime(2026, 3, 2, 12 + minute // 60, minute % 60, tzinfo=UTC)


def run(bench: Bench, declared: Stream, *values: object) -> list[dict[str, Any]]:
    """The rows of the stream's first table after it has read these values, in the order of their text."""
    (topic,) = declared.topics
    if bench.topics.describe(topic.name) is None:
        bench.topics.create(topic.name, 1)
    records = [None if value is None else json.dumps(value, default=datetime.isoformat).encode() for value in values]
    produce(bench.bootstrap, topic.name, [(b"key", record) for record in records])
    status = bench.run(declared).status
    assert status.error is None and rows(bench.settings, declared.dead_letters) == []
    return sorted(rows(bench.settings, declared.primary.name), key=str)


def test_a_reference_file_is_joined_and_is_code(bench: BenchFactory, recipes: ModuleType) -> None:
    found = run(
        bench(), recipes.orders_by_country, *({"id": n, "code": code} for n, code in enumerate(["DE", "XX", None]))
    )
    assert sorted((row["id"], row["country"]) for row in found) == [(0, "Germany"), (1, None), (2, None)]
    assert list(recipes.orders_by_country.files) == ["countries.csv"]


def test_duplicates_are_dropped_also_in_a_later_batch(bench: BenchFactory, recipes: ModuleType) -> None:
    made = bench()
    once = {"id": "a", "amount": 1.0, "at": at(0)}
    run(made, recipes.payments_once, once, once, {"id": "b", "amount": 2.0, "at": at(1)})
    found = run(made, recipes.payments_once, once, {"id": "c", "amount": 3.0, "at": at(30)})
    assert sorted(row["id"] for row in found) == ["a", "b", "c"]


def test_a_session_is_a_row_once_it_is_final(bench: BenchFactory, recipes: ModuleType) -> None:
    clicks = [{"user": user, "at": at(minute)} for user, minute in [("a", 0), ("a", 20), ("b", 5), ("z", 200)]]
    found = run(bench(), recipes.visits, *clicks)
    assert [(row["user"], row["begin"], row["end"], row["count"]) for row in found] == [
        ("a", at(0), at(50), 2),
        ("b", at(5), at(35), 1),
    ]


def test_the_history_has_a_late_change_in_its_place_and_the_present_ignores_it(
    bench: BenchFactory, recipes: ModuleType
) -> None:
    made = bench()
    changes = [("Oslo", 0), ("Bergen", 20), ("Hamar", 10)]
    now = run(made, recipes.customer_tables, *({"id": 1, "city": city, "changed_at": at(m)} for city, m in changes))
    assert [row["city"] for row in now] == ["Bergen"]
    query = code_of("cookbook.md", language="sql")
    versions = DeltaTable(made.settings.tables / "customer_versions")
    table = QueryBuilder().register("customer_versions", versions).execute(query).read_all()
    history = sorted(
        zip(*(table.column(name).to_pylist() for name in ("valid_from", "city", "valid_to")), strict=True), key=str
    )
    assert history == [(at(0), "Oslo", at(10)), (at(10), "Hamar", at(20)), (at(20), "Bergen", None)]
