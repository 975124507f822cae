"""What row rules add to the time of a batch: the stateless work without rules, with ten, and with rows set aside.

    python -m benchmarks.row_rules --sizes 100,100000 --rounds 3 --out benchmarks/results/row-rules.json

One session; in each round every variant reads the same topic into a table of its own, in turns. The figures are medians
in ms of whole batches (StreamingQueryProgress, triggerExecution) without the first ones, of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.measuring import Figures, Workshop, named, on_topic, quiet, save, table, workshop
from benchmarks.speed import flows
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.records import generate
from streaming_jobs.declare.rules import Between, Holds, InSet, Matches, NotNull, Rule

_BATCHES = {100: 120}
_WARM_UP = {100: 40}
_FEW, _SECONDS = 9, 600.0
TEN: tuple[Rule, ...] = (
    NotNull("id"),
    NotNull("account"),
    NotNull("at"),
    Between("id", low=0),
    Between("amount", -1_000_000_000, 1_000_000_000),
    Between("at", low=datetime(2000, 1, 1, tzinfo=UTC)),
    InSet("kind", ["card", "cash", "wire", "note"], on_fail="quarantine"),
    Matches("account", "^.+$", on_fail="quarantine"),
    Holds("net <= amount or amount < 0", on_fail="drop"),
    Holds("abs(net) <= abs(amount) + 1"),
)
VARIANTS: Mapping[str, Sequence[Rule]] = {
    "no rules": (),
    "ten rules": TEN,
    "a tenth set aside": (*TEN, Holds("id % 10 <> 0", name="not a tenth", on_fail="quarantine")),
}


def one_run(shop: Workshop, variant: str, size: int, number: int) -> list[float]:
    """Milliseconds of each batch of one stream, without the first ones."""
    name = f"rules_{size}_{number}_{[*VARIANTS].index(variant)}"
    plain = named(on_topic(flows.stateless, f"rules-{size}"), name)
    stream = replace(plain, rules={name: VARIANTS[variant]} if VARIANTS[variant] else {})
    bound = shop.settings.stream.model_copy(update={"max_offsets_per_trigger": size})
    started = shop.start(stream, shop.settings.model_copy(update={"stream": bound}))
    shop.finish(started, seconds=_SECONDS)
    done = [float(started.progress[batch]["triggerExecution"]) for batch in sorted(started.progress)]
    return done[_WARM_UP.get(size, 3) :]


def main() -> int:
    """Measure each size and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_rules", description=__doc__)
    parser.add_argument("--sizes", default="100,100000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    rows: list[Figures] = []
    with workshop({}) as shop:
        for size in (int(text) for text in options.sizes.split(",")):
            batches = _BATCHES.get(size, _FEW)
            create_topic(shop.bootstrap, f"rules-{size}")
            feed_backlog(shop.bootstrap, f"rules-{size}", generate(batches * size, seed=1))
            times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            for number in range(options.rounds):
                for variant in VARIANTS:
                    times[variant] += one_run(shop, variant, size, number)
            median = {variant: statistics.median(each) for variant, each in times.items()}
            plain = median["no rules"]
            rows += [
                {"records": size, "variant": name, "ms": round(ms, 1), "to no rules": round(ms / plain, 3)}
                for name, ms in median.items()
            ]
    sys.stdout.write(table(rows))
    save(options.out, batches=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
