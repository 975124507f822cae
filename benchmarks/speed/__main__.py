"""The command: which runs, in which order, and what is printed of them.

    python -m benchmarks.speed                                    everything, about an hour
    python -m benchmarks.speed --peers recourse --works stateless --kinds live --seconds 10 --warm-up 8
    python -m benchmarks.speed --variant fast:stream.path=driver --peers recourse,fast
    python -m benchmarks.speed --out runs.json --rounds 1         adds to the runs in that file
    python -m benchmarks.speed --report runs.json --plot speed.svg

The table goes to standard output, what happens to standard error. Exit code 1: a contestant failed, or wrote
something else than the truth.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.speed import results
from benchmarks.speed.contestants import Contestant, everybody, variant
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.measure import KINDS, Figures, Kind, Place, WrongOutput, backlog, live
from benchmarks.speed.process import ContestantFailed
from benchmarks.speed.records import WORKS, Records, Work, generate
from benchmarks.speed.report import markdown
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings

_BROKER_HEAP_MB = 512
_BACKLOG = "backlog"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for and print it."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order: contestants, broker and folder go first
    failures = 0
    if options.report:
        runs = results.load(options.report)
    else:
        runs = results.load(options.out) if options.out else []
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            failures = _run_all(options, Path(folder), runs)
    sys.stdout.write(markdown(runs))
    if options.plot:
        from benchmarks.speed.plot import draw

        draw(runs, options.plot)
    return 1 if failures else 0


def _run_all(options: argparse.Namespace, folder: Path, runs: list[results.Run]) -> int:
    """Every run in its turn, added to `runs` and to the file; how many failed."""
    peers = _peers(options)
    for peer in peers:
        peer.prepare()
    failures = 0
    with Broker(Settings.load({"home": folder / "broker", "broker.heap_mb": _BROKER_HEAP_MB})) as broker:
        place = Place(broker.start(), folder)
        records = generate(options.records, options.seed)
        if _BACKLOG in options.kinds:
            create_topic(place.bootstrap, _BACKLOG)
            seconds = feed_backlog(place.bootstrap, _BACKLOG, records)
            _say(f"{len(records):,} records put into the topic in {seconds:.1f} s")
        for number, work, kind, peer in _turns(options, peers):
            try:
                figures = _run(peer, work, kind, place, records, options, number)
            except (ContestantFailed, WrongOutput, LookupError) as error:
                failures += 1
                _say(f"{work} {kind} {peer.name}: {type(error).__name__}: {error}")
                continue
            runs.append({**figures.as_dict(), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
            _say(f"{work} {kind} {peer.name}: {_words(figures)}")
            if options.out:
                results.save(options.out, runs)
    return failures


def _turns(options: argparse.Namespace, peers: Sequence[Contestant]) -> Iterator[tuple[int, Work, Kind, Contestant]]:
    """Contestants take turns on each work; each round begins with another one."""
    for number in range(options.rounds):
        first = number % len(peers)
        for work in options.works:
            for kind in options.kinds:
                for peer in (*peers[first:], *peers[:first]):
                    if work in peer.works:
                        yield number, work, kind, peer


def _run(
    peer: Contestant,
    work: Work,
    kind: Kind,
    place: Place,
    records: Records,
    options: argparse.Namespace,
    number: int,
) -> Figures:
    if kind == "backlog":
        return backlog(peer, work, place, _BACKLOG, records)
    seed = options.seed + 1 + number
    return live(peer, work, place, seed=seed, seconds=options.seconds, warm_up=options.warm_up)


def _peers(options: argparse.Namespace) -> list[Contestant]:
    known: list[Contestant] = [*everybody(), *options.variant]
    wanted = options.peers or [peer.name for peer in known]
    if unknown := set(wanted) - {peer.name for peer in known}:
        raise SystemExit(f"no contestant {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in known)}")
    return [peer for peer in known if peer.name in wanted]


def _words(figures: Figures) -> str:
    shown = figures.as_dict()
    return ", ".join(f"{k} {v}" for k, v in shown.items() if k not in ("peer", "work", "kind", "records"))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peers", type=_list, default=[], help="who runs; everybody if left out")
    add("--works", type=_list, default=list(WORKS), help=",".join(WORKS))
    add("--kinds", type=_list, default=list(KINDS), help=",".join(KINDS))
    add("--records", type=int, default=1_000_000, help="of the backlog")
    add("--seconds", type=int, default=30, help="of a live run that are measured")
    add("--warm-up", type=int, default=15, help="seconds of a live run before them")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=1, help="of the records")
    add("--variant", type=variant, action="append", default=[], metavar="NAME:KEY=VALUE,...", help="see above")
    add("--out", type=Path, metavar="FILE", help="JSON; runs are added to those in it")
    add("--report", type=Path, metavar="FILE", help="run nothing, print the runs in this file")
    add("--plot", type=Path, metavar="FILE", help="draw them (.svg or .png); needs matplotlib")
    options = parser.parse_args(arguments)
    for name, allowed in (("works", WORKS), ("kinds", KINDS)):
        if unknown := set(getattr(options, name)) - set(allowed):
            parser.error(f"--{name}: no {', '.join(sorted(unknown))}; there are {', '.join(allowed)}")
    return options


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    sys.exit(main())
