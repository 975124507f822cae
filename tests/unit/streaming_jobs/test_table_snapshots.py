"""Versions that belong together, at every moment of generated histories: batches, recoveries, aborts, undo, kills."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from streaming_jobs.catalog.snapshots import ChosenVersion, StreamLogs, TableLog, chosen
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.sinks.stored import Commit

TABLES = {"orders": ["orders", "orders_dead"], "totals": ["totals"], "paid": ["paid", "refunds", "paid_dead"]}
Rows = tuple[Txn | None, frozenset[str]]
"""The content of a table: the batch of its newest rows, and the plans whose rows it has."""


@dataclass
class Home:
    """Streams with their tables; every commit is a moment at which somebody may read."""

    rng: random.Random
    commits: dict[str, list[Commit]] = field(default_factory=dict)
    rows: dict[str, list[Rows]] = field(default_factory=dict)
    at: dict[str, Txn] = field(default_factory=dict)
    has: dict[str, frozenset[str]] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    settled: bool = True
    plans: int = 0

    def __post_init__(self) -> None:
        for stream, tables in TABLES.items():
            self.at[stream], self.has[stream] = Txn(1, -1), frozenset()
            for table in tables:
                self.commits[table] = [Commit(0, 0, "CREATE", False, LedgerEntry("schema", stream, table, 1, -1))]
                self.rows[table] = [(None, frozenset())]

    def commit(self, table: str, entry: LedgerEntry, rows: Rows) -> None:
        self.commits[table].append(Commit(len(self.commits[table]), 0, "WRITE", True, entry))
        self.rows[table].append(rows)

    def batch(self, stream: str) -> Iterator[None]:
        txn = Txn(self.at[stream].generation, self.at[stream].batch + 1)
        primary, *others = TABLES[stream]
        listed = {}
        for table in others:
            if self.rng.random() < 0.7:  # without rows, a batch leaves the table as it is
                self.commit(table, LedgerEntry("batch", stream, table, *_of(txn)), (txn, self.has[stream]))
                yield
            if (position := self.rows[table][-1][0]) is not None:
                listed[table] = position.version
        entry = LedgerEntry("batch", stream, primary, *_of(txn), txns=listed)
        self.commit(primary, entry, (txn, self.has[stream]))
        self.at[stream] = txn

    def upkeep(self, table: str) -> None:
        stream = self.commits[table][0].entry.stream  # type: ignore[union-attr]
        self.commit(table, LedgerEntry("upkeep", stream, table, 1, -1), self.rows[table][-1])

    def recovery(self, streams: list[str], *, aborted: bool) -> Iterator[None]:
        """Fences, publishes and ends; an aborted one is given up at a random moment, and restores the rows."""
        self.plans += 1
        plan = f"plan-{self.plans}"
        before = {stream: (self.at[stream], self.has[stream]) for stream in streams}
        kept = {table: self.rows[table][-1] for stream in streams for table in TABLES[stream]}
        steps = [("fence", s, t) for s in streams for t in TABLES[s]]
        steps += [("publish", s, t) for s in streams for t in (*TABLES[s][1:], TABLES[s][0])]
        end = self.rng.randrange(1, len(steps)) if aborted else len(steps)
        for kind, stream, table in steps[:end]:
            self.members.setdefault(plan, streams)
            generation = before[stream][0].generation + 1
            if kind == "fence":
                self.commit(table, LedgerEntry("fence", stream, table, generation, -1, plan=plan), self.rows[table][-1])
            else:
                self._publish(plan, stream, table, generation, before[stream][1] | {plan})
            self.settled = False
            yield
        for stream in streams:
            generation = before[stream][0].generation + (2 if aborted else 1)
            if aborted:
                for table in (*TABLES[stream][1:], TABLES[stream][0]):
                    self._publish(plan, stream, table, generation, kept[table][1])
                    yield
            self.at[stream] = Txn(generation, before[stream][0].batch)
            self.has[stream] = before[stream][1] | (frozenset() if aborted else {plan})
        self.settled = True

    def _publish(self, plan: str, stream: str, table: str, generation: int, has: frozenset[str]) -> None:
        txn = Txn(generation, self.at[stream].batch)
        others = {t: txn.version for t in TABLES[stream] if t != table} if table == TABLES[stream][0] else {}
        self.commit(table, LedgerEntry("publish", stream, table, *_of(txn), txns=others, plan=plan), (txn, has))

    def logs(self) -> list[StreamLogs]:
        return [
            StreamLogs(stream, [TableLog(table, self.commits[table][::-1]) for table in tables])
            for stream, tables in TABLES.items()
        ]


def _of(txn: Txn) -> tuple[int, int]:
    return txn.generation, txn.batch


def check(home: Home) -> None:
    found = chosen(home.logs())
    for stream, (primary, *others) in TABLES.items():
        txn, has = home.rows[primary][found[primary].version]
        assert found[primary] == ChosenVersion(stream, found[primary].version, txn)
        shown = next((c.entry for c in home.commits[primary][: found[primary].version + 1][::-1] if _rows(c)), None)
        for table in others:
            position, plans = home.rows[table][found[table].version]
            listed = shown.txns.get(table) if shown is not None else None
            assert position == (None if listed is None else Txn.of(listed)), "the tables of one batch"
            assert position is None or position < txn or plans == has, "no corrected table beside an uncorrected one"
    for plan, streams in home.members.items():
        having = {stream for stream in streams if plan in home.rows[stream][found[stream].version][1]}
        assert having in (set(), set(streams)), f"{plan} is whole or absent"
    if home.settled:
        newest = {stream: len(home.commits[stream]) - 1 for stream in TABLES}
        assert {stream: found[stream].version for stream in TABLES} == newest, "nothing is held back without reason"


def _rows(commit: Commit) -> bool:
    return commit.entry is not None and commit.entry.kind in ("batch", "publish")


@pytest.mark.parametrize("seed", range(150))
def test_at_every_moment_the_versions_are_of_one_batch_and_of_whole_recoveries(seed: int) -> None:
    rng = random.Random(seed)
    home = Home(rng)
    check(home)
    for _ in range(12):
        kind = rng.choices(["batch", "upkeep", "recovery", "abort"], [6, 2, 2, 1])[0]
        if kind == "upkeep":
            home.upkeep(rng.choice(list(home.commits)))
        elif kind == "batch":
            stream = rng.choice(list(TABLES))
            for _ in home.batch(stream):
                check(home)
                if rng.random() < 0.2:  # killed; the batch is repeated below, and finds what is there
                    break
            else:
                check(home)
                continue
            _finish(home, stream)
        else:
            streams = rng.sample(list(TABLES), rng.randrange(1, len(TABLES) + 1))
            for _ in home.recovery(streams, aborted=kind == "abort"):
                check(home)
        check(home)


def _finish(home: Home, stream: str) -> None:
    """The repeat of a batch that was killed between its tables: those that have it are left as they are."""
    txn = Txn(home.at[stream].generation, home.at[stream].batch + 1)
    primary, *others = TABLES[stream]
    listed = {t: home.rows[t][-1][0].version for t in others if home.rows[t][-1][0] is not None}  # type: ignore[union-attr]
    home.commit(primary, LedgerEntry("batch", stream, primary, *_of(txn), txns=listed), (txn, home.has[stream]))
    home.at[stream] = txn


def test_a_plan_that_a_second_reading_has_fenced_is_known_and_a_log_that_was_cleaned_up_is_an_error() -> None:
    made = [LedgerEntry("schema", s, s, 1, -1) for s in ("a", "b")]
    batches = [LedgerEntry("batch", s, s, 1, 0) for s in ("a", "b")]
    fences = [LedgerEntry("fence", s, s, 2, -1, plan="p") for s in ("a", "b")]
    published = LedgerEntry("publish", "b", "b", 2, 0, plan="p")

    def log(*entries: LedgerEntry) -> list[Commit]:
        return [Commit(number, 0, "WRITE", True, entry) for number, entry in enumerate(entries)][::-1]

    b = StreamLogs("b", [TableLog("b", log(made[1], batches[1], fences[1], published))])
    read_before = TableLog("a", log(made[0], batches[0]))
    assert chosen([StreamLogs("a", [read_before]), b])["b"].version == 3, "as if no plan spanned both"
    later = (Commit(2, 0, "WRITE", True, fences[0]),)
    again = StreamLogs("a", [TableLog("a", read_before.commits, later)])
    assert {name: each.version for name, each in chosen([again, b]).items()} == {"a": 1, "b": 2}
    cleaned = StreamLogs("b", [TableLog("b", log(made[1], batches[1], fences[1], published)[:1])])
    with pytest.raises(PreflightRefused, match="the log of b no longer shows the rows from before plan p"):
        chosen([again, cleaned])
