"""Who runs: how each contestant is started, what it says when it is ready, and where its output is."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.feeds import create_topic
from benchmarks.place import Place
from benchmarks.processes import REPOSITORY, Child, ChildFailed, clean_environment
from benchmarks.speed.records import FORMATS, JOINS, OPERATORS, WORKS, Work, inputs
from benchmarks.speed.topic_watch import (
    CommittedOffsets,
    Markers,
    OffsetsBeforeRows,
    OffsetsWithRows,
    OutputTopic,
    TopicWatch,
)
from benchmarks.speed.watch import Covered, TableWatch, ledger_covered, spark_covered
from streaming_jobs.platform import java, ports
from streaming_jobs.platform.jars import ensure, parse
from streaming_jobs.runtime.session_options import supervised_command
from streaming_jobs.settings import Settings

_MAVEN_PROJECT = REPOSITORY / "benchmarks" / "kafka-streams"
_MAVEN_SECONDS, _PIP_SECONDS = 300, 1800
_FLINK = REPOSITORY / "benchmarks" / "flink"
_FLINK_PYTHON = [
    str(Path(sys.executable).with_name("uv")), "run", "--no-project", "--python", sys.executable,
    "--with-requirements", str(_FLINK / "requirements.txt"), "python",
]  # fmt: skip
"""The interpreter of an environment with PyFlink, which uv makes once and keeps in its cache."""
FLINK_JAVA = (11, 17, 21)
"""The versions of Java that Flink 2.2 is made for."""


Watch = TableWatch | TopicWatch
"""Looks at one output while its contestant runs; `check` and `stop` raise what went wrong meanwhile."""


@dataclass(frozen=True)
class Assignment:
    """What a contestant is given: a work, its input topic, and a folder of its own.

    `rows` is how many the output must have; None where the records are not made yet.
    """

    work: Work
    topic: str
    bootstrap: str
    folder: Path
    records: int
    live: bool
    rows: int | None = None

    @property
    def output(self) -> str:
        """The name of the output of a contestant that writes a topic: the run's and the work's."""
        return f"{self.folder.name}.{self.work}"

    def child(self, command: Sequence[str], **variables: str) -> Child:
        """The process of a contestant that prints READY."""
        return Child(command, clean_environment(**variables), self.folder / "output.log", "READY")

    def topic_watch(self, progress: CommittedOffsets | Markers) -> TopicWatch:
        """The watch of a contestant that writes a topic, which is made here."""
        create_topic(self.bootstrap, self.output)
        return TopicWatch(self.bootstrap, output=self.output, work=self.work, live=self.live, progress=progress)

    def table_watch(self, table: Path, covered: Covered) -> TableWatch:
        """The watch of a contestant that writes a Delta table."""
        return TableWatch(table, self.work, covered, live=self.live)


@dataclass(frozen=True)
class Contestant(ABC):
    """One way to do the works. `settings` are what a user sets, with the names that the contestant gives them."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    works: ClassVar[tuple[Work, ...]] = WORKS

    def prepare(self) -> None:  # noqa: B027 - most have nothing to build
        """Build what has to be built once, before anything is measured; raises ChildFailed, SetupError."""

    @abstractmethod
    def start(self, assignment: Assignment) -> Child:
        """Start it; the child says when it is ready."""

    @abstractmethod
    def watch(self, assignment: Assignment) -> Watch:
        """What tells how far its output has come."""


class Recourse(Contestant):
    """The product as shipped: a session of its own with the work's stream; its progress is in the ledger."""

    modules: ClassVar[Mapping[Work, str]] = {
        **dict.fromkeys(WORKS, "flows"),
        **dict.fromkeys(FORMATS, "format_flows"),
        **dict.fromkeys((*JOINS, *OPERATORS), "operator_flows"),
    }
    """The modules of `benchmarks.speed` that declare the streams."""
    works = tuple(modules)

    def start(self, assignment: Assignment) -> Child:
        command = supervised_command([assignment.work])
        for key, value in self.settings.items():
            command += ["--set", f"{key}={value}"]
        flows = f"benchmarks.speed.{self.modules[assignment.work]}"
        run = {"BENCHMARK_TOPIC": assignment.topic, "BENCHMARK_RUN": assignment.folder.name}
        environment = Place(assignment.folder, assignment.bootstrap).environment([flows], **run)
        return Child(command, environment, assignment.folder / "output.log", 'event="stream started"')

    def watch(self, assignment: Assignment) -> Watch:
        return assignment.table_watch(assignment.folder / "home" / "tables" / assignment.work, ledger_covered)


class RecourseTopics(Recourse):
    """The product with topics as outputs; its progress is the markers in the transactions of the rows."""

    modules = dict.fromkeys(WORKS, "topic_flows")
    works = WORKS

    def watch(self, assignment: Assignment) -> Watch:
        markers = Markers(assignment.bootstrap, stream=assignment.work, output=assignment.output)
        return assignment.topic_watch(markers)


class PlainSpark(Contestant):
    """PySpark and Delta Lake as their documentation shows them; its progress is in Spark's checkpoint."""

    def start(self, assignment: Assignment) -> Child:
        command = [
            sys.executable, "-m", "benchmarks.speed.peers.plain_spark", assignment.work, assignment.bootstrap,
            assignment.topic, str(assignment.folder / "table"), str(assignment.folder / "checkpoint"),
        ]  # fmt: skip
        return assignment.child([*command, *(f"{key}={value}" for key, value in self.settings.items())])

    def watch(self, assignment: Assignment) -> Watch:
        covered = spark_covered(assignment.folder / "checkpoint")
        return assignment.table_watch(assignment.folder / "table", covered)


class KafkaStreams(Contestant):
    """Kafka Streams, exactly_once_v2, built by Maven; its progress is the offsets in the transactions of the rows."""

    works = (*WORKS, *OPERATORS)

    def prepare(self) -> None:
        _execute(["mvn", "--quiet", "--batch-mode", "package"], _MAVEN_SECONDS, _MAVEN_PROJECT)

    def start(self, assignment: Assignment) -> Child:
        target = _MAVEN_PROJECT / "target"
        classes = os.pathsep.join([str(target / "peer.jar"), str(target / "libraries" / "*")])
        command = [
            "java", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", classes, "benchmark.Peer",
            assignment.work, assignment.bootstrap, assignment.topic, assignment.output,
            str(assignment.folder / "state"),
        ]  # fmt: skip
        return assignment.child(command)

    def watch(self, assignment: Assignment) -> Watch:
        group, sources = assignment.output, inputs(assignment.topic, assignment.work)
        return assignment.topic_watch(
            CommittedOffsets(assignment.bootstrap, group=group, sources=sources, rule=OffsetsWithRows())
        )


class Flink(Contestant):
    """Flink SQL by PyFlink, in a local cluster inside one JVM, exactly once; its progress is the offsets it commits.

    The Java is `java` of PATH, as for Kafka Streams: the one that comes with the product's packages is too new.
    """

    def prepare(self) -> None:
        version = java.printed_version(Path("java"))
        if java.major(version) not in FLINK_JAVA:
            raise ChildFailed(f"java of PATH is {version}; Flink 2.2 needs {', '.join(map(str, FLINK_JAVA))}")
        self._connector()
        _execute([*_FLINK_PYTHON, "-c", "import pyflink"])

    def start(self, assignment: Assignment) -> Child:
        command = [
            *_FLINK_PYTHON, "-m", "benchmarks.speed.peers.flink_sql", assignment.work, assignment.bootstrap,
            assignment.topic, assignment.output, str(assignment.folder), str(self._connector()),
            str(ports.free_port()),
        ]  # fmt: skip
        # Without JAVA_HOME, which PyFlink prefers to the Java of PATH.
        command = ["env", "-u", "JAVA_HOME", *command]
        return assignment.child(command, JVM_ARGS="-Xmx512m", FLINK_LOG_DIR=str(assignment.folder))

    def watch(self, assignment: Assignment) -> Watch:
        bootstrap, group, records = assignment.bootstrap, assignment.output, assignment.records
        written = OutputTopic(bootstrap, group, work=assignment.work, records=records, rows=assignment.rows)
        rule = OffsetsBeforeRows(written, records)
        return assignment.topic_watch(CommittedOffsets(bootstrap, group=group, sources=(assignment.topic,), rule=rule))

    def _connector(self) -> Path:
        return ensure(Settings.load(), parse((_FLINK / "jars.lock").read_text()))[0]


def _execute(command: Sequence[str], seconds: float = _PIP_SECONDS, folder: Path | None = None) -> None:
    """Run a command; raises ChildFailed with what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise ChildFailed(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


INFORMED = {"spark.databricks.delta.snapshotPartitions": "1", "spark.sql.shuffle.partitions": "2"}
"""What a user sets who knows that the defaults are for large tables and clusters."""


def everybody() -> list[Contestant]:
    """The contestants, in the order of the table."""
    live, economy = (Recourse(pace, {"stream.pace": pace}) for pace in ("live", "economy"))
    quick = {"stream.pace": "live", "stream.state_partitions": "1"}
    topics = [RecourseTopics("topics"), RecourseTopics("topics-live", quick)]
    spark = [PlainSpark("informed", INFORMED), PlainSpark("plain")]
    return [Recourse("recourse"), live, economy, *topics, KafkaStreams("kafka-streams"), Flink("flink"), *spark]


def variant(kind: type[Recourse], text: str) -> Recourse:
    """The product with further settings, from `name:key=value,key=value`; raises ValueError for another form."""
    name, sign, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not (name and sign) or not all(key and equals for key, equals, _ in pairs):
        raise ValueError(f"{text!r} is not name:key=value,key=value")
    return kind(name, {key: value for key, _, value in pairs})
