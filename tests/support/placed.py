"""A stream whose rows name their records, with its state, as it would lie on disk; see `proofs.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime import output_plans
from streaming_jobs.sinks.delta import dead_letters
from streaming_jobs.storage.object_files import LocalFiles, ObjectHandle
from streaming_jobs.verification.subject import StreamTable, Subject
from streaming_jobs.verification.verifier import StreamVerdict, verify
from tests.support import proofs
from tests.support.life import PER_BATCH, PLACES, STREAM, TOPIC, Life
from tests.support.proofs import CLEAN, SIZES, make_tables

COLUMNS = ["source_partition", "source_offset"]


def make_placed(home: Path) -> Path:
    """The tables; the state lies beside them."""
    made = make_tables(home / "tables")
    note_state(home, CLEAN)
    note_places(home, ["Project"])
    return made


def note_state(home: Path, stream: str, accepted: Sequence[dict[str, Any]] = ()) -> None:
    """The record of a stream that has had one generation."""
    folder = home / "state" / stream
    folder.mkdir(parents=True, exist_ok=True)
    opened = {"number": 1, "opened_at": 0.0, "reason": "first start", "from_generation": None, "from_batch": -1}
    start = {str(partition): 0 for partition in SIZES}
    topics = [{"name": proofs.TOPIC, "topic_id": proofs.TOPIC_ID, "start": start}]
    record = {"format": 1, "stream": stream, "generations": [opened], "tables": [], "topics": topics}
    (folder / "stream.json").write_text(json.dumps({**record, "accepted": list(accepted), "void_ranges": []}))


def note_places(home: Path, nodes: list[str]) -> None:
    """The row that the stream makes of a record."""
    made = {"fd2f87f71956": {CLEAN: {"nodes": nodes, "position": COLUMNS}}}
    output_plans.write(ObjectHandle(LocalFiles(home / "state" / CLEAN), "outputs.json"), made)


def by_place(tables: Path, keys: tuple[str, ...] = (), **options: Any) -> StreamVerdict:
    """The verdict on the stream."""
    subject = Subject(CLEAN, CLEAN, proofs.TOPIC, tables=(StreamTable(CLEAN, "written", keys),))
    options = {"topics": proofs.topic(), **options}
    return verify((subject,), tables, options.pop("topics"), state=tables.parent / "state", **options).streams[0]


def refuse(tables: Path, stream: str, batch: int, rows: pa.Table) -> None:
    """Dead letters of rows that a table cannot hold, as a batch writes them."""
    rows = rows.append_column("__reason", pa.array(["not_utf8"] * rows.num_rows))
    name = f"{stream}_dead_letters"
    entry = {**proofs.entry(name, batch, rows.num_rows), "stream": stream}
    how = proofs.properties(entry)
    write_deltalake(tables / name, dead_letters._from_rows(rows), mode="append", commit_properties=how)


def named(offset: int) -> dict[str, pa.Array]:
    """The place of a refused row's record, as the row brings it."""
    return {"__topic": pa.array([TOPIC]), "__partition": pa.array([0], pa.int32()), "__offset": pa.array([offset])}


def refusing_batch(life: Life, number: int, place: Mapping[str, pa.Array], *, short: int = 1, code: str = "a") -> None:
    """A batch whose first rows are not written, and one of them is a dead letter."""
    ids = list(range(number * PER_BATCH, (number + 1) * PER_BATCH))
    written = ids[short:]
    rows = pa.table({"id": written, "place": [PLACES[i % len(PLACES)] for i in written]})
    entry = replace(life.entry(number, code=code), rows={"written": len(written), "dead_letters": 1})
    life.sink().commit(entry, lambda handle, how: write_deltalake(handle, rows, mode="append", commit_properties=how))
    ledger_file(life.settings, STREAM.name).append(entry, {})
    refuse(life.settings.tables, STREAM.name, number, pa.table({"id": ids[:1], "place": ["?"], **place}))
