"""The command: which runs, in which order, and what is printed of them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.speed import contestants as known
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.measure import KINDS, Figures, Place, WrongOutput, backlog, live
from benchmarks.speed.process import ContestantFailed
from benchmarks.speed.records import WORKS, Records, Work, generate
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings

_BROKER_HEAP_MB = 512


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 when a contestant failed or wrote something else than the truth."""
    options = _options(arguments)
    peers: list[known.Contestant] = [known.Recourse(), known.KafkaStreams()]
    peers = [peer for peer in peers if peer.name in options.peers]
    for peer in peers:
        peer.prepare()
    found: list[Figures] = []
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        broker = Broker(Settings.load({"home": folder / "broker", "broker.heap_mb": _BROKER_HEAP_MB}))
        with broker:
            place = Place(broker.start(), folder)
            records = generate(options.records, options.seed)
            if "backlog" in options.kinds:
                create_topic(place.bootstrap, "backlog")
                seconds = feed_backlog(place.bootstrap, "backlog", records)
                _say(f"fed {len(records):,} records in {seconds:.1f} s")
            for round_number in range(options.rounds):
                for work in options.works:
                    for kind in options.kinds:
                        for peer in peers:
                            if work not in peer.works:
                                continue
                            try:
                                figures = _run(peer, work, kind, place, records, options, round_number)
                            except (ContestantFailed, WrongOutput, LookupError) as error:
                                wrong += 1
                                _say(f"{peer.name} {work} {kind}: {error}")
                                continue
                            found.append(figures)
                            _say(json.dumps(figures.as_dict()))
    return 1 if wrong else 0


def _run(
    peer: known.Contestant,
    work: Work,
    kind: str,
    place: Place,
    records: Records,
    options: argparse.Namespace,
    round_number: int,
) -> Figures:
    if kind == "backlog":
        return backlog(peer, work, place, "backlog", records)
    seed = options.seed + 1 + round_number
    return live(peer, work, place, seed=seed, seconds=options.seconds, warm_up=options.warm_up)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description="Measure against the peers.")
    parser.add_argument("--works", type=_list, default=list(WORKS), help="stateless,windowed,running")
    parser.add_argument("--peers", type=_list, default=["recourse", "kafka-streams"], help="who runs")
    parser.add_argument("--kinds", type=_list, default=list(KINDS), help="backlog,live")
    parser.add_argument("--records", type=int, default=1_000_000, help="of the backlog")
    parser.add_argument("--seconds", type=int, default=30, help="of a live run that are measured")
    parser.add_argument("--warm-up", type=int, default=15, help="seconds of a live run before")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    sys.exit(main())
