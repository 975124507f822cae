"""Versions that belong together, at every moment of generated histories.

They have batches, kills, upkeep, rebuilt slices, redrives, recoveries (bounded ones too), their undo, and aborts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from streaming_jobs.catalog.snapshots import ChosenVersion, StreamLogs, TableLog, chosen
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.sinks.stored import Commit

TABLES = {"orders": ["orders", "orders_dead"], "totals": ["totals"], "paid": ["paid", "refunds", "paid_dead"]}
Rows = tuple[Txn | None, frozenset[str], frozenset[str]]
"""The content of a table: the batch of its newest rows, the plans whose rows it has, and the redrives in it."""
NONE: frozenset[str] = frozenset()


@dataclass
class Home:
    """Streams with their tables; every commit is a moment at which somebody may read."""

    rng: random.Random
    commits: dict[str, list[Commit]] = field(default_factory=dict)
    rows: dict[str, list[Rows]] = field(default_factory=dict)
    at: dict[str, Txn] = field(default_factory=dict)
    has: dict[str, frozenset[str]] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    undoable: list[str] = field(default_factory=list)
    redriven: dict[str, list[str]] = field(default_factory=dict)
    settled: bool = True
    plans: int = 0

    def __post_init__(self) -> None:
        for stream, tables in TABLES.items():
            self.at[stream], self.has[stream] = Txn(1, -1), NONE
            for table in tables:
                self.commits[table] = [Commit(0, 0, "CREATE", False, LedgerEntry("schema", stream, table, 1, -1))]
                self.rows[table] = [(None, NONE, NONE)]

    def commit(self, table: str, entry: LedgerEntry, rows: Rows) -> None:
        now = sum(map(len, self.commits.values()))
        self.commits[table].append(Commit(len(self.commits[table]), now, "WRITE", True, entry))
        self.rows[table].append(rows)

    def redriven_in(self, table: str) -> frozenset[str]:
        return self.rows[table][-1][2]

    def batch(self, stream: str) -> Iterator[None]:
        txn = Txn(self.at[stream].generation, self.at[stream].batch + 1)
        primary, *others = TABLES[stream]
        listed = {}
        for table in others:
            if self.rng.random() < 0.7:  # without rows, a batch leaves the table as it is
                rows = txn, self.has[stream], self.redriven_in(table)
                self.commit(table, LedgerEntry("batch", stream, table, *_of(txn)), rows)
                yield
            if (position := self.rows[table][-1][0]) is not None:
                listed[table] = position.version
        entry = LedgerEntry("batch", stream, primary, *_of(txn), txns=listed)
        self.commit(primary, entry, (txn, self.has[stream], self.redriven_in(primary)))
        self.at[stream] = txn

    def upkeep(self, table: str) -> None:
        """A commit on one table that moves nothing."""
        stream = self.commits[table][0].entry.stream  # type: ignore[union-attr]
        self.plans += 1
        entry = LedgerEntry("upkeep", stream, table, 1, -1, plan=f"{table}-{self.plans}")
        self.commit(table, entry, self.rows[table][-1])

    def redrive(self, stream: str) -> Iterator[None]:
        """Rows of redriven records into some tables, the primary last; then what was set aside is taken out."""
        primary, *others = TABLES[stream]
        tables = [t for t in (*others[:-1], primary) if self.rng.random() < 0.7] + [others[-1]]
        return self._change("redrive", stream, tables)

    def slice(self, stream: str) -> Iterator[None]:
        """A rebuilt slice of a table, with what its quarantine has of it, or of one of them."""
        tables = self.rng.sample(TABLES[stream], min(len(TABLES[stream]), self.rng.choice([1, 2])))
        steps = self._change("slice", stream, tables)
        if len(tables) == 1 or self.rng.random() < 0.7:
            yield from steps
            return
        yield next(steps)  # the second table cannot take it any more, and goes on without it
        self.upkeep(tables[-1])
        del self.redriven[f"{tables[-1]}-{self.plans - 1}"]
        self.settled = True
        yield

    def _change(self, kind: Literal["redrive", "slice"], stream: str, tables: Sequence[str]) -> Iterator[None]:
        self.plans += 1
        change = f"{tables[-1]}-{self.plans}"
        self.redriven[change] = list(tables)
        entry = LedgerEntry(kind, stream, tables[-1], *_of(self.at[stream]), plan=change)
        for table in tables:
            txn, plans, there = self.rows[table][-1]
            self.commit(table, replace(entry, table=table), (txn, plans, there | {change}))
            self.settled = table == tables[-1]
            yield

    def recovery(self, streams: list[str], *, aborted: bool, undoes: str | None = None) -> Iterator[None]:
        """Fences, publishes and ends; an aborted one is given up at a random moment, and restores the rows.

        The replay of an unbounded one has fewer batches than the stream had; a bounded one and an undo continue its.
        """
        self.plans += 1
        plan = f"plan-{self.plans}"
        before = {stream: (self.at[stream], self.has[stream]) for stream in streams}
        kept = {table: self.rows[table][-1] for stream in streams for table in TABLES[stream]}
        steps = [("fence", s, t) for s in streams for t in TABLES[s]]
        steps += [("publish", s, t) for s in streams for t in (*TABLES[s][1:], TABLES[s][0])]
        fewer = undoes is None and self.rng.random() < 0.5
        batches = {s: self.rng.randrange(-1, before[s][0].batch + 1) if fewer else before[s][0].batch for s in streams}
        end = self.rng.randrange(1, len(steps)) if aborted else len(steps)
        for kind, stream, table in steps[:end]:
            self.members.setdefault(plan, streams)
            at = Txn(before[stream][0].generation + 1, batches[stream])
            if kind == "fence":
                entry = LedgerEntry("fence", stream, table, at.generation, -1, plan=plan)
                self.commit(table, entry, self.rows[table][-1])
            else:
                self._publish(plan, stream, table, at, (before[stream][1] | {plan}) - {undoes}, NONE)
            self.settled = False
            yield
        for stream in streams:
            at = Txn(before[stream][0].generation + 1, batches[stream])
            if aborted:
                at = Txn(before[stream][0].generation + 2, before[stream][0].batch)
                for table in (*TABLES[stream][1:], TABLES[stream][0]):
                    self._publish(plan, stream, table, at, *kept[table][1:])
                    yield
            self.at[stream] = at
            self.has[stream] = before[stream][1] if aborted else (before[stream][1] | {plan}) - {undoes}
        if not aborted:
            self.undoable = [plan] if undoes is None else []
        self.settled = True

    def _publish(
        self, plan: str, stream: str, table: str, at: Txn, has: frozenset[str], redriven: frozenset[str]
    ) -> None:
        others = {t: at.version for t in TABLES[stream] if t != table} if table == TABLES[stream][0] else {}
        entry = LedgerEntry("publish", stream, table, *_of(at), txns=others, plan=plan)
        self.commit(table, entry, (at, has, redriven))

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
        txn, has, _ = home.rows[primary][found[primary].version]
        assert found[primary] == ChosenVersion(stream, found[primary].version, txn)
        shown = next((c.entry for c in home.commits[primary][: found[primary].version + 1][::-1] if _rows(c)), None)
        for table in others:
            position, plans, _ = home.rows[table][found[table].version]
            listed = shown.txns.get(table) if shown is not None else None
            assert position == (None if listed is None else Txn.of(listed)), "the tables of one batch"
            assert position is None or position < txn or plans == has, "no corrected table beside an uncorrected one"
    for plan, streams in home.members.items():
        having = {stream for stream in streams if plan in home.rows[stream][found[stream].version][1]}
        assert having in (set(), set(streams)), f"{plan} is whole or absent"
    for redrive, tables in home.redriven.items():
        there = {table for table in tables if redrive in home.rows[table][found[table].version][2]}
        assert there in (set(), set(tables)), f"{redrive} is whole or absent"
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
        kind = rng.choices(["batch", "upkeep", "slice", "redrive", "recovery", "undo", "abort"], [6, 1, 2, 2, 2, 1, 1])[
            0
        ]
        if kind == "upkeep":
            home.upkeep(rng.choice(list(home.commits)))
        elif kind == "slice":
            for _ in home.slice(rng.choice(list(TABLES))):
                check(home)
        elif kind == "redrive":
            for _ in home.redrive(rng.choice([stream for stream, tables in TABLES.items() if len(tables) > 1])):
                check(home)
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
            streams, undoes = rng.sample(list(TABLES), rng.randrange(1, len(TABLES) + 1)), None
            if kind == "undo" and home.undoable:
                undoes = home.undoable[-1]
                streams = home.members[undoes]
            for _ in home.recovery(streams, aborted=kind == "abort", undoes=undoes):
                check(home)
        check(home)


def _finish(home: Home, stream: str) -> None:
    """The repeat of a batch that was killed between its tables: those that have it are left as they are."""
    txn = Txn(home.at[stream].generation, home.at[stream].batch + 1)
    primary, *others = TABLES[stream]
    listed = {t: home.rows[t][-1][0].version for t in others if home.rows[t][-1][0] is not None}  # type: ignore[union-attr]
    rows = txn, home.has[stream], home.redriven_in(primary)
    home.commit(primary, LedgerEntry("batch", stream, primary, *_of(txn), txns=listed), rows)
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


def test_a_redrive_is_whole_over_two_readings_and_where_a_log_was_cleaned_up() -> None:
    """The tables: `a`, which is read first, `b`, and `a_dead`, which gets the redrive last."""
    tables = ("a", "b", "a_dead")

    def versions(*, seen: int, cleaned: bool = False) -> list[int]:
        """Of what was read, the first reading saw the redrive on the last `seen` tables, the second one on all."""
        logs = []
        for number, table in enumerate(tables):
            made = Commit(0, 0, "CREATE", False, LedgerEntry("schema", "a", table, 1, -1))
            others = {each: Txn(1, 0).version for each in tables[1:]} if table == "a" else {}
            batch = Commit(1, 1, "WRITE", True, LedgerEntry("batch", "a", table, 1, 0, txns=others))
            redrive = Commit(2, 2 + number, "WRITE", True, LedgerEntry("redrive", "a", table, 1, 0, plan="a_dead-1"))
            slices = Commit(3, 9, "WRITE", True, LedgerEntry("slice", "a", table, 1, 0, plan="s"))
            first, since = ([slices, redrive], []) if number >= 3 - seen else ([], [slices, redrive])
            log = TableLog(table, [*first, batch, made], since)
            if cleaned and table == "a_dead":
                later = LedgerEntry("batch", "a", table, 1, 0)
                log = TableLog(table, [Commit(7, 9, "WRITE", True, later)])
            logs.append(log)
        return [each.version for each in chosen([StreamLogs("a", logs)]).values()]

    assert versions(seen=3) == [3, 3, 3]
    assert versions(seen=2) == versions(seen=1) == versions(seen=0) == [1, 1, 1]
    assert versions(seen=3, cleaned=True) == [3, 3, 7]
