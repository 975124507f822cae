"""Makes an archive of a home with the code of now: `python -m tests.homes.make v1`; needs Java, no network.

In it: four streams that have read 240 records in batches of 40, a dead letter, savepoints, a published recovery of
`every` and an undone one of `totals`, and the embedded broker's data. Make a new one, beside the old ones, whenever
the form of anything on disk changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.homes.flows import BEGIN, KEYS, STEP
from tests.support.driver import command, produce

ARCHIVES = Path(__file__).parent
ROOT = ARCHIVES.parent.parent
TOPIC, PARTITIONS, RECORDS = "events", 2, 240
STREAMS = ("every", "totals", "newest", "windows")


def event(number: int) -> tuple[bytes, bytes]:
    """Key and value of a record; of the key `x` each third one is a delete."""
    key = KEYS[number % len(KEYS)]
    value = {
        "k": key,
        "n": number,
        "price": number + 0.25,
        "gone": key == "x" and number % 18 == 5,
        "t": (BEGIN + number * STEP).isoformat(),
    }
    return key.encode(), json.dumps(value).encode()


def environment(home: Path, bootstrap: str, **more: str) -> dict[str, str]:
    """The variables for commands in that home."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RECOURSE_HOME": str(home),
        "RECOURSE_FLOWS": '["tests.homes.flows"]',
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "40",
        "RECOURSE_SPARK__DRIVER_MEMORY_MB": "1024",
        "RECOURSE_SPARK__SHUFFLE_PARTITIONS": "1",
        "RECOURSE_SPARK__EXTRA": '{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}',
        **more,
    }


def recourse(home: Path, bootstrap: str, *arguments: str) -> str:
    """Run a command; what it printed. Raises RuntimeError when it fails."""
    done = command(home.parent, environment(home, bootstrap), *arguments)
    if done.returncode:
        raise RuntimeError(f"recourse {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def plan_of(output: str) -> str:
    """The plan's id in what `recover plan -o json` printed."""
    return str(json.loads(output)["id"])


def fill(home: Path) -> None:
    """Make everything that the archive holds."""
    with Broker(Settings.load({"home": home})) as broker:
        bootstrap = broker.start()
        settings = Settings.load({"home": home})
        Topics.of(settings.kafka, bootstrap).create(TOPIC, PARTITIONS)

        def feed(numbers: Iterable[int]) -> None:
            produce(bootstrap, TOPIC, (event(number) for number in numbers))

        feed(range(80))
        produce(bootstrap, TOPIC, [(b"a b", b"not json")])
        run = ("streams", "run", *STREAMS, "--trigger", "available-now")
        recourse(home, bootstrap, *run)
        recourse(home, bootstrap, "savepoints", "create", "totals")
        feed(range(80, 160))
        recourse(home, bootstrap, *run)
        for stream, last in (("every", "apply"), ("totals", "undo")):
            plan = plan_of(recourse(home, bootstrap, "recover", "plan", stream, "--to-batch", "1", "-o", "json"))
            recourse(home, bootstrap, "recover", "apply", plan, "--yes")
            if last == "undo":
                recourse(home, bootstrap, "recover", "undo", plan, "--yes")
        feed(range(160, RECORDS))
        recourse(home, bootstrap, *run)


def main(name: str) -> None:
    """Write `<name>.tar.xz` beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        fill(home)
        for useless in ("logs", "dagster"):
            subprocess.run(["rm", "-rf", str(home / useless)], check=True)
        target = ARCHIVES / f"{name}.tar.xz"
        subprocess.run(["tar", "-C", folder, "-S", "-cJf", str(target), "home"], check=True)
        print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
