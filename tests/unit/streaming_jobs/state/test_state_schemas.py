"""A checkpoint of `transformWithState` that was moved names its own state schemas."""

from __future__ import annotations

import json
from pathlib import Path

from streaming_jobs.platform.files import hard_link
from streaming_jobs.state import checkpoint


def metadata(checkpoint: Path, named: Path, batch: int = 3) -> Path:
    """What Spark 4.2 writes, shortened, with the paths of another folder."""
    file = checkpoint / "state" / "0" / "_metadata" / "v2" / str(batch)
    file.parent.mkdir(parents=True, exist_ok=True)
    paths = [f"file:{named}/state/0/_stateSchema/default/{each}" for each in ("0_a", "3_b")]
    stores = [{"storeName": "default", "numPartitions": 2, "stateSchemaFilePaths": paths}]
    told = {"operatorInfo": {"operatorId": 0}, "stateStoreInfo": stores, "operatorPropertiesJson": '{"a":"b"}'}
    file.write_text(f"v2\n{json.dumps(told, separators=(',', ':'))}")
    return file


def test_the_paths_lead_into_the_checkpoint_and_shared_files_stay_as_they_are(tmp_path: Path) -> None:
    before, moved = tmp_path / "g0001", tmp_path / "a state" / "g0002"
    original = metadata(before, before)
    text = original.read_text()
    linked = moved / original.relative_to(before)
    hard_link(original, linked)
    linked.with_name(".3.crc").write_text("of the text before")
    assert checkpoint.point_to(moved) == [linked]
    assert linked.read_text() == metadata(tmp_path / "expected", moved).read_text()
    assert original.read_text() == text and not linked.with_name(".3.crc").exists()
    assert checkpoint.point_to(moved) == checkpoint.point_to(before) == []
