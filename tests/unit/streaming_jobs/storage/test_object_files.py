"""The contract of `ObjectFiles`, kept by a folder, by memory and by two S3 servers."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from streaming_jobs.errors import ConfigurationError, TransientError, UsageError
from streaming_jobs.settings import StorageSettings
from streaming_jobs.storage import object_files, object_store
from streaming_jobs.storage.locks import locked
from streaming_jobs.storage.object_files import AlreadyThere, Changed, Found, LocalFiles, ObjectFiles
from streaming_jobs.storage.object_store import PolledFiles, StoreFiles, open_store, polled
from tests.support.memory_files import MemoryFiles
from tests.support.power import Power
from tests.support.store_server import Fault, StoreServer


@pytest.fixture
def server(object_store: StoreServer) -> StoreServer:
    return object_store


@pytest.fixture
def store(server: StoreServer) -> StoreFiles:
    return open_store(f"{server.url}/{uuid.uuid4().hex}", server.options)


@pytest.fixture(params=["folder", "memory", "moto", pytest.param("versity", marks=pytest.mark.long)])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectFiles:
    if request.param == "folder":
        return LocalFiles(tmp_path / "root")
    if request.param == "memory":
        return MemoryFiles()
    server = request.getfixturevalue(request.param)
    return open_store(f"{server.url}/{uuid.uuid4().hex}", server.options)


def _data(files: ObjectFiles, name: str) -> bytes | None:
    found = files.read(name)
    return None if found is None else found.data


def test_an_object_is_created_once(files: ObjectFiles) -> None:
    assert files.read("a/b") is None
    tag = files.create("a/b", b"first")
    with pytest.raises(AlreadyThere):
        files.create("a/b", b"second")
    found = files.read("a/b")
    assert found is not None
    assert (found.data, found.tag) == (b"first", tag)


def test_an_object_is_replaced_only_under_the_tag_of_its_content(files: ObjectFiles) -> None:
    first = files.create("a", b"first")
    second = files.replace("a", b"second", first)
    with pytest.raises(Changed):
        files.replace("a", b"third", first)
    assert _data(files, "a") == b"second"
    third = files.put("a", b"third")
    with pytest.raises(Changed):
        files.replace("a", b"fourth", second)
    files.delete("a")
    with pytest.raises(Changed):
        files.replace("a", b"fourth", third)
    assert files.read("a") is None
    with pytest.raises(Changed):
        files.replace("folder/absent", b"first", third)


def test_put_and_delete_ask_nothing(files: ObjectFiles) -> None:
    files.put("a", b"first")
    files.delete("below/a")
    files.put("below/a", b"first")
    tag = files.put("below/a", b"second", durable=False)
    found = files.read("below/a")
    assert found is not None
    assert (found.data, found.tag) == (b"second", tag)
    files.delete("below/a")
    files.delete("below/a")
    assert files.read("below/a") is None


def test_names_are_those_in_a_folder_and_below_it(files: ObjectFiles) -> None:
    assert files.names() == []
    for name in ("a/b/2", "a/b/10", "a/1", "ab", "z"):
        files.put(name, b"1")
    assert files.names() == ["a/1", "a/b/10", "a/b/2", "ab", "z"]
    assert files.names("a") == ["a/1", "a/b/10", "a/b/2"]
    assert files.names("absent") == []
    inside = files.below("a").below("b")
    assert inside.names() == ["10", "2"]
    assert inside.read("10") is not None
    inside.create("3", b"third")
    assert files.names("a/b") == ["a/b/10", "a/b/2", "a/b/3"]
    assert _data(files, "a/b/3") == b"third"
    assert files.below("a").names("b") == ["b/10", "b/2", "b/3"]
    assert inside.where("3").endswith("a/b/3")
    assert files.folders() == ["a"]
    assert files.folders("a") == files.below("a").folders() == ["b"]
    assert files.folders("a/b") == files.folders("absent") == []


def test_a_delete_under_a_tag_leaves_other_content(files: ObjectFiles) -> None:
    first = files.create("a", b"first")
    second = files.put("a", b"second")
    with pytest.raises(Changed):
        files.delete("a", first)
    assert _data(files, "a") == b"second"
    files.delete("a", second)
    assert files.read("a") is None
    assert files.names() == []
    files.delete("a", second)
    with pytest.raises(Changed):
        files.replace("a", b"third", second)
    third = files.create("a", b"third")
    with pytest.raises(AlreadyThere):
        files.create("a", b"fourth")
    with pytest.raises(Changed):
        files.delete("a", second)
    files.delete("a", third)
    files.put("a", b"fifth")
    assert _data(files, "a") == b"fifth"
    files.delete("absent", third)


def test_a_read_has_the_time_of_the_write(files: ObjectFiles) -> None:
    before = time.time()
    files.put("a", b"1")
    found = files.read("a")
    assert found is not None
    assert before - 1.1 <= found.at <= time.time() + 1, "a store's clock has seconds"


def test_no_object_is_empty(files: ObjectFiles) -> None:
    tag = files.create("a", b"1")
    for use in (lambda: files.put("a", b""), lambda: files.create("b", b""), lambda: files.replace("a", b"", tag)):
        with pytest.raises(ValueError, match="not empty"):
            use()
    assert files.names() == ["a"]


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a\0"])
def test_a_name_cannot_leave_its_root(files: ObjectFiles, name: str) -> None:
    for use in (files.read, files.delete, files.below, lambda name: files.put(name, b"1")):
        with pytest.raises(UsageError, match="is not the name of an object"):
            use(name)


def _winners(count: int, attempt: Callable[[int, int], object]) -> list[int]:
    """How many of four threads succeed with each of `count` objects, all at the same time."""

    def one(index: int) -> bool:
        try:
            attempt(index // 4, index % 4)
        except (AlreadyThere, Changed):
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(one, range(count * 4)))
    return [sum(outcomes[4 * each : 4 * each + 4]) for each in range(count)]


def test_of_writers_that_race_one_wins(files: ObjectFiles) -> None:
    created = _winners(40, lambda key, writer: files.create(f"race/{key}", f"{writer}".encode()))
    assert created == [1] * 40
    tags = {key: found.tag for key in range(40) if (found := files.read(f"race/{key}")) is not None}
    replaced = _winners(40, lambda key, writer: files.replace(f"race/{key}", f"new {writer}".encode(), tags[key]))
    assert replaced == [1] * 40
    tags = {key: found.tag for key in range(40) if (found := files.read(f"race/{key}")) is not None}
    for key, tag in tags.items():
        files.delete(f"race/{key}", tag)
    again = _winners(40, lambda key, writer: files.create(f"race/{key}", f"{writer}".encode()))
    assert again == [1] * 40, "also where an object was deleted under its tag"


def test_files_are_for_their_owner_and_unfinished_ones_are_no_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(tmp_path / "root")
    files.create("a/b", b"1")
    files.replace("a/b", b"2", files.put("a/b", b"2"))
    assert [path.name for path in (tmp_path / "root" / "a").iterdir()] == ["b"], "no temporary file is left"
    assert stat.S_IMODE((tmp_path / "root" / "a" / "b").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "root" / "a").stat().st_mode) == 0o700
    files.put("a/.hidden", b"1")
    mkstemp = tempfile.mkstemp
    unfinished = []

    def killed(**options: str) -> tuple[int, str]:
        unfinished.append(mkstemp(**options)[1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tempfile, "mkstemp", killed)
        files.put("a/b", b"3")
    assert [Path(each).parent.name for each in unfinished] == ["a"]
    assert files.names() == ["a/.hidden", "a/b"]


def test_a_tag_tells_apart_two_writes_of_the_same_bytes(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    first = files.create("a", b"same")
    files.put("a", b"same")
    with pytest.raises(Changed):
        files.replace("a", b"other", first)


def test_files_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    power = Power(tmp_path, monkeypatch)
    files = LocalFiles(tmp_path / "root")
    try:
        for name in ("b/put", "c/replaced", "d/gone"):
            files.put(name, b"before")
        files.create("a/created", b"after")
        files.put("b/put", b"after")
        found = files.read("c/replaced")
        assert found is not None
        files.replace("c/replaced", b"after", found.tag)
        files.delete("d/gone")
        files.put("e/report", b"after", durable=False)
        left = LocalFiles(power.cut(tmp_path.with_name("cut")) / "root")
    finally:
        power.close()
    assert {name: _data(left, name) for name in left.names()} == {
        "a/created": b"after",
        "b/put": b"after",
        "c/replaced": b"after",
    }


def test_a_folder_is_not_locked_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is suspended there, as a machine that hangs, would stop the driver that replaces it."""
    files, synced = LocalFiles(tmp_path), []
    tag = files.put("a", b"1")

    def sync(descriptor: int) -> None:
        with locked(tmp_path, 0):
            synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    files.replace("a", b"2", tag)
    files.put("a", b"3")
    assert len(synced) == 4  # the file and its folder, twice


def test_a_folder_that_stays_locked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "_LOCKED_WITHIN", 0.1)
    files = LocalFiles(tmp_path)
    tag = files.put("a", b"1")
    with locked(tmp_path):
        for write in (lambda: files.put("a", b"2"), lambda: files.replace("a", b"2", tag), lambda: files.delete("a")):
            with pytest.raises(TransientError, match=f"has held the lock of {tmp_path} for") as error:
                write()
            assert "lslocks" in error.value.next_step
    assert _data(files, "a") == b"1"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_on_a_full_disk_a_report_is_overwritten_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalFiles(tmp_path)
    files.put("status", b"a longer text", durable=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    tag = files.put("status", b"short", durable=False)
    assert files.read("status") == Found(b"short", tag, (tmp_path / "status").stat().st_mtime)
    for use in (lambda: files.put("status", b"1" * 100_000, durable=False), lambda: files.put("status", b"1")):
        with pytest.raises(OSError, match="No space"):
            use()


def test_writes_with_a_condition_say_so_to_the_store(server: StoreServer, store: StoreFiles) -> None:
    tag = store.create("lease", b"1")
    store.replace("lease", b"2", tag)
    assert server.unconditional_writes("lease") == []
    assert [each.condition.split()[0] for each in server.requests()] == ["IF_NONE_MATCH", "IF_MATCH"]
    store.put("status", b"1")
    assert len(server.unconditional_writes("status")) == 1


def test_a_write_whose_answer_is_lost_has_succeeded(server: StoreServer, store: StoreFiles) -> None:
    server.inject(Fault("answer lost"))
    tag = store.create("a", b"first")
    assert [each.status for each in server.requests()] == [503, 412, 200], "written, refused, read back"
    server.inject(Fault("answer lost"))
    tag = store.replace("a", b"second", tag)
    assert store.replace("a", b"third", tag)
    assert _data(store, "a") == b"third"


def test_a_write_without_any_answer_has_succeeded_if_it_is_there(server: StoreServer, store: StoreFiles) -> None:
    hasty = open_store(store.url, server.options, retry_for=timedelta(0))
    server.inject(Fault("answer lost"))
    assert hasty.create("a", b"first")
    server.inject(Fault("unavailable"))
    with pytest.raises(TransientError, match=f"did not answer for {store.url}/b"):
        hasty.create("b", b"first")
    assert store.read("b") is None


def test_a_refusal_of_another_writers_object_stays_one(server: StoreServer, store: StoreFiles) -> None:
    tag = store.create("a", b"theirs")
    store.put("a", b"newer")
    server.inject(Fault("unavailable", times=2))
    with pytest.raises(Changed):
        store.replace("a", b"ours", tag)
    with pytest.raises(AlreadyThere):
        store.create("a", b"ours")
    assert _data(store, "a") == b"newer"


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_busy_store_is_asked_again(server: StoreServer, store: StoreFiles, method: str) -> None:
    store.put("a", b"1")
    server.inject(Fault("unavailable", method=method, times=2))
    store.put("a", b"2")
    assert _data(store, "a") == b"2"
    assert [each.status for each in server.requests()].count(503) == 2


def test_a_store_that_does_not_answer_in_time_is_transient(server: StoreServer, store: StoreFiles) -> None:
    store.put("a", b"1")
    hasty = open_store(store.url, {**server.options, "timeout": "100ms"}, retry_for=timedelta(0))
    server.inject(Fault("slow", method="GET", seconds=0.3))
    with pytest.raises(TransientError, match=r"\(Timeout\)"):
        hasty.read("a")
    nowhere = open_store(store.url, {**server.options, "aws_endpoint": "http://127.0.0.1:9"}, retry_for=timedelta(0))
    with pytest.raises(TransientError, match=r"\(Connect\)"):
        nowhere.names()


def test_a_refused_access_names_the_object_and_the_rights(server: StoreServer, store: StoreFiles) -> None:
    for method, use in (("PUT", lambda: store.put("a", b"1")), ("GET", lambda: store.read("a"))):
        server.inject(Fault("denied", method=method))
        with pytest.raises(ConfigurationError, match=f"the store refuses access to {store.url}/a") as error:
            use()
        assert "check the credentials" in error.value.next_step


def test_an_unknown_bucket_is_not_an_empty_one(server: StoreServer) -> None:
    files = open_store("s3://unknown/state", server.options)
    for use in (lambda: files.read("a"), lambda: files.put("a", b"1"), files.names, files.folders):
        with pytest.raises(ConfigurationError, match="bucket that does not exist"):
            use()


def test_storage_settings_reach_the_store_and_deltalake(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalake import DeltaTable, write_deltalake
    from pyarrow import table

    storage = StorageSettings(
        endpoint=server.endpoint, region="us-east-1", allow_http=True, timeout=timedelta(seconds=5)
    )
    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")):
        monkeypatch.setenv(name, value)
    url = f"{server.url}/{uuid.uuid4().hex}"
    options = storage.options(url)
    server.clear()
    write_deltalake(url, table({"a": [1]}), storage_options=options)
    assert DeltaTable(url, storage_options=options).version() == 0
    assert server.unconditional_writes("_delta_log") == []
    assert any(name.startswith("_delta_log/") for name in open_store(url, options).names())


def test_storage_options_of_each_store() -> None:
    plain = StorageSettings()
    assert plain.options("s3://a/b") == {"timeout": "30000ms", "aws_virtual_hosted_style_request": "false"}
    assert plain.options("gs://a/b") == {"timeout": "30000ms"}
    own = StorageSettings(endpoint="https://store/", region="r", addressing="virtual")
    assert own.options("s3://a/b") == {
        "timeout": "30000ms",
        "aws_endpoint": "https://store",
        "aws_region": "r",
        "aws_virtual_hosted_style_request": "true",
    }
    assert own.options("gs://a")["google_base_url"] == "https://store"
    assert own.options("abfss://a@b.dfs.core.windows.net/c")["azure_endpoint"] == "https://store"
    for url in ("gs://a/b", "abfss://a@b.dfs.core.windows.net/c", "s3://a"):
        assert open_store(url, own.options(url)).where("d") == f"{url}/d"
    with pytest.raises(ConfigurationError, match="'hdfs' of hdfs://a/b is no object store"):
        own.options("hdfs://a/b")


@pytest.mark.parametrize(("endpoint", "words"), [("host:9000", "is no URL"), ("http://host:9000", "has no TLS")])
def test_an_endpoint_is_a_url_with_tls_unless_allowed(endpoint: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StorageSettings(endpoint=endpoint)


def test_objects_that_are_polled_are_asked_for_seldom_and_own_writes_count_at_once(
    store: StoreFiles, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other = polled(store), store
    assert isinstance(files, PolledFiles) and polled(MemoryFiles()) is not None
    now = time.monotonic()
    monkeypatch.setattr(object_store.time, "monotonic", lambda: now)
    server.clear()
    for _ in range(50):
        assert files.read("stop") is None and files.names("waiting") == []
    # A request of an earlier test, given up by its client, may be answered only now.
    prefix = store.where("").rstrip("/").rsplit("/", 1)[-1]
    assert len([each for each in server.requests() if prefix in each.key + each.query]) == 2
    other.put("stop", b"1")
    assert files.read("stop") is None
    now += 2.0
    assert _data(files, "stop") == b"1"
    files.put("stop", b"2")
    assert _data(files, "stop") == b"2"
    now += 2.0
    server.inject(Fault("unavailable", "GET", times=100))
    assert _data(files, "stop") == b"2", "the store is away for a moment"
