"""A series of runs: the contestants take turns on one broker, and every run's figures are kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speed.contestants import Contestant
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.measure import Figures, Kind, Place, WrongOutput, backlog, live
from benchmarks.speed.process import ContestantFailed
from benchmarks.speed.records import Records, Work, generate
from benchmarks.speed.results import Run
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings

_BROKER_HEAP_MB = 512
_BACKLOG = "backlog"
_TRIES = 3


@dataclass(frozen=True)
class Series:
    """What is run. `quiet` is how many cores other programs may keep busy before a run is made again."""

    peers: Sequence[Contestant]
    works: Sequence[Work]
    kinds: Sequence[Kind]
    records: int
    seconds: int
    warm_up: int
    rounds: int
    seed: int
    quiet: float

    def run(self, folder: Path, keep: Callable[[Run], None]) -> int:
        """Run everything and give each run to `keep`; how many failed."""
        for peer in self.peers:
            peer.prepare()
        with Broker(Settings.load({"home": folder / "broker", "broker.heap_mb": _BROKER_HEAP_MB})) as broker:
            place = Place(broker.start(), folder)
            records = generate(self.records, self.seed)
            if "backlog" in self.kinds:
                create_topic(place.bootstrap, _BACKLOG)
                seconds = feed_backlog(place.bootstrap, _BACKLOG, records)
                _say(f"{len(records):,} records put into the topic in {seconds:.1f} s")
            return sum(not self._turn(*turn, place, records, keep) for turn in self._turns())

    def _turns(self) -> Iterator[tuple[int, Work, Kind, Contestant]]:
        """Contestants take turns on each work; each round begins with another one."""
        for number in range(self.rounds):
            first = number % len(self.peers)
            for work in self.works:
                for kind in self.kinds:
                    for peer in (*self.peers[first:], *self.peers[:first]):
                        if work in peer.works:
                            yield number, work, kind, peer

    def _turn(
        self,
        number: int,
        work: Work,
        kind: Kind,
        peer: Contestant,
        place: Place,
        records: Records,
        keep: Callable[[Run], None],
    ) -> bool:
        """One run, made again while others disturb it; whether it gave figures."""
        name = f"{work} {kind} {peer.name}"
        for _ in range(_TRIES):
            try:
                if kind == "backlog":
                    figures = backlog(peer, work, place, _BACKLOG, records)
                else:
                    seed = self.seed + 1 + number
                    figures = live(peer, work, place, seed=seed, seconds=self.seconds, warm_up=self.warm_up)
            except (ContestantFailed, WrongOutput, LookupError) as error:
                _say(f"{name}: {type(error).__name__}: {error}")
                return False
            if figures.elsewhere <= self.quiet:
                keep({**figures.as_dict(), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
                _say(f"{name}: {_words(figures)}")
                return True
            _say(f"{name}: disturbed by {figures.elsewhere:.2f} cores of other load, not counted")
        return False


def _words(figures: Figures) -> str:
    shown = figures.as_dict()
    return ", ".join(f"{k} {v}" for k, v in shown.items() if k not in ("peer", "work", "kind", "records"))


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
