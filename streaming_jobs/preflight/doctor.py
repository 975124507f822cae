"""Checks of this machine before the streams run; each has a result and, if something is wrong, a fix.

Checks only read. The one program that they start is `java -version`; nothing is fetched, created or repaired. But
`executor_checks`, which a person asks for, starts a Spark session with executors, which write and remove probe files.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil

from streaming_jobs.catalog.archive import is_archive
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import RecourseError
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.platform import class_data, cluster, java, ports
from streaming_jobs.platform.broker import bootstrap_servers, running
from streaming_jobs.platform.extras import EXTRAS, installed, require
from streaming_jobs.platform.jars import JarSet, cache, examine, locked
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.platform.spark_on_store import state_store
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.locations import StorePath
from streaming_jobs.storage.object_store import ANOTHER_STORE, broken_promises, open_store
from streaming_jobs.table_sources.table_archive import TableArchive
from streaming_jobs.text import commands

DISTRIBUTION = "recourse-streams"
PYTHONS = ((3, 11), (3, 12), (3, 13))
_ROOM_MB = 2_000
_JAR_ROOM_MB = 200
_ASK = timedelta(seconds=5)
_HEADS = ("pyspark", "delta-spark", "deltalake", "confluent-kafka", "dagster")
_OF_EXTRA = re.compile(r"""extra == ['"](\w+)['"]""")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^;\s]+)")


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the doctor; `ok` None is a warning, `fix` is empty if there is nothing to do."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""


def checks(settings: Settings) -> list[DoctorCheck]:
    """All checks, in the order in which a person would fix them. Takes about a second."""
    return [
        check_python(),
        check_java(settings),
        check_packages(),
        check_extras(),
        check_jars(settings, "spark"),
        *check_checkpoints(settings),
        *([] if settings.kafka.bootstrap_servers else [check_jars(settings, "broker")]),
        check_class_data(settings),
        check_cluster(settings) if settings.kafka.bootstrap_servers else check_broker(settings),
        *(check_cluster(settings, cluster) for cluster in settings.kafka.clusters),
        check_ui_port(settings),
        check_folder("home", settings.home, _ROOM_MB),
        *(check_store(name, place) for name, place in stores(settings).items()),
        *([check_postgres(settings)] if settings.postgres.url else []),
        check_folder("jar cache", cache(settings), _JAR_ROOM_MB),
    ]


def executor_checks(
    settings: Settings,
    start: Callable[[Settings], LocalSpark] = LocalSpark,
    check: Callable[[Settings, cluster.Executors], cluster.Checked] = cluster.check,
) -> list[DoctorCheck]:
    """The executors of a session that is started for it, each proved as before the first batch of a stream."""
    if not settings.spark.has_executors:
        found = f"spark.master is {settings.spark.master}: the driver is the only executor"
        return [DoctorCheck("executors", None, found, "set spark.master to that of a cluster (docs/cluster.md)")]
    runtime = start(settings)
    try:
        checked = check(settings, cluster.SparkExecutors(runtime.start("doctor")))
    except RecourseError as error:
        return [DoctorCheck("executors", False, error.found, error.next_step)]
    finally:
        runtime.stop()
    hosts = sorted({answer["host"] for answer in checked.answers})
    versions = {f"Python {a['python']}, PySpark {a['versions']['pyspark']}, Java {a['java']}" for a in checked.answers}
    found = (
        f"{len(checked.answers)} on {', '.join(hosts)}; {'; '.join(sorted(versions))}; they read and write in "
        f"{settings.tables} and {settings.state}"
    )
    return [
        DoctorCheck("executors", True, found),
        *(DoctorCheck("executors", None, warning, "docs/cluster.md") for warning in checked.warnings),
    ]


def stores(settings: Settings) -> dict[str, StorePath]:
    """What is on a store, of tables and state."""
    places = {"tables": settings.tables, "state": settings.state}
    return {name: place for name, place in places.items() if isinstance(place, StorePath)}


def check_store(name: str, place: StorePath) -> DoctorCheck:
    """The store of tables or state: it keeps the conditions that commits, and leases, rest on."""
    try:
        broken = broken_promises(open_store(place.url, dict(place.options), retry_for=_ASK))
    except RecourseError as error:
        return DoctorCheck(name, False, error.found, error.next_step)
    if broken:
        return DoctorCheck(name, False, f"{place}: {'; '.join(broken)}", ANOTHER_STORE)
    kept = "creates once, replaces under the right tag alone, lists what is written"
    return DoctorCheck(name, True, f"{place}: {kept}")


def check_postgres(settings: Settings) -> DoctorCheck:
    """The database of the tables that streams write: it answers, is no standby, and lets the user make tables."""
    name, schema = "PostgreSQL", settings.postgres.database_schema
    try:
        require("postgres-sink", "postgres.url")
        from streaming_jobs.sinks.postgres.database import facts

        version, database, standby, creates = facts(settings.postgres)
    except RecourseError as error:
        return DoctorCheck(name, False, error.found, error.next_step)
    if standby:
        return DoctorCheck(name, False, f"{database} is on a standby", "name the primary, or target_session_attrs")
    found = f"{version}, database {database}, schema {schema}"
    if not creates:
        grant = f"GRANT USAGE, CREATE ON SCHEMA {schema}; or make the tables (docs/postgres_sink.md)"
        return DoctorCheck(name, None, f"{found}: the user makes no tables there", grant)
    return DoctorCheck(name, True, found)


def check_python() -> DoctorCheck:
    running_version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    if sys.version_info[:2] in PYTHONS:
        return DoctorCheck("Python", True, running_version)
    return DoctorCheck("Python", False, running_version, "use Python 3.11, 3.12 or 3.13: make setup PYTHON=python3.11")


def check_java(settings: Settings) -> DoctorCheck:
    """The Java that Spark and the broker will use; it is started once."""
    try:
        used = java.choose(settings)
        printed = java.printed_version(used.executable)
    except RecourseError as error:
        return DoctorCheck("Java", False, error.found, error.next_step)
    return DoctorCheck("Java", True, f"{printed} of {used.origin} ({used.executable})")


def check_packages() -> DoctorCheck:
    """Installed packages against the exact pins of this package; those of an extra only where it is installed."""
    try:
        pins = [(pin[1], pin[2]) for requirement in requires(DISTRIBUTION) or [] if (pin := _pinned(requirement))]
    except PackageNotFoundError:
        return DoctorCheck(
            "packages", None, f"{DISTRIBUTION} is not installed here, so nothing is pinned", "make setup"
        )
    wrong = list(_differing(pins))
    if wrong:
        return DoctorCheck("packages", False, "; ".join(wrong), "install them as they are locked: make setup")
    versions = dict(pins)
    shown = [f"{name} {versions[name]}" for name in _HEADS if name in versions]
    return DoctorCheck("packages", True, ", ".join([*shown, f"{len(pins) - len(shown)} more as pinned"]))


def _pinned(requirement: str) -> re.Match[str] | None:
    extra = _OF_EXTRA.search(requirement)
    applies = extra is None or (extra[1] in EXTRAS and installed(extra[1]))  # `all` repeats the requirements of others
    return _PIN.match(requirement) if applies else None


def check_extras() -> DoctorCheck:
    """The extras that are installed; a command that needs another one says so."""
    there = [extra for extra in EXTRAS if installed(extra)]
    absent = [extra for extra in EXTRAS if extra not in there]
    rest = f"; not installed: {', '.join(absent)}" if absent else ""
    return DoctorCheck("extras", True, f"{', '.join(there) or 'none'}{rest}")


def _differing(pins: list[tuple[str, str]]) -> Iterator[str]:
    for name, pinned in pins:
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield f"{name} is missing, {pinned} is pinned"
            continue
        if installed != pinned:
            yield f"{name} is {installed}, {pinned} is pinned"


def check_class_data(settings: Settings) -> DoctorCheck:
    """The archive that halves the start of a session."""
    fix = "python -m streaming_jobs.warm_up"
    try:
        file = class_data.archive(settings, "spark", [cache(settings) / jar.file for jar in locked("spark")])
    except RecourseError as error:
        return DoctorCheck("class data", None, "there is no Java that could use it", error.next_step)
    if file.is_file():
        return DoctorCheck("class data", True, f"{file} ({file.stat().st_size >> 20} MB)")
    return DoctorCheck("class data", None, "none, so sessions start in twice the time", fix)


def check_jars(settings: Settings, which: JarSet) -> DoctorCheck:
    name, folder, jars = f"jars ({which})", cache(settings), locked(which)
    missing, damaged = examine(folder, jars)
    if damaged:
        files = " ".join(str(folder / jar.file) for jar in damaged)
        return DoctorCheck(
            name, False, f"not what jars.lock names: {files}", "python -m streaming_jobs.platform.jars fetch --again"
        )
    if missing:
        size = sum(jar.size for jar in missing) / 1e6
        return DoctorCheck(
            name,
            None,
            f"{len(missing)} of {len(jars)} are not here yet, {size:.0f} MB",
            "the next start fetches them; without a network, copy the folder from a machine that has them",
        )
    return DoctorCheck(name, True, f"{len(jars)} verified in {folder}")


def check_checkpoints(settings: Settings) -> list[DoctorCheck]:
    """For state on a store: whether Spark's checkpoints can be there, and the jars for it."""
    try:
        return [check_jars(settings, "s3")] if state_store(settings.state) is not None else []
    except RecourseError as error:
        return [DoctorCheck("checkpoints", False, error.found, error.next_step)]


def check_broker(settings: Settings) -> DoctorCheck:
    """The embedded broker: running, or its port free."""
    broker = running(settings)
    if broker is not None:
        return DoctorCheck("broker", True, f"embedded, runs at {broker.bootstrap_servers} (process {broker.pid})")
    port = settings.broker.port
    if port == 0:
        return DoctorCheck("broker", True, "embedded, does not run; its start takes a free port")
    if ports.is_free(port):
        return DoctorCheck("broker", True, f"embedded, does not run; port {port} is free")
    return DoctorCheck(
        "broker",
        False,
        f"port {port} is taken by {ports.listener_name(port)}",
        "end that program, or set RECOURSE_BROKER__PORT to another port, or to 0 for a free one",
    )


def check_cluster(settings: Settings, cluster: str = "") -> DoctorCheck:
    """A configured cluster, or the default one: it has to answer within five seconds, with these credentials."""
    from streaming_jobs.sources.topics import Topics

    name = f"cluster {cluster}" if cluster else "broker"
    try:
        topics = Topics.of(settings.kafka, settings.kafka.bootstrap_servers, _ASK).in_cluster(cluster)
        there = topics.names(cluster)
    except RecourseError as error:
        return DoctorCheck(name, False, error.found, error.next_step)
    return DoctorCheck(name, True, f"{topics.bootstrap} answers, {len(there)} topics")


def check_ui_port(settings: Settings) -> DoctorCheck:
    """The port of the Dagster UI: free, or held by the UI of this very home."""
    host, port = settings.dagster.host, settings.dagster.port
    if port == 0:
        return DoctorCheck("UI port", True, "the UI takes a free one")
    if ports.is_free(port, host):
        return DoctorCheck("UI port", True, f"{port} is free")
    process = ports.listener(port)
    if process is not None and _serves(process, settings):
        return DoctorCheck("UI port", True, f"{port} is held by our own UI (process {process.pid})")
    return DoctorCheck(
        "UI port",
        False,
        f"{port} is taken by {ports.listener_name(port)}",
        f"end that program, or choose another port: {commands.up(port=0)} takes a free one",
    )


def _serves(process: psutil.Process, settings: Settings) -> bool:
    try:
        return process.environ().get("DAGSTER_HOME") == str(settings.dagster_home)
    except psutil.Error:
        return False


def check_folder(name: str, path: Path, room_mb: int) -> DoctorCheck:
    """A folder: it has to be writable, with `room_mb` free on its disk."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return DoctorCheck(
            name, False, f"{there} cannot be written", f"give this user rights on {there}, or set another one"
        )
    free_mb = shutil.disk_usage(there).free // 2**20
    free = f"{path}, {free_mb / 1024:.1f} GB free"
    if free_mb < room_mb:
        return DoctorCheck(name, None, free, f"make room: {room_mb} MB should be free there")
    return DoctorCheck(name, True, free)


# Whether a topic's retention is about to overtake its archive: Kafka deletes what the archive has not read yet.
#
# Of the records that Kafka has, the archive has not read `unread`. If these are more than nine tenths of them,
# there is little time left; once the archive's position is before Kafka's first offset, records are lost to both.

MARGIN = 0.1
"""The share of the records in Kafka that an archive should have read, at least."""


def nearest(position: dict[int, int], kafka: OffsetBounds) -> tuple[int, float] | None:
    """The partition in which retention is nearest to the archive, and the share of its records that are read.

    Below 0 it has overtaken the archive. None if everything is read, or Kafka holds nothing. Partitions that the
    archive has nothing of are left out.
    """
    shares = {}
    for partition, at in position.items():
        first, end = kafka.earliest.get(partition, 0), kafka.latest.get(partition, 0)
        if at < first:
            shares[partition] = -1.0
        elif at < end:
            shares[partition] = (at - first) / (end - first)
    return min(shares.items(), key=lambda item: item[1], default=None)


def check(archive: TableArchive, position: dict[int, int], kafka: OffsetBounds) -> DoctorCheck:
    found, fix = nearest(position, kafka), f"let it read more quickly: {commands.run(archive.stream)}"
    name = f"archive {archive.stream}"
    if found is None:
        return DoctorCheck(name, True, f"has all records of {archive.topic}")
    partition, share = found
    where = f"{archive.topic} partition {partition}"
    if share < 0:
        first, at = kafka.earliest.get(partition, 0), position.get(partition, 0)
        lost = f"offsets {at} to {first - 1} of {where} were deleted before they were archived"
        return DoctorCheck(name, False, lost, f"see the next start: {commands.run(archive.stream)}")
    if share < MARGIN:
        return DoctorCheck(name, None, f"retention is near: {share:.0%} of the records in {where} are archived", fix)
    return DoctorCheck(
        name, True, f"{share:.0%} or more of the records in each partition of {archive.topic} are archived"
    )


def archive_checks(settings: Settings, topics: TopicReader | None = None) -> Iterator[DoctorCheck]:
    """Yields a line about each declared archive that has run; none if the streams cannot be loaded."""
    try:
        archives = [each for each in Topology.load(settings.flows).streams.values() if is_archive(each)]
        if archives and topics is None:
            topics = _topics(settings)
    except RecourseError:  # other lines of the doctor say so
        return
    for declared in archives:
        (source,) = declared.topics
        record = StreamFolder.of(settings, declared.name).record
        try:
            assert topics is not None
            info = topics.describe(source.name)
            if info is None or not record.exists():
                continue
            table = settings.tables / declared.primary.name
            archive = TableArchive(declared.name, source.name, info.id, table, record)
            position = {partition: end for partition, (_, end) in archive.bounds().items()}
            if not position:
                yield DoctorCheck(f"archive {declared.name}", None, "covers no offsets", "see docs/archive.md, Limits")
                continue
            yield check(archive, position, topics.offsets(source.name))
        except RecourseError as error:
            yield DoctorCheck(f"archive {declared.name}", None, error.found, error.next_step)


def _topics(settings: Settings) -> TopicReader:
    from streaming_jobs.sources.topics import Topics

    return Topics.of(settings.kafka, bootstrap_servers(settings), _ASK)
