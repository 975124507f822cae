"""Spark's checkpoint on S3: drivers of their own, an aggregation on two partitions, and the store's own requests."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

from tests.support.store_query import by_batch, driver, kind, results, truth
from tests.support.store_server import StoreServer

ONLY_NEW = r"/state/g0001/(offsets|commits|sources)/|/metadata$"
KILLED_IN, LAST = 6, 12


def test_a_checkpoint_on_s3_survives_a_kill_and_each_batch_takes_six_requests(
    object_store: StoreServer, tmp_path: Path
) -> None:
    killed = driver("die", tmp_path, object_store.endpoint, KILLED_IN)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(results(tmp_path)) == list(range(KILLED_IN))
    written = {each.key for each in object_store.requests() if each.method == "PUT"}
    assert any(key.endswith(f"/offsets/{KILLED_IN}") for key in written), "the batch was planned"
    assert not any(key.endswith(f"/commits/{KILLED_IN}") for key in written)
    assert object_store.unconditional_writes(ONLY_NEW) == []

    object_store.clear()
    ended = driver("run", tmp_path, object_store.endpoint, LAST)
    assert ended.returncode == 0
    found = results(tmp_path)
    assert {batch: found[batch] for batch in range(LAST + 1)} == {batch: truth(batch) for batch in range(LAST + 1)}

    requests = [each for each in object_store.requests() if "/tried/" not in each.key]
    assert not [each for each in requests if each.method == "PUT" and each.key.endswith((".crc", ".tmp"))]
    assert object_store.unconditional_writes(ONLY_NEW) == []
    # Two batches later the first ones of this driver, with the load of its state, are over.
    steady = [Counter(kind(each) for each in part) for part in by_batch(requests)[2:]]
    assert steady and set(map(str, steady)) == {str(Counter({"PUT": 4, "DELETE": 2}))}, steady

    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "first": "None",
        "second": "FileAlreadyExistsException",
        "third": "FileAlreadyExistsException",
        "content": "ours",
        "answer lost": "None",
        "unavailable": "None",
        "denied": "AccessDeniedException",
        "cancelled": "None",
        "cancelled exists": "False",
        "replaced": "new",
        "names": "['7', '8', '9']",
        "folder exists": "True",
        "deleted exists": "False",
        "deleted": "FileNotFoundException",
        "names in no folder": "0",
        "next exists": "False",
        "asked for it": "0",
        "next of a rival": "FileAlreadyExistsException",
        "rival looks back": "True",
    }
