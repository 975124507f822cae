"""A recovery beside a rebuild by hand: the same records through the corrected function, until the table is right.

    python -m benchmarks rebuild --records 1000000

Both begin with a command and end with a right table, without a running stream: `recourse recover apply`, with its
savepoint, fence, audit and publish; and a batch program of Spark with its own Kafka source, which overwrites the table.
`ratio` is the recovery's rate in records per second by that of the program.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from benchmarks.run import Report, Row, in_turn, seconds_of, verdict
from benchmarks.scenarios.recovery import many_movements
from orchestration.cli.demo import RIGHT, WRONG, Story
from streaming_jobs.examples.stock.movements import TOPIC, inventory
from streaming_jobs.platform.broker import Broker
from streaming_jobs.platform.table_rows import rows
from streaming_jobs.settings import Settings

_LONGEST = 600.0


def run(
    report: Report,
    *,
    records: Annotated[int, "records that the wrong code has read"] = 1_000_000,
    products: Annotated[int, "rows of the table, and of the state"] = 200,
    rounds: Annotated[int, "rounds, each in the other order"] = 1,
    least: Annotated[float, "the recovery's rate by the program's, at least"] = 0.8,
) -> None:
    report.table("rebuild", [_measured(number, records, products, least) for number in range(rounds)])


def _measured(number: int, records: int, products: int, least: float) -> Row:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as home:
        settings = Settings.load({"home": Path(home)})
        with Broker(settings) as broker:
            story = Story(Path(home), settings, bootstrap := broker.start(), 0)
            story.all = many_movements(records, products)
            story.begin()
            story.deploy(WRONG)
            story.feed(story.all)
            story.recourse("streams", "run", "inventory", "--trigger", "available-now", quiet=True)
            story.deploy(RIGHT)
            plan = story.plan_of("inventory", "--to-earliest", show=False)
            by_hand = Path(home) / "by_hand"
            program = [sys.executable, "-m", "benchmarks.speed.peers.batch_spark", bootstrap, TOPIC, str(by_hand)]
            ways = {
                "recovery": lambda: story.recourse("recover", "apply", plan, "--yes", quiet=True),
                "batch": lambda: subprocess.run(program, check=True, timeout=_LONGEST),
            }
            seconds = {name: seconds_of(ways[name]) for name in in_turn([*ways], number)}
            truth = {(name, stock) for name, (stock, _, _) in inventory(story.all).items()}
            for table in (settings.tables / "inventory", by_hand):
                if {(row["product"], row["quantity"]) for row in rows(table).to_pylist()} != truth:
                    raise RuntimeError(f"{table} is not the truth")
    ratio = seconds["batch"] / seconds["recovery"]
    return {
        "records": records,
        "products": products,
        "recovery_s": seconds["recovery"],
        "batch_s": seconds["batch"],
        "recovered_per_s": records / seconds["recovery"],
        "ratio": ratio,
        "verdict": verdict(ratio >= least),
    }
