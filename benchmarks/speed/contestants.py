"""Who runs: how each contestant is started, what it says when it is ready, and where its output is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from benchmarks.speed.environment import python_of
from benchmarks.speed.feed import create_topic
from benchmarks.speed.process import REPOSITORY, Child, ContestantFailed, clean_environment
from benchmarks.speed.progress import CommittedOffsets, Markers, OffsetsBeforeRows, OffsetsWithRows, PointRule, Progress
from benchmarks.speed.records import WORKS, Work
from benchmarks.speed.topic import OutputTopic, TopicWatch
from benchmarks.speed.watch import TableWatch, Watch, ledger_covered, loop_covered, spark_covered
from streaming_jobs.platform import java, ports
from streaming_jobs.platform.jars import cache, ensure, parse
from streaming_jobs.runtime.session_options import supervised_command
from streaming_jobs.settings import Settings

_MAVEN_PROJECT = REPOSITORY / "benchmarks" / "kafka-streams"
_MAVEN_SECONDS = 300
_FLINK = REPOSITORY / "benchmarks" / "flink"
FLINK_JAVA = (11, 17, 21)
"""The versions of Java that Flink 2.2 is made for."""


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


class Contestant(Protocol):
    """One way to do the works."""

    @property
    def name(self) -> str:
        """As shown in the table."""

    @property
    def works(self) -> tuple[Work, ...]:
        """What it can do."""

    def prepare(self) -> None:
        """Build what has to be built once, before anything is measured."""

    def start(self, assignment: Assignment) -> Child:
        """Start it; the child says when it is ready."""

    def watch(self, assignment: Assignment) -> Watch:
        """What looks at its output."""


@dataclass(frozen=True)
class Recourse:
    """The product as shipped: a session of its own with the work's stream, and further settings if asked for."""

    name: str = "recourse"
    settings: Mapping[str, str] = field(default_factory=dict)
    works: tuple[Work, ...] = WORKS
    flows: ClassVar[str] = "benchmarks.speed.flows"

    def prepare(self) -> None:
        """Nothing to build."""

    def start(self, assignment: Assignment) -> Child:
        """Start the session; it is ready when its stream has started."""
        command = supervised_command([assignment.work])
        for key, value in self.settings.items():
            command += ["--set", f"{key}={value}"]
        environment = clean_environment(
            RECOURSE_HOME=str(assignment.folder),
            RECOURSE_KAFKA__BOOTSTRAP_SERVERS=assignment.bootstrap,
            RECOURSE_FLOWS=json.dumps([self.flows]),
            BENCHMARK_TOPIC=assignment.topic,
            BENCHMARK_RUN=assignment.folder.name,
        )
        return Child(command, environment, assignment.folder / "output.log", 'event="stream started"')

    def watch(self, assignment: Assignment) -> Watch:
        """The log of the work's table; progress by the ledger in it."""
        return TableWatch(assignment.folder / "tables" / assignment.work, assignment.work, ledger_covered)


@dataclass(frozen=True)
class RecourseTopics(Recourse):
    """The product with topics as outputs, in one transaction per batch."""

    name: str = "topics"
    flows: ClassVar[str] = "benchmarks.speed.topic_flows"

    def watch(self, assignment: Assignment) -> Watch:
        """Its output topic, which is made here; progress by the markers in the same transactions."""
        markers = Markers(assignment.bootstrap, stream=assignment.work, output=assignment.output)
        return _topic_watch(assignment, markers)


@dataclass(frozen=True)
class PlainSpark:
    """PySpark and Delta Lake as their documentation shows them, with the properties that a user adds."""

    name: str = "plain"
    properties: Mapping[str, str] = field(default_factory=dict)
    works: tuple[Work, ...] = WORKS

    def prepare(self) -> None:
        """Nothing to build."""

    def start(self, assignment: Assignment) -> Child:
        """Start the program; it is ready when its query has started."""
        command = [
            sys.executable, "-m", "benchmarks.speed.peers.plain_spark", assignment.work, assignment.bootstrap,
            assignment.topic, str(assignment.folder / "table"), str(assignment.folder / "checkpoint"),
        ]  # fmt: skip
        command += [f"{key}={value}" for key, value in self.properties.items()]
        return Child(command, clean_environment(), assignment.folder / "output.log", "READY")

    def watch(self, assignment: Assignment) -> Watch:
        """The log of its table; progress by the checkpoint's offsets."""
        covered = spark_covered(assignment.folder / "checkpoint")
        return TableWatch(assignment.folder / "table", assignment.work, covered)


@dataclass(frozen=True)
class PythonLoop:
    """A loop of fifty lines around confluent-kafka, pyarrow and deltalake."""

    name: str = "python-loop"
    works: tuple[Work, ...] = ("stateless",)

    def prepare(self) -> None:
        """Nothing to build."""

    def start(self, assignment: Assignment) -> Child:
        """Start the program; it is ready when it is at its place in the topic."""
        command = [
            sys.executable, "-m", "benchmarks.speed.peers.python_loop", assignment.bootstrap, assignment.topic,
            str(assignment.folder / "table"),
        ]  # fmt: skip
        return Child(command, clean_environment(), assignment.folder / "output.log", "READY")

    def watch(self, assignment: Assignment) -> Watch:
        """The log of its table; progress by the offsets in it."""
        return TableWatch(assignment.folder / "table", assignment.work, loop_covered)


@dataclass(frozen=True)
class KafkaStreams:
    """Kafka Streams with exactly_once_v2; built by Maven. Its output is a topic."""

    name: str = "kafka-streams"
    works: tuple[Work, ...] = WORKS

    def prepare(self) -> None:
        """Build the jar; raises ContestantFailed with what Maven says."""
        command = ["mvn", "--quiet", "--batch-mode", "package"]
        built = subprocess.run(
            command, cwd=_MAVEN_PROJECT, capture_output=True, text=True, timeout=_MAVEN_SECONDS, check=False
        )
        if built.returncode:
            raise ContestantFailed(f"Maven could not build {_MAVEN_PROJECT}: {built.stdout[-2000:]}")

    def start(self, assignment: Assignment) -> Child:
        """Start the application; it is ready when its state is RUNNING."""
        target = _MAVEN_PROJECT / "target"
        classes = os.pathsep.join([str(target / "peer.jar"), str(target / "libraries" / "*")])
        command = [
            "java", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", classes, "benchmark.Peer",
            assignment.work, assignment.bootstrap, assignment.topic, assignment.output,
            str(assignment.folder / "state"),
        ]  # fmt: skip
        return Child(command, clean_environment(), assignment.folder / "output.log", "READY")

    def watch(self, assignment: Assignment) -> Watch:
        """The offsets that it commits, and its output topic, which is made here."""
        return _topic_watch(assignment, _committed(assignment, OffsetsWithRows()))


@dataclass(frozen=True)
class Flink:
    """Flink SQL by PyFlink, in a local cluster inside one JVM, exactly once. Its output is a topic.

    The Java is `java` of PATH, as for Kafka Streams: the one that comes with the product's packages is too new.
    """

    name: str = "flink"
    works: tuple[Work, ...] = WORKS

    def prepare(self) -> None:
        """Make the environment with PyFlink, fetch the connector; raises ContestantFailed, SetupError."""
        version = java.printed_version(Path("java"))
        if java.major(version) not in FLINK_JAVA:
            raise ContestantFailed(f"java of PATH is {version}; Flink 2.2 needs {', '.join(map(str, FLINK_JAVA))}")
        self._python()
        self._connector()

    def start(self, assignment: Assignment) -> Child:
        """Start the program; it is ready when all tasks of its job run."""
        command = [
            str(self._python()), "-m", "benchmarks.speed.peers.flink_sql", assignment.work, assignment.bootstrap,
            assignment.topic, assignment.output, str(assignment.folder), str(self._connector()),
            str(ports.free_port()),
        ]  # fmt: skip
        environment = clean_environment(JVM_ARGS="-Xmx512m", FLINK_LOG_DIR=str(assignment.folder))
        environment.pop("JAVA_HOME", None)
        return Child(command, environment, assignment.folder / "output.log", "READY")

    def watch(self, assignment: Assignment) -> Watch:
        """The offsets that it commits, and its output topic, which is made here."""
        written = OutputTopic(
            assignment.bootstrap,
            assignment.output,
            work=assignment.work,
            records=assignment.records,
            rows=assignment.rows,
        )
        return _topic_watch(assignment, _committed(assignment, OffsetsBeforeRows(written, assignment.records)))

    def _python(self) -> Path:
        return python_of("flink", _FLINK / "requirements.txt", cache(Settings.load()).parent / "benchmarks")

    def _connector(self) -> Path:
        return ensure(Settings.load(), parse((_FLINK / "jars.lock").read_text()))[0]


def _committed(assignment: Assignment, rule: PointRule) -> CommittedOffsets:
    """The progress of a contestant whose consumer group has the name of its output."""
    return CommittedOffsets(assignment.bootstrap, group=assignment.output, source=assignment.topic, rule=rule)


def _topic_watch(assignment: Assignment, progress: Progress) -> TopicWatch:
    """The watch of a contestant that writes a topic, which is made here."""
    create_topic(assignment.bootstrap, assignment.output)
    return TopicWatch(
        assignment.bootstrap,
        output=assignment.output,
        work=assignment.work,
        live=assignment.live,
        progress=progress,
    )


INFORMED = {"spark.databricks.delta.snapshotPartitions": "1", "spark.sql.shuffle.partitions": "2"}
"""What a user sets who knows that the defaults are for large tables and clusters."""


def everybody() -> list[Contestant]:
    """The contestants, in the order of the table."""
    live, economy = (Recourse(pace, {"stream.pace": pace}) for pace in ("live", "economy"))
    topics = [RecourseTopics(), RecourseTopics("topics-live", {"stream.pace": "live"})]
    spark = [PlainSpark("informed", INFORMED), PlainSpark()]
    return [Recourse(), live, economy, *topics, KafkaStreams(), Flink(), *spark, PythonLoop()]


def variant(text: str) -> Recourse:
    """The product with further settings, from `name:key=value,key=value`; raises ValueError for another form."""
    return Recourse(*_named_settings(text))


def topic_variant(text: str) -> RecourseTopics:
    """The same with topics as outputs."""
    return RecourseTopics(*_named_settings(text))


def _named_settings(text: str) -> tuple[str, dict[str, str]]:
    name, sign, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not (name and sign) or not all(key and equals for key, equals, _ in pairs):
        raise ValueError(f"{text!r} is not name:key=value,key=value")
    return name, {key: value for key, _, value in pairs}
