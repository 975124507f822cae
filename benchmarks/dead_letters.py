"""What dead letters cost a stream that has none: the work `stateless` with verdicts on its JSON, and without.

    python -m benchmarks.dead_letters [rounds]

Both are the product, in turns, on the same backlog of a million good records; the other one's format is a plain
`from_json` that calls every record good. Prints records a second and CPU seconds of the whole process tree, medians,
and the ratios.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from benchmarks.speed import flows
from benchmarks.speed.contestants import Recourse
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.flows import PAYMENT, TOPIC
from benchmarks.speed.measure import Figures, Place, backlog
from benchmarks.speed.records import generate
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

RECORDS = 1_000_000


@dataclass(frozen=True)
class Lenient:
    """JSON as `from_json` reads it; no record is refused."""

    schema: StructType

    def decode(self, frame: DataFrame, value: str) -> DataFrame:
        """Add `_record`, and `_bad` that is always false."""
        parsed = F.from_json(F.col(value).cast("string"), self.schema)
        return frame.withColumns({"_record": parsed, "_bad": F.lit(False)})

    def diagnose(self, value: bytes | None) -> tuple[str, str]:
        """Never asked: nothing is refused."""
        raise AssertionError(f"{value!r} was refused")


@stream(source=KafkaTopic(TOPIC, value=Lenient(PAYMENT)), sink=DeltaTable("stateless"))
def stateless(payments: DataFrame) -> DataFrame:
    """The same work."""
    frame: DataFrame = flows.stateless(payments)
    return frame


def main() -> None:
    """Run both in turns."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    ways = [
        Recourse("with verdicts", works=("stateless",)),
        Recourse("without", works=("stateless",), flows="benchmarks.dead_letters"),
    ]
    found: dict[str, list[Figures]] = {way.name: [] for way in ways}
    records = generate(RECORDS, 1)
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
        Broker(Settings.load({"home": Path(folder) / "broker", "broker.heap_mb": 512})) as broker,
    ):
        place = Place(broker.start(), Path(folder))
        create_topic(place.bootstrap, "backlog")
        feed_backlog(place.bootstrap, "backlog", records)
        for number in range(rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                found[way.name].append(backlog(way, "stateless", place, "backlog", records))
    cpu = {name: median(f.cpu_s for f in figures) for name, figures in found.items()}
    rate = {name: median(f.rate or 0.0 for f in figures) for name, figures in found.items()}
    for name, seconds in cpu.items():
        print(f"{name}: {rate[name] / 1e3:.0f}k records/s, {seconds:.1f} CPU seconds")
    print(f"CPU ratio {cpu['with verdicts'] / cpu['without']:.3f}, time {rate['without'] / rate['with verdicts']:.3f}")


if __name__ == "__main__":
    main()
