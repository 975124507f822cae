"""Jars: verified before every use, fetched once, and never a foreign one."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from streaming_jobs.errors import SetupError
from streaming_jobs.platform import jars
from streaming_jobs.platform.jars import Jar, ensure, examine, locked, parse
from streaming_jobs.settings import Settings

CONTENT = {"one": b"first jar", "two": b"second jar", "three": b"third jar"}


def jar(name: str) -> Jar:
    data = CONTENT[name]
    return Jar("spark", "org.example", name, "1.0", len(data), hashlib.sha256(data).hexdigest())


ALL = [jar(name) for name in CONTENT]


class Fetcher:
    """Stands in for the Maven repository and counts its requests."""

    def __init__(self, content: dict[str, bytes] | None = None, failures: int = 0) -> None:
        self.content, self.failures = content or CONTENT, failures
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, wanted: Jar, room: Path) -> Path:
        with self._lock:
            self.asked.append(wanted.artifact)
            fails = self.failures > 0
            self.failures -= 1
        path = room / wanted.file
        path.write_bytes(self.content[wanted.artifact][:3] if fails else self.content[wanted.artifact])
        if fails:
            raise ConnectionError("https://user:secret@mirror.example/maven2 went away")
        return path


def no_network(wanted: Jar, room: Path) -> Path:
    raise AssertionError(f"asked the network for {wanted.coordinate}")


@pytest.fixture
def here(settings: Callable[..., Settings], tmp_path: Path) -> Settings:
    return settings({"jars_dir": tmp_path / "jars"})


def test_jars_are_fetched_once_and_need_no_network_afterwards(here: Settings) -> None:
    fetch = Fetcher()
    paths = ensure(here, ALL, fetch=fetch)
    assert [path.read_bytes() for path in paths] == list(CONTENT.values())
    assert sorted(fetch.asked) == sorted(CONTENT)
    assert ensure(here, ALL, fetch=no_network) == paths


def test_a_run_without_missing_jars_does_not_even_load_the_fetching_library(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(here, ALL, fetch=Fetcher())
    monkeypatch.setitem(sys.modules, "jgo.maven", None)  # an import of it now fails
    assert len(ensure(here, ALL)) == len(ALL)


@pytest.mark.parametrize("how", ["cut", "same size", "same size and time", "empty"])
def test_a_damaged_or_replaced_jar_is_refused_and_left_alone(here: Settings, how: str) -> None:
    path = ensure(here, ALL, fetch=Fetcher())[1]
    before = path.stat()
    wrong = {"cut": b"secon", "empty": b""}.get(how, b"sEcond jar")
    path.write_bytes(wrong)
    if how == "same size and time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SetupError) as refused:
        ensure(here, ALL, fetch=no_network)
    assert str(path) in refused.value.found
    assert "delete the file" in refused.value.next_step
    assert path.read_bytes() == wrong


def test_a_deleted_jar_is_fetched_anew_and_leavings_of_a_killed_fetcher_go(here: Settings) -> None:
    ensure(here, ALL, fetch=Fetcher())[1].unlink()
    left = jars.cache(here) / ".fetching-old"
    left.mkdir(parents=True)
    (left / "part.jar").write_bytes(b"ha")
    fetch = Fetcher()
    ensure(here, ALL, fetch=fetch)
    assert fetch.asked == ["two"] and not left.exists()


def test_fetch_again_replaces_damaged_jars_only(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "locked", lambda which: ALL if which == "spark" else [])
    ensure(here, ALL, fetch=Fetcher())[0].write_bytes(b"x")
    fetch = Fetcher()
    assert jars.fetch_again(here, fetch=fetch) == [ALL[0]]
    assert fetch.asked == ["one"]
    ensure(here, ALL, fetch=no_network)


def test_what_arrives_and_is_not_the_locked_jar_is_not_kept(here: Settings) -> None:
    with pytest.raises(SetupError, match="org.example:two:1.0"):
        ensure(here, [jar("two")], fetch=Fetcher({"two": b"foreign jar"}))
    assert list(jars.cache(here).glob("*.jar")) == []


def test_an_unreachable_repository_is_told_without_the_mirror_s_password_and_a_fetch_that_breaks_off_is_tried_again(
    here: Settings,
) -> None:
    with pytest.raises(SetupError, match="could not fetch org.example:one:1.0: ConnectionError") as failed:
        ensure(here, [jar("one")], fetch=Fetcher(failures=99))
    assert "secret" not in str(failed.value)
    assert "RECOURSE_MAVEN_REPOSITORY" in failed.value.next_step
    fetch = Fetcher(failures=1)
    (path,) = ensure(here, [jar("one")], fetch=fetch)
    assert path.read_bytes() == CONTENT["one"]
    assert fetch.asked == ["one", "one"]


def test_progress_counts_up_to_all_the_bytes(here: Settings) -> None:
    seen: list[tuple[str, int, int]] = []
    ensure(here, ALL, fetch=Fetcher(), progress=lambda *step: seen.append(step))
    total = sum(len(data) for data in CONTENT.values())
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[0] == ("", 0, total)
    assert seen[-1][1:] == (total, total)
    ensure(here, ALL, fetch=no_network, progress=lambda *_: pytest.fail("nothing was fetched"))


def _fetch_in_a_process(here: Settings, ready: Path, asked: Path, start: Path) -> None:
    def fetch(wanted: Jar, room: Path) -> Path:
        (asked / f"{wanted.artifact}-{os.getpid()}").touch()
        return Fetcher()(wanted, room)

    (ready / str(os.getpid())).touch()
    while not start.exists():
        pass
    ensure(here, ALL, fetch=fetch)


def test_two_processes_at_once_fetch_each_jar_once(here: Settings, tmp_path: Path) -> None:
    ready, asked, start = tmp_path / "ready", tmp_path / "asked", tmp_path / "start"
    ready.mkdir()
    asked.mkdir()
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_fetch_in_a_process, args=(here, ready, asked, start)) for _ in range(2)]
    for process in both:
        process.start()
    while len(list(ready.iterdir())) < 2:
        assert all(process.is_alive() for process in both)
    start.touch()
    for process in both:
        process.join(30)
    assert [process.exitcode for process in both] == [0, 0]
    assert sorted(path.name.partition("-")[0] for path in asked.iterdir()) == sorted(CONTENT)
    assert examine(jars.cache(here), ALL) == ([], [])


def test_a_right_jar_of_the_local_maven_repository_saves_the_fetch_and_a_wrong_one_is_not_taken(
    here: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jgo.maven import Artifact

    def download(artifact: Artifact) -> Path:
        remote.append(artifact.artifactId)
        path = artifact.cached_path
        assert path is not None
        path.parent.mkdir(parents=True)
        path.write_bytes(CONTENT[artifact.artifactId])
        return path

    remote: list[str] = []
    monkeypatch.setattr("jgo.maven.Artifact.resolve", download)
    monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
    for name, data in (("one", CONTENT["one"]), ("two", b"sEcond jar")):
        path = tmp_path / "m2" / jar(name).maven_path
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "m2").rglob("*")}

    paths = ensure(here, [jar("one"), jar("two")])

    assert [path.read_bytes() for path in paths] == [CONTENT["one"], CONTENT["two"]]
    assert remote == ["two"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "m2").rglob("*")} == before


def test_a_cache_that_cannot_be_written_is_told(settings: Callable[..., Settings], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="cannot write to the jar cache") as failed:
        ensure(settings({"jars_dir": tmp_path / "file" / "jars"}), ALL, fetch=Fetcher())
    assert "RECOURSE_JARS_DIR" in failed.value.next_step


def test_the_lock_names_each_file_once_with_the_versions_that_were_tried_together() -> None:
    text = Path(jars.__file__).with_name(jars.LOCK).read_text()
    all_jars = [*locked("spark"), *locked("peers"), *locked("s3"), *locked("broker")]
    assert len(list(parse(text))) == len(all_jars)
    assert len({item.file for item in all_jars}) == len(all_jars)
    assert all(len(item.sha256) == 64 and item.size > 0 for item in all_jars)
    assert "://" not in text
    spark = {item.artifact: item.version for item in locked("spark")}
    broker = {item.artifact: item.version for item in locked("broker")}
    assert spark == {"delta-spark_4.2_2.13": "4.4.0", "delta-storage": "4.4.0"}, "no client of Kafka in Spark"
    assert {item.artifact: item.version for item in locked("peers")}["spark-sql-kafka-0-10_2.13"] == "4.2.0"
    assert broker["kafka_2.13"] == broker["kafka-clients"] == "4.3.1"
    assert {"log4j-core", "log4j-slf4j-impl", "scala-library"} <= set(broker)
    assert not set(spark) & {"hadoop-client-api", "parquet-column", "scala-library"}
