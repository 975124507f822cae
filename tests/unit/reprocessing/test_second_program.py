"""A second program works on the table while a plan is applied, killed, resumed, given up and undone, by seed.

It acts at the borders of the stages and inside a publish, between the computation of the change and its commit: it
compacts, vacuums, appends rows of its own, and opens versions that it reads to the end much later. Batches 3 to 5 of
the stream are wrong, and every file is a month old.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from reprocessing.executor import apply, give_up, recovery_of, resume
from reprocessing.plan.journal import Journal, journal_of
from reprocessing.plan.plan_file import load
from reprocessing.plan.planner import plan_undo
from reprocessing.plan.targets import Target
from reprocessing.stages.recovery import RecoveryContext, RecoveryEvents
from streaming_jobs.errors import LedgerConflict, RecourseError
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_files import on_disk
from streaming_jobs.sinks.stored import newest
from streaming_jobs.state.stream_record import accept
from tests.support.life import PLACES, STREAM, Killed, Life, Topics, plan_one, replayed

pytestmark = pytest.mark.slow

RIGHT = list(range(60))
WRONG = sorted([*range(30), *(-n for n in range(30, 60))])
FOREIGN = 1000
"""Ids from here on are of the second program."""
WEEK = 7 * 86_400.0
TOPICS = Topics(end=60)


def read(table: DeltaTable) -> list[int]:
    ids: list[int] = table.to_pyarrow_table()["id"].to_pylist()
    return sorted(ids)


def own(ids: list[int]) -> list[int]:
    """The ids of the stream, none of them twice; nor any other."""
    assert len(set(ids)) == len(ids)
    return [each for each in ids if each < FOREIGN]


class SecondProgram:
    """Acts on the table now and then; `did` is what it has done, for the report of a failure."""

    def __init__(self, table: Path, chance: random.Random) -> None:
        self.table, self.chance = table, chance
        self.did: list[str] = []
        self.held: list[tuple[DeltaTable, list[int]]] = []
        self.appended: list[int] = []
        self.vacuum_knows: set[Path] | None = None

    def at(self, seam: str) -> None:
        """Act at a seam, or not."""
        if self.chance.random() < 0.5:
            acts = (self.optimize, self.spark_vacuum, self.vacuum, self.hold, self.append)
            act = self.chance.choices(acts, weights=(6, 6, 1, 2, 0.5))[0]
            self.did.append(f"{seam}: {act.__name__}")
            act()

    def optimize(self) -> None:
        DeltaTable(self.table).optimize.compact()

    def vacuum(self) -> None:
        DeltaTable(self.table).vacuum(dry_run=False, full=True)

    def spark_vacuum(self) -> None:
        """Spark's begins at one seam with the files that are to stay, and removes others at a later one."""
        if self.vacuum_knows is not None:
            self.end_vacuum(self.vacuum_knows)
            self.vacuum_knows = None
            return
        log = sorted((self.table / "_delta_log").glob("*.json"))
        actions = [json.loads(line) for file in log for line in file.read_text().splitlines()]
        self.vacuum_knows = {on_disk(self.table, each["add"]["path"]) for each in actions if "add" in each}

    def end_vacuum(self, known: set[Path]) -> None:
        """Remove the old ones of the files that are there now, but for those that were known at its start."""
        for path in self.table.rglob("*.parquet"):
            hidden = path.relative_to(self.table).parts[0].startswith("_")
            if not hidden and time.time() - path.stat().st_mtime > WEEK and path not in known:
                path.unlink()

    def hold(self) -> None:
        """Open the version of now, and read it to the end now and later."""
        table = DeltaTable(self.table)
        self.held.append((table, read(table)))

    def append(self) -> None:
        self.appended.append(FOREIGN + len(self.appended))
        rows = pa.table({"id": [self.appended[-1]], "place": [PLACES[self.appended[-1] % len(PLACES)]]})
        write_deltalake(self.table, rows, mode="append")


@dataclasses.dataclass(frozen=True)
class Seams(Journal):
    """A journal that lets the second program act before and after each stage; the process may be killed there."""

    seam: Callable[[str], None] = lambda _: None

    def write(self, stage: str, state: Any, *findings: Any, stream: str | None = None) -> None:
        super().write(stage, state, *findings, stream=stream)
        self.seam(f"{stage} {state}")


class Game:
    """One seed: a stream, a second program, and an operator who does what the refusals say."""

    def __init__(self, home: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.life = Life(Settings.load({"home": home}), STREAM)
        self.chance = random.Random(seed)
        self.second = SecondProgram(self.life.table, self.chance)
        self.kills = self.chance.choice((0, 0, 1, 2))
        self.checked = DeltaTable(self.life.table).version()
        commit = DeltaSink.commit_actions

        def interrupted(sink: DeltaSink, *arguments: Any) -> None:
            at_table = sink.path == self.life.table
            if at_table:
                self.seam("before a commit")
            commit(sink, *arguments)
            if at_table:
                self.seam("after a commit")

        monkeypatch.setattr(DeltaSink, "commit_actions", interrupted)

    def seam(self, name: str) -> None:
        self.second.at(name)
        if self.kills and self.chance.random() < 0.1:
            self.kills -= 1
            self.second.did.append(f"{name}: killed")
            raise Killed

    def carry_out(self, plan: str, replay: Callable[[RecoveryContext], Mapping[str, Any]], *, may_abort: bool) -> str:
        """Apply a plan, and after each kill and refusal go on; returns its outcome."""
        settings = self.life.settings
        step: Callable[..., None] = apply
        for _ in range(20):
            whole = recovery_of(settings, [STREAM], TOPICS, load(settings, plan), RecoveryEvents(), replay=replay)
            whole = dataclasses.replace(whole, journal=Seams(whole.journal.handle, seam=self.seam))
            try:
                step(whole)
            except Killed:
                pass
            except RecourseError as error:
                assert error.next_step and not isinstance(error, LedgerConflict), error
                self.second.did.append(f"refused: {error}")
                self.accept()
            outcome = journal_of(settings, plan).outcome
            if outcome in ("published", "aborted"):
                return outcome
            if outcome == "aborting" or (may_abort and self.chance.random() < 0.3):
                step = give_up
            else:
                step = apply if outcome == "planned" else resume
        raise AssertionError("it does not come to an end")

    def accept(self) -> None:
        """Accept what the second program has appended."""
        _, foreign = newest(walk(self.life.table), STREAM.name)
        for commit in foreign:
            if commit.version not in self.life.record.accepts(STREAM.primary.name):
                accept(self.life.settings, STREAM, STREAM.primary.name, commit.version, "the second program")

    def check(self, ids: list[int]) -> None:
        """The stream's rows are these, and every version that a reader has held is whole: all wrong, or all right."""
        table = DeltaTable(self.life.table)
        assert own(read(table)) == ids
        for version in range(self.checked + 1, table.version()):
            assert own(read(DeltaTable(self.life.table, version=version))) in (WRONG, RIGHT), version
        self.checked = table.version()
        for held, then in self.second.held:
            assert read(held) == then


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    life = Life.begin(tmp_path_factory.mktemp("made"))
    return life.run(*range(6), wrong=range(3, 6), bug=range(3, 6)).settings.home


SHORT = (1, 4, 6, 8)
"""They fail if a publish computes its change once, if a link stays as old as its file, or if the newest version counts
as that of the publish."""
SEEDS = [*SHORT, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(200) if seed not in SHORT)]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_a_second_program_does_beside_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    shutil.copytree(made, tmp_path / "home")
    for file in (tmp_path / "home" / "tables").rglob("*.parquet"):
        os.utime(file, (time.time() - 4 * WEEK,) * 2)
    game = Game(tmp_path / "home", seed, monkeypatch)
    try:
        play(game)
    except BaseException:
        print(f"seed {seed}:", *game.second.did, sep="\n  ")
        raise


def play(game: Game) -> None:
    """A recovery, perhaps its undo, and the next batch."""
    life = game.life
    plan = plan_one(life.snapshot(TOPICS), Target("batch", "2")).id
    game.second.at("planned")
    ids = RIGHT if game.carry_out(plan, replayed, may_abort=True) == "published" else WRONG
    game.check(ids)
    if ids == RIGHT and game.chance.random() < 0.6:
        undo = plan_undo(life.settings, {STREAM.name: STREAM}, TOPICS, load(life.settings, plan)).id
        game.second.at("undo planned")
        ids = WRONG if game.carry_out(undo, lambda _: {"since": 0}, may_abort=True) == "published" else RIGHT
        game.check(ids)
    game.accept()
    assert life.refused(TOPICS) == []
    life.batch(6, generation=life.record.generation)
    game.check(sorted([*ids, *range(60, 70)]))
