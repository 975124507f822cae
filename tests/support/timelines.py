"""A stream's life on disk for tests of its timeline: a ledger of any length, sessions, deploys, savepoints."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder
from tests.support.objects import path_of
from tests.support.worlds import PRIMARY, STREAM, TOPIC, TOPIC_ID, ends

MONDAY = datetime(2026, 11, 23, 0, 0, tzinfo=UTC).timestamp()
"""A day of batches begins here."""
OLD, NEW = "fd2f87f71956", "0a1b2c3d4e5f"


def ledger_line(batch: int, at: float, *, generation: int = 1, code: str = OLD, rows: int = 15, **more: Any) -> str:
    """The line of one batch that ended at `at`, as `LedgerFile.append` writes it."""
    before, after = ends(batch - 1)[TOPIC], ends(batch)[TOPIC]
    line = {
        "g": generation,
        "b": batch,
        "t": round(at, 3),
        "table": PRIMARY,
        "versions": {PRIMARY: batch + 1},
        "offsets": {TOPIC: {"id": TOPIC_ID, "start": before, "end": after}},
        "rows": {"written": rows},
        "txns": {},
        "code": [code, "0.1.0"],
        "ms": 250,
    }
    return json.dumps({**line, **more}, separators=(",", ":"))


def lay_ledger(settings: Settings, lines: Iterable[str], stream: str = STREAM) -> None:
    """Write lines to the files of their days; all days but the newest are compressed."""
    folder = StreamFolder.of(settings, stream).make().ledger
    folder.mkdir(exist_ok=True)
    days: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        days[f"{datetime.fromtimestamp(json.loads(line)['t'], UTC):%Y-%m-%d}"].append(line)
    for day, of_day in days.items():
        text = ("\n".join(of_day) + "\n").encode()
        if day == max(days):
            (folder / f"{day}.jsonl").write_bytes(text)
        else:
            (folder / f"{day}.jsonl.gz").write_bytes(gzip.compress(text, 1))


def lay_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def lay_sessions(settings: Settings, *events: tuple[float, str], stream: str = STREAM) -> None:
    """Write session events: (time, what)."""
    values = [{"at": at, "what": what, "pid": 4711 + place} for place, (at, what) in enumerate(events)]
    lay_lines(path_of(StreamFolder.of(settings, stream).sessions), values)


def lay_deploys(settings: Settings, *deploys: tuple[float, str, str], stream: str = STREAM) -> None:
    """Write deploys: (time, version before, version after)."""
    values = [{"at": at, "from": before, "to": after, "by": "anna"} for at, before, after in deploys]
    lay_lines(path_of(StreamFolder.of(settings, stream).deploys), values)
