"""The command: what is run, and what is printed of it.

    python -m benchmarks.speed                                    everything, more than two hours
    python -m benchmarks.speed --peers recourse --works stateless --kinds live --seconds 10 --warm-up 8 --rounds 1
    python -m benchmarks.speed --variant fast:stream.path=driver --peers recourse,fast
    python -m benchmarks.speed --out runs.json --rounds 1         adds to the runs in that file
    python -m benchmarks.speed --report runs.json --plot speed.svg

The table goes to standard output, what happens to standard error. Exit code 1: a contestant failed, or wrote
something else than the truth, or was disturbed each time.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.speed import results
from benchmarks.speed.contestants import Contestant, everybody, topic_variant, variant
from benchmarks.speed.measure import KINDS
from benchmarks.speed.records import WORKS
from benchmarks.speed.report import markdown
from benchmarks.speed.series import Series


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for and print it."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order: contestants, broker and folder go first
    failures = 0
    if options.report:
        runs = [run for file in options.report for run in results.load(file)]
    else:
        runs = results.load(options.out) if options.out else []
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            failures = _run(options, Path(folder), runs)
    sys.stdout.write(markdown(runs))
    if options.plot:
        from benchmarks.speed.plot import draw

        draw(runs, options.plot)
    return 1 if failures else 0


def _run(options: argparse.Namespace, folder: Path, runs: list[results.Run]) -> int:
    def keep(run: results.Run) -> None:
        runs.append(run)
        if options.out:
            results.save(options.out, runs)

    series = Series(
        peers=_peers(options),
        works=options.works,
        kinds=options.kinds,
        records=options.records,
        seconds=options.seconds,
        warm_up=options.warm_up,
        rounds=options.rounds,
        seed=options.seed,
        quiet=options.quiet,
    )
    return series.run(folder, keep)


def _peers(options: argparse.Namespace) -> list[Contestant]:
    known: list[Contestant] = [*everybody(), *options.variant, *options.topic_variant]
    wanted = options.peers or [peer.name for peer in known]
    if unknown := set(wanted) - {peer.name for peer in known}:
        raise SystemExit(f"no contestant {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in known)}")
    return [peer for peer in known if peer.name in wanted]


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
    add("--warm-up", type=int, default=30, help="seconds of a live run before them")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=1, help="of the records")
    add("--quiet", type=float, default=100.0, metavar="CORES", help="make runs again that more other load disturbed")
    add("--variant", type=variant, action="append", default=[], metavar="NAME:KEY=VALUE,...", help="see above")
    add(
        "--topic-variant",
        type=topic_variant,
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="to topics",
    )
    add("--out", type=Path, metavar="FILE", help="JSON; runs are added to those in it")
    add("--report", type=Path, nargs="+", metavar="FILE", help="run nothing, print the runs in these files")
    add("--plot", type=Path, metavar="FILE", help="draw them (.svg or .png); needs matplotlib")
    options = parser.parse_args(arguments)
    for name, allowed in (("works", WORKS), ("kinds", KINDS)):
        if unknown := set(getattr(options, name)) - set(allowed):
            parser.error(f"--{name}: no {', '.join(sorted(unknown))}; there are {', '.join(allowed)}")
    return options


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
