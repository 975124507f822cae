"""Works from a backlog and live, beside Kafka Streams, Flink SQL and two ways of plain PySpark.

    python -m benchmarks speed                                    everything, more than two hours
    python -m benchmarks speed --peers recourse --works stateless --kinds live --seconds 10 --warm-up 8 --rounds 1
    python -m benchmarks speed --variant fast:stream.path=driver --peers recourse,fast
    python -m benchmarks speed --out runs.json --rounds 1         adds to the runs in that file
    python -m benchmarks speed --report runs.json --plot speed.svg

The contestants take turns on one broker. Exit code 1: a contestant failed, or wrote something else than the truth, or
was disturbed each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import gmtime, strftime
from typing import Annotated

from benchmarks.feeds import create_topic, feed_backlog
from benchmarks.place import Place, place
from benchmarks.processes import ChildFailed
from benchmarks.run import Report, in_turn, progress
from benchmarks.speed import contestants
from benchmarks.speed.contestants import Contestant, Recourse, RecourseTopics
from benchmarks.speed.measure import KINDS, Kind, WrongOutput, backlog, live
from benchmarks.speed.records import FORMATS, JOINS, LIVE, WORKS, Records, Work, generate, inputs
from benchmarks.speed.report import Run, draw, load, save, tables

_BACKLOG = "backlog"
_TRIES = 3
_SETTINGS = "NAME:KEY=VALUE,...: the product with these settings, as a contestant of that name"


def run(
    comparison: Report,
    *,
    peers: Annotated[tuple[str, ...], "who runs; everybody if left out"] = (),
    works: tuple[Work, ...] = WORKS,
    kinds: tuple[Kind, ...] = KINDS,
    records: Annotated[int, "of the backlog"] = 1_000_000,
    seconds: Annotated[int, "of a live run that are measured"] = 30,
    warm_up: Annotated[int, "seconds of a live run before them"] = 30,
    rounds: int = 3,
    seed: Annotated[int, "of the records"] = 1,
    quiet: Annotated[float, "cores; runs that more other load disturbed are made again"] = 100.0,
    variant: Annotated[Sequence[str], _SETTINGS] = (),
    topic_variant: Annotated[Sequence[str], f"{_SETTINGS}, from topic to topic"] = (),
    out: Annotated[Path | None, "JSON; runs are added to those in it"] = None,
    report: Annotated[tuple[Path, ...], "run nothing, print the runs in these files"] = (),
    plot: Annotated[Path | None, "draw them (.svg or .png); needs matplotlib"] = None,
) -> None:
    runs = [run for file in report or ([out] if out else []) for run in load(file)]
    if not report:
        chosen = _contestants(peers, variant, topic_variant)
        for contestant in chosen:
            contestant.prepare()
        with place(heap_mb=512) as here:
            payments = generate(records, seed)
            backlogs = _Backlogs(here, payments)

            def one_run(number: int, work: Work, kind: Kind, contestant: Contestant) -> Run:
                if kind == _BACKLOG:
                    return backlog(contestant, work, here, backlogs.topic(work), payments)
                return live(contestant, work, here, seed=seed + 1 + number, seconds=seconds, warm_up=warm_up)

            for turn in _turns(chosen, works, kinds, rounds):
                figures = _undisturbed(one_run, turn, quiet)
                comparison.judge(figures is not None)
                if figures is not None:
                    runs.append({**figures, "at": strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())})
                    if out:
                        save(out, runs)
    comparison.say(tables(runs))
    if plot:
        draw(runs, plot)


@dataclass
class _Backlogs:
    """The topics that hold the records, each made when the first work needs it."""

    place: Place
    records: Records
    _fed: set[str] = field(default_factory=set)

    def topic(self, work: Work) -> str:
        name = f"{_BACKLOG}.{work}" if work in FORMATS else f"{_BACKLOG}.joined" if work in JOINS else _BACKLOG
        if name not in self._fed:
            for each in inputs(name, work):
                create_topic(self.place.bootstrap, each)
            seconds = feed_backlog(self.place.bootstrap, name, self.records, work)
            progress(f"{name}: {len(self.records):,} records put in {seconds:.1f} s")
            self._fed.add(name)
        return name


Turn = tuple[int, Work, Kind, Contestant]


def _turns(chosen: Sequence[Contestant], works: Sequence[Work], kinds: Sequence[Kind], rounds: int) -> Iterator[Turn]:
    """Contestants that can do a work take turns on it; each round begins with another contestant."""
    for number in range(rounds):
        for work in works:
            for kind in kinds:
                able = [peer for peer in chosen if work in peer.works and (kind == _BACKLOG or work in LIVE)]
                yield from ((number, work, kind, peer) for peer in in_turn(able, number))


def _undisturbed(one_run: Callable[..., Run], turn: Turn, quiet: float) -> Run | None:
    """The figures of one run, made again while others disturb it; None if it gave none."""
    _, work, kind, contestant = turn
    name = f"{work} {kind} {contestant.name}"
    for _ in range(_TRIES):
        try:
            figures = one_run(*turn)
        except (ChildFailed, WrongOutput, LookupError, TimeoutError) as error:
            progress(f"{name}: {type(error).__name__}: {error}")
            return None
        if figures["elsewhere"] <= quiet:
            progress(f"{name}: {', '.join(f'{k} {v}' for k, v in figures.items())}")
            return figures
        progress(f"{name}: disturbed by {figures['elsewhere']:.2f} cores of other load, not counted")
    return None


def _contestants(peers: Sequence[str], variants: Sequence[str], topic_variants: Sequence[str]) -> list[Contestant]:
    known = contestants.everybody()
    known += [contestants.variant(Recourse, text) for text in variants]
    known += [contestants.variant(RecourseTopics, text) for text in topic_variants]
    names = [contestant.name for contestant in known]
    if unknown := set(peers) - set(names):
        raise SystemExit(f"no contestant {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [contestant for contestant in known if contestant.name in (peers or names)]
