"""A recovery's replay beside the stream's own backlog: the same records, a session each, in turns.

    python -m benchmarks.replay --records 1000000 --rounds 2

The stream is `inventory` of the demonstration. `backlog` is a first run over all records, `replay` the stage of that
name in a recovery that goes back to the very start; both begin with the start of Spark. `planning` is `recover plan`,
`besides` what `recover apply` takes beyond the replay.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from orchestration.cli.demo import RIGHT, Story
from streaming_jobs.examples.stock.movements import PARTITIONS, TOPIC, inventory
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics


def main() -> None:
    """Print a line a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print("| records | backlog s | replay s | ratio | planning s | besides s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for _ in range(options.rounds):
        home = Path(tempfile.mkdtemp(prefix="recourse-replay-"))
        try:
            settings = Settings.load({"home": home, "broker.heap_mb": 512})
            with Broker(settings) as broker:
                print(_line(Story(home, settings, broker.start(), options.records)), flush=True)
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _line(story: Story) -> str:
    Topics.of(story.settings.kafka, story.bootstrap).create(TOPIC, PARTITIONS)
    story.deploy(RIGHT)
    story.feed(story.all)
    run = ("streams", "run", "inventory", "--trigger", "available-now")
    backlog = _seconds(story, *run)[0]
    planning, text = _seconds(story, "recover", "plan", "inventory", "--to-batch", "-1", "--output", "json")
    plan = str(json.loads(text)["id"])
    applied = _seconds(story, "recover", "apply", plan, "--yes")[0]
    found = {r["product"]: (r["quantity"], r["movements"]) for r in story.rows("inventory")}
    assert found == {product: truth[:2] for product, truth in inventory(story.all).items()}
    journal = json.loads(_seconds(story, "recover", "show", plan, "--output", "json")[1])["journal"]
    at = {(line["stage"], line["state"]): line["at"] for line in journal}
    replay = at["replay", "done"] - at["replay", "begun"]
    times = f"{backlog:.1f} | {replay:.1f} | {backlog / replay:.2f} | {planning:.1f} | {applied - replay:.1f}"
    return f"| {len(story.all):,} | {times} |"


def _seconds(story: Story, *arguments: str) -> tuple[float, str]:
    began = time.monotonic()
    text = story.recourse(*arguments, quiet=True)
    return time.monotonic() - began, text


if __name__ == "__main__":
    main()
