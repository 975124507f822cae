"""Histories of plain streaming jobs, as files: what Spark and Delta leave behind, with faults at chosen places.

A `PlainJob` writes checkpoint and table in the shapes that `tests/unit/streaming_jobs/inspection/plain_job.json` has of
real jobs, and keeps beside them what really is in the table: each record by topic life, partition and offset. So the
truth about losses and doubles does not come from what an inspection reads.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

JobKind = Literal["sink", "append", "append-once", "merge"]
"""Delta's own sink; foreachBatch with an append, the same with txnAppId and txnVersion, and with a MERGE."""
Record = tuple[int, int, int]
"""The life of the topic, its partition, its offset."""
TOPIC, APP = "orders", "plain-job"
_SCHEMA = {
    "type": "struct",
    "fields": [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("id", "string"), ("partition", "integer"), ("offset", "long"))
    ],
}
_HEAD = {
    "protocol": {"minReaderVersion": 1, "minWriterVersion": 2},
    "metaData": {
        "id": "",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(_SCHEMA),
        "partitionColumns": [],
        "configuration": {},
        "createdTime": 0,
    },
}


@dataclass
class Planned:
    """A batch as the checkpoint has it."""

    start: list[int]
    end: list[int]
    committed: bool = False


@dataclass
class PlainJob:
    """A job with its topic, its checkpoint and its table below `root`; all choices come from `chance`."""

    root: Path
    chance: random.Random
    kind: JobKind
    partitions: int = 2
    clock: float = 1_750_000_000.0
    checkpoints: list[Path] = field(default_factory=list)
    life: int = 0
    passed: set[Record] = field(default_factory=set)
    """The records that the job has passed, or that lie between its first record and its last."""
    removed: set[Record] = field(default_factory=set)
    """The records whose rows somebody has deleted on purpose, and those that the job has filtered."""
    keep: Callable[[Record], bool] = lambda record: True
    """The filter of the job."""

    def __post_init__(self) -> None:
        self.table = self.root / "table"
        (self.table / "_delta_log").mkdir(parents=True)
        self.ends = [0] * self.partitions
        self.files: dict[str, list[Record]] = {}
        self.live: dict[str, None] = {}
        self.before: list[dict[str, None]] = []
        """The live files of each version."""
        self.txns: dict[str, int] = {}
        self.done: list[int] | None = None
        """The highest offsets at which a batch has ended."""
        self.new_checkpoint([0] * self.partitions)

    # The topic.

    def produce(self, records: int) -> None:
        for _ in range(records):
            self.ends[self.chance.randrange(self.partitions)] += 1

    def recreate_topic(self) -> None:
        """The topic is deleted and created again; its new records have small offsets."""
        self.life += 1
        self.ends = [0] * self.partitions

    # The checkpoint.

    @property
    def checkpoint(self) -> Path:
        return self.checkpoints[-1]

    def new_checkpoint(self, start: list[int]) -> None:
        """A new folder, as by another checkpointLocation."""
        self._begin(
            self.root / f"checkpoint-{len(self.checkpoints)}", str(uuid.UUID(int=self.chance.getrandbits(128))), start
        )

    def wipe_checkpoint(self, start: list[int]) -> None:
        """Everything but `metadata` is deleted: the query keeps its id, and its batches begin at 0 again."""
        folder = self.checkpoints.pop()
        shutil.rmtree(folder)
        self._begin(folder, self.query, start)

    def delete_checkpoint(self, start: list[int]) -> None:
        """The folder is deleted; the next start is another query."""
        shutil.rmtree(self.checkpoints.pop())
        self._begin(self.root / "checkpoint-new", str(uuid.UUID(int=self.chance.getrandbits(128))), start)

    def _begin(self, folder: Path, query: str, start: list[int]) -> None:
        if self.done is not None:
            self.passed |= {(self.life, p, o) for p, end in enumerate(self.done) for o in range(end, start[p])}
        self.checkpoints.append(folder)
        self.query, self.batches, self.start = query, dict[int, Planned](), start
        self._put("metadata", json.dumps({"id": query}, separators=(",", ":")))
        self._put("sources/0/0", f"\0v1\n{self._offsets(start)}")
        (folder / "offsets").mkdir()
        (folder / "commits").mkdir()

    def put_back_checkpoint(self, last: int) -> None:
        """An older copy, which ends after batch `last`, takes the place of the checkpoint."""
        for number in [number for number in self.batches if number > last]:
            del self.batches[number]
            for log in ("offsets", "commits"):
                (self.checkpoint / log / str(number)).unlink(missing_ok=True)

    def retain(self, entries: int) -> None:
        """Spark keeps the newest entries alone."""
        for number in sorted(self.batches)[:-entries]:
            for log in ("offsets", "commits"):
                (self.checkpoint / log / str(number)).unlink(missing_ok=True)

    def copy_checkpoint(self) -> None:
        """All files get the time of a copy."""
        for path in self.checkpoint.rglob("*"):
            os.utime(path, (self.clock, self.clock))

    def edit_checkpoint(self, ends: list[int]) -> None:
        """A batch is added by hand, so that the next one begins elsewhere."""
        number = max(self.batches) + 1
        head = (self.checkpoint / "offsets" / str(number - 1)).read_text().split("\n")[:2]
        self.clock += 60
        self._put(f"offsets/{number}", "\n".join([*head, self._offsets(ends)]))
        self._put(f"commits/{number}", 'v1\n{"nextBatchWatermarkMs":0}')
        before = self.batches[number - 1].end
        self.passed |= {(self.life, p, o) for p in range(self.partitions) for o in range(before[p], ends[p])}
        self.batches[number] = Planned(before, ends, committed=True)

    def _offsets(self, offsets: list[int]) -> str:
        return json.dumps({TOPIC: {str(p): offset for p, offset in enumerate(offsets)}}, separators=(",", ":"))

    def _put(self, name: str, text: str) -> None:
        path = self.checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (self.clock, self.clock))

    # Runs.

    @property
    def position(self) -> list[int]:
        """Where the next new batch begins."""
        return self.batches[max(self.batches)].end if self.batches else self.start

    def run(self, batches: int = 1, *, size: int = 6, kill: Literal["planned", "written"] | None = None) -> None:
        """Start the job and run batches; it is killed in the last one, after its plan or after its write."""
        self.clock += self.chance.uniform(5, 100)
        for left in range(batches, 0, -1):
            last = max(self.batches, default=-1)
            if last >= 0 and not self.batches[last].committed:
                number, planned = last, self.batches[last]
            else:
                self.produce(size)
                number, planned = last + 1, Planned(self.position, list(self.ends))
                self.batches[number] = planned
                self._plan(number, planned)
            if kill == "planned" and left == 1:
                return
            self.clock += self.chance.uniform(0.1, 2)
            self._write(number, planned)
            if kill == "written" and left == 1:
                return
            self.clock += self.chance.uniform(0.05, 0.5)
            planned.committed = True
            ends = planned.end
            self.passed |= {(self.life, p, o) for p in range(self.partitions) for o in range(planned.start[p], ends[p])}
            if any(end < start for start, end in zip(planned.start, ends, strict=True)):
                self.passed |= {
                    (self.life, p, o) for p, s in enumerate(planned.start) if ends[p] < s for o in range(ends[p])
                }
            self.done = [max(end, old) for end, old in zip(ends, self.done or ends, strict=True)]
            self._put(f"commits/{number}", 'v1\n{"nextBatchWatermarkMs":0}')
            self.clock += self.chance.uniform(0.5, 5)

    def _plan(self, number: int, planned: Planned) -> None:
        conf = {"spark.sql.shuffle.partitions": "2"}
        metadata = {"batchWatermarkMs": 0, "batchTimestampMs": round(self.clock * 1000), "conf": conf}
        self.clock += 0.02
        self._put(
            f"offsets/{number}", f"v1\n{json.dumps(metadata, separators=(',', ':'))}\n{self._offsets(planned.end)}"
        )

    def _write(self, number: int, planned: Planned) -> None:
        ranges = zip(planned.start, planned.end, strict=True)
        records = [(self.life, p, o) for p, (start, end) in enumerate(ranges) for o in range(start, end)]
        self.removed |= {record for record in records if not self.keep(record)}
        records = [record for record in records if self.keep(record)]
        app = {"sink": self.query, "append-once": APP}.get(self.kind)
        if app is not None:
            if self.txns.get(app, -1) >= number:
                return  # Delta skips it
            self.txns[app] = number
        txn = (
            [] if app is None else [{"txn": {"appId": app, "version": number, "lastUpdated": round(self.clock * 1000)}}]
        )
        if self.kind == "sink":
            parameters = {"outputMode": "Append", "queryId": self.query, "epochId": str(number)}
            self.commit("STREAMING UPDATE", parameters, add=[records], before=txn)
        elif not records and app is None:
            return  # Delta makes no commit without an action
        elif self.kind != "merge":
            self.commit("WRITE", {"mode": "Append", "partitionBy": "[]"}, add=[records], before=txn)
        else:
            self._merge(records)

    def _merge(self, records: list[Record]) -> None:
        """Files with a record of the batch are rewritten, as an upsert does; new records make a file of their own."""
        if not self.before:
            self.commit("WRITE", {"mode": "ErrorIfExists", "partitionBy": "[]"}, add=[[]])
        wanted = set(records)
        matched = [path for path in self.live if wanted & set(self.files[path])]
        there = {record for path in matched for record in self.files[path]}
        add = [self.files[path] for path in matched] + [[record for record in records if record not in there]]
        parameters = {"predicate": '["(id#1 = id#2)"]', "matchedPredicates": '[{"actionType":"update"}]'}
        self.commit("MERGE", parameters, add=[each for each in add if each], remove=matched, source=len(records))

    # The table.

    @property
    def version(self) -> int:
        return len(self.before) - 1

    def commit(
        self,
        operation: str,
        parameters: dict[str, Any],
        *,
        add: list[list[Record]] | None = None,
        again: list[str] | None = None,
        remove: list[str] | None = None,
        before: list[dict[str, Any]] | None = None,
        changes: bool = True,
        rows: int | None = None,
        source: int | None = None,
    ) -> None:
        """A version: new files with these records, files of earlier versions `again`, and removed files."""
        now = round(self.clock * 1000)
        written = sum(map(len, add or [])) if rows is None else rows
        info = {
            "timestamp": now,
            "operation": operation,
            "operationParameters": parameters,
            "isolationLevel": "Serializable",
            "isBlindAppend": not remove,
            "operationMetrics": {"numOutputRows": str(written)}
            | ({"numSourceRows": str(source)} if source is not None else {}),
            "engineInfo": "Apache-Spark/4.2.0 Delta-Lake/4.4.0",
            "txnId": str(uuid.UUID(int=self.chance.getrandbits(128))),
        }
        lines: list[dict[str, Any]] = [{"commitInfo": info}]
        if not self.before:
            lines += [{"metaData": {**_HEAD["metaData"], "id": str(uuid.UUID(int=1))}}, {"protocol": _HEAD["protocol"]}]
        lines += before or []
        for path in remove or []:
            del self.live[path]
            lines.append({"remove": {"path": path, "deletionTimestamp": now, "dataChange": changes, "size": 1}})
        paths = [self._file(records) for records in add or []] + (again or [])
        for path in paths:
            self.live[path] = None
            size = (self.table / path).stat().st_size if (self.table / path).exists() else 1
            stats = json.dumps({"numRecords": len(self.files[path])})
            action = {"path": path, "partitionValues": {}, "size": size, "modificationTime": now, "dataChange": changes}
            lines.append({"add": {**action, "stats": stats}})
        self.before.append(dict(self.live))
        text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
        (self.table / "_delta_log" / f"{self.version:020d}.json").write_text(text + "\n")

    def _file(self, records: list[Record]) -> str:
        path = f"part-{len(self.files):05d}-{uuid.UUID(int=self.chance.getrandbits(128))}-c000.snappy.parquet"
        self.files[path] = records
        columns = {
            "id": pa.array([f"{life}-{p}-{o}" for life, p, o in records], pa.string()),
            "partition": pa.array([p for _, p, _ in records], pa.int32()),
            "offset": pa.array([o for _, _, o in records], pa.int64()),
        }
        pq.write_table(pa.table(columns), self.table / path)
        return path

    def restore(self, version: int) -> None:
        """RESTORE TABLE; the transactions stay as they are."""
        self.clock += 30
        wanted = self.before[version]
        again, gone = [p for p in wanted if p not in self.live], [p for p in self.live if p not in wanted]
        self.commit("RESTORE", {"version": version, "timestamp": None}, again=again, remove=gone)
        self.clock += 30

    def put_back_table(self, version: int) -> None:
        """An older copy of the folder takes the place of the table."""
        for number in range(version + 1, len(self.before)):
            (self.table / "_delta_log" / f"{number:020d}.json").unlink()
        del self.before[version + 1 :]
        self.live = dict(self.before[-1])
        self.txns = {}
        for number in range(version + 1):
            for line in (self.table / "_delta_log" / f"{number:020d}.json").read_text().splitlines():
                if (txn := json.loads(line).get("txn")) is not None:
                    self.txns[txn["appId"]] = txn["version"]

    def optimize(self) -> None:
        self.clock += 10
        files = [path for path in self.live if self.files[path]]
        if len(files) > 1:
            records = [record for path in files for record in self.files[path]]
            self.commit("OPTIMIZE", {"predicate": "[]", "zOrderBy": "[]"}, add=[records], remove=files, changes=False)
        self.clock += 10

    def delete_rows(self, share: float) -> None:
        """DELETE of some rows on purpose; files are rewritten without them."""
        self.clock += 10
        path = self.chance.choice([path for path in self.live if len(self.files[path]) > 1])
        gone = set(self.chance.sample(self.files[path], max(1, int(share * len(self.files[path])) - 1)))
        self.removed |= {record for record in gone if Counter(self.rows())[record] == 1}
        kept = [record for record in self.files[path] if record not in gone]
        self.commit("DELETE", {"predicate": '["(id = 3)"]'}, add=[kept] if kept else [], remove=[path], rows=0)
        self.clock += 10

    def append_by_hand(self, rows: int) -> None:
        """Rows of another program, which are no records."""
        self.clock += 10
        self.commit("WRITE", {"mode": "Append", "partitionBy": "[]"}, add=[[(-1, -1, n) for n in range(rows)]])
        self.clock += 10

    def lose_file(self) -> None:
        """A file of the table is deleted from the disk."""
        path = self.chance.choice([path for path in self.live if self.files[path]])
        (self.table / path).unlink()
        self.files[path] = []

    def cut_log(self) -> None:
        """The log gets a checkpoint, and loses the versions before it."""
        DeltaTable(str(self.table)).create_checkpoint()
        for number in range(self.version):
            (self.table / "_delta_log" / f"{number:020d}.json").unlink(missing_ok=True)

    # The truth.

    def rows(self) -> list[Record]:
        return [record for path in self.live for record in self.files[path] if record[0] >= 0]

    @property
    def missing(self) -> set[Record]:
        return self.passed - set(self.rows()) - self.removed

    @property
    def doubled(self) -> set[Record]:
        return {record for record, times in Counter(self.rows()).items() if times > 1}
