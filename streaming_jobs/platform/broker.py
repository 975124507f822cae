"""The embedded broker: a real Apache Kafka of one node (KRaft), as a child process of this one.

It listens on the loopback alone, keeps its data under `<home>/broker` between runs, ends with the process that started
it (`processes/child.py`), and is never stopped by a Ctrl-C that was meant for that process. One broker per home:
a second process attaches to the running one and leaves it running.

`broker.json` has its address: {pid, mark, bootstrap_servers, started_at}; `mark` distinguishes that process from
another one with the same pid (`processes/identity.py`), `started_at` is in seconds since 1970. The file stays when the
broker has ended, so that the next start uses the same address.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from streaming_jobs.errors import BrokerUnreachable, SetupError
from streaming_jobs.platform import class_data, java, ports
from streaming_jobs.platform.jars import broker_jars
from streaming_jobs.platform.java import as_properties
from streaming_jobs.platform.ports import HOST
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.platform.processes.identity import Mark, is_alive, mark
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import private_folder, write_atomic, write_json
from streaming_jobs.storage.locks import locked
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient


# The configuration of the embedded broker: properties, options of its JVM, its log. Pure text, no process.

NODE = 1


def server_properties(data: Path, port: int, controller_port: int) -> dict[str, str]:
    """Properties of one node that is broker and controller, reachable from this machine alone, with data in `data`."""
    return {
        "process.roles": "broker,controller",
        "node.id": str(NODE),
        "controller.quorum.voters": f"{NODE}@{HOST}:{controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        # One node cannot keep three copies: with the defaults the first transaction waits for ever.
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        # 50 partitions each by default: 100 unused folders and open files.
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.num.partitions": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        # After a kill -9 the broker may register again only when its old registration has expired. With these
        # values it never expired by mistake, even with eight busy loops on its two cores.
        "broker.session.timeout.ms": "2000",
        "broker.heartbeat.interval.ms": "500",
        # By default an idle cluster writes a record every half second.
        "metadata.max.idle.interval.ms": "5000",
        # 128 MB by default, twice the heap.
        "log.cleaner.dedupe.buffer.size": "4194304",
        "num.io.threads": "2",
        "num.network.threads": "2",
        "background.threads": "2",
        "num.recovery.threads.per.data.dir": "2",
    }


def jvm_options(heap_mb: int, logging: Path, crash_report: Path, temporary: Path) -> list[str]:
    """Options for a JVM that starts fast and stays small: 150 MB resident instead of 350."""
    return [
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:+ExitOnOutOfMemoryError",
        f"-XX:ErrorFile={crash_report}",
        "-Djava.awt.headless=true",
        f"-Djava.io.tmpdir={temporary}",
        f"-Dlog4j2.configurationFile={logging.as_uri()}",
    ]


def logging_properties(log: Path) -> str:
    """Properties that send warnings and errors to `log`: at most three files of 5 MB."""
    return as_properties(
        {
            "rootLogger.level": "warn",
            "rootLogger.appenderRef.file.ref": "file",
            "appender.file.type": "RollingFile",
            "appender.file.name": "file",
            "appender.file.fileName": str(log),
            "appender.file.filePattern": f"{log}.%i",
            "appender.file.filePermissions": "rw-------",
            "appender.file.layout.type": "PatternLayout",
            "appender.file.layout.pattern": "%d{yyyy-MM-dd HH:mm:ss.SSS} %p %c{1}: %m%n%ex",
            "appender.file.policies.type": "Policies",
            "appender.file.policies.size.type": "SizeBasedTriggeringPolicy",
            "appender.file.policies.size.size": "5MB",
            "appender.file.strategy.type": "DefaultRolloverStrategy",
            "appender.file.strategy.max": "2",
        }
    )


_READY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_PORT_TRIES = 3
_POLL = 0.02
_silent = logging.getLogger("recourse.librdkafka")
_silent.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Running:
    """A broker as its `broker.json` describes it; `started_at` in seconds since 1970."""

    pid: int
    mark: Mark
    bootstrap_servers: str
    started_at: float

    @property
    def port(self) -> int:
        """The port of the listener for clients."""
        return int(self.bootstrap_servers.rpartition(":")[2])

    def alive(self) -> bool:
        """True if that very process runs; another one with its pid does not count."""
        return is_alive(self.pid, self.mark)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Running:
        """The broker that the file's content describes; raises KeyError if a key is missing.

        Files of earlier versions have `create_time` in place of `mark`.
        """
        started = value["mark"] if "mark" in value else value["create_time"]
        return cls(value["pid"], started, value["bootstrap_servers"], value["started_at"])


def bootstrap_servers(settings: Settings) -> str:
    """Address of the cluster: the configured one, else that of the running embedded broker.

    Raises BrokerUnreachable if there is neither. Contacts no broker.
    """
    if settings.kafka.bootstrap_servers:
        return settings.kafka.bootstrap_servers
    broker = running(settings)
    if broker is None:
        raise BrokerUnreachable(
            f"the embedded broker of {settings.broker_dir.parent} does not run",
            f"start it with `{commands.up()}`, or name a cluster: RECOURSE_KAFKA__BOOTSTRAP_SERVERS=host:port",
        )
    return broker.bootstrap_servers


def running(settings: Settings) -> Running | None:
    """The embedded broker of this home, if it runs."""
    last = _last(settings)
    return last if last is not None and last.alive() else None


class Broker:
    """Starts the embedded broker, or attaches to a running one.

    `start`, `stop`, `kill` and `restart` may be called in any state and more than once. Not for several threads.
    """

    def __init__(self, settings: Settings, *, record_classes: Path | None = None) -> None:
        """`record_classes` is a file for the class-data archive that the JVM writes when it is stopped."""
        self._settings = settings
        self._record_classes = record_classes
        self._child: ChildProcess | None = None
        self._running: Running | None = None
        self._log_begins = 0
        """Size of the log when the JVM was started: the lines after it are of this start."""
        self.exit_code: int | None = None
        """The exit code of the JVM that ended last, negative for a signal."""

    @property
    def pid(self) -> int | None:
        """The pid of the broker's JVM; None before the start."""
        return self._running.pid if self._running else None

    @property
    def attached(self) -> bool:
        """True if another process started the broker, and will stop it."""
        return self._running is not None and self._child is None

    def running(self) -> bool:
        if self._child is not None:
            return self._child.exit_code is None
        return self._running is not None and self._running.alive()

    def start(self) -> str:
        """Start or attach to the broker, wait until it answers, and return its address.

        Raises SetupError with the last lines of the broker's log.
        """
        if self._running is not None and self.running():
            return self._running.bootstrap_servers
        self.kill()
        with _sole_starter(self._settings):
            existing = running(self._settings)
            try:
                if existing is not None:
                    self._running = existing
                    self._wait_until_ready(existing)
                else:
                    self._running = self._launch()
            except BaseException:
                self.kill()
                raise
        return self._running.bootstrap_servers

    def restart(self) -> str:
        """Start the broker again at its address, whether it was killed or still runs."""
        self.stop()
        return self.start()

    def stop(self) -> None:
        """End the broker and wait for it; it is killed after ten seconds. Leaves an attached one alone."""
        if self._child is not None:
            self._child.end(_STOP_SECONDS if self._record_classes is None else class_data.RECORD_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the broker at once; acknowledged records survive. Leaves an attached one alone."""
        if self._child is not None:
            self.exit_code = self._child.kill()
        self._child = self._running = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _launch(self) -> Running:
        settings = self._settings
        jars = broker_jars(settings)
        command = [str(java.choose(settings).executable), *self._options()]
        # Without a UTF-8 locale Java cannot open a home folder whose name has an accent in it.
        environment = {**os.environ, "CLASSPATH": os.pathsep.join(map(str, jars)), "LC_ALL": "C.UTF-8"}
        data = settings.broker_dir / "data"
        if self._record_classes is None:
            command += class_data.reading(class_data.archive(settings, "broker", jars))
        if not data.exists():
            self._format(command, environment, data)
        if self._record_classes is not None:
            command += class_data.recording(self._record_classes)
        for attempt in range(1, _PORT_TRIES + 1):
            port = self._port(attempt)
            configuration = settings.broker_dir / "server.properties"
            properties = server_properties(data, port, ports.free_port(but=[port]))
            write_atomic(configuration, as_properties(properties), durable=False)
            self._running = self._spawn([*command, "kafka.Kafka", str(configuration)], environment, port)
            write_json(settings.broker_dir / "broker.json", asdict(self._running), durable=False)
            try:
                self._wait_until_ready(self._running)
                break
            except SetupError as error:
                # Another process took the port between our check and the broker's bind.
                if "already in use" not in str(error) or settings.broker.port or attempt == _PORT_TRIES:
                    raise
                self.kill()
        assert self._running is not None
        return self._running

    def _spawn(self, command: list[str], environment: dict[str, str], port: int) -> Running:
        start = ChildCommand(command, environment, folder=self._settings.broker_dir, umask=0o077)
        self._log_begins = self._log.stat().st_size if self._log.exists() else 0
        with self._output.open("wb") as output:
            self._child = start.start_reaped(output)
        return Running(self._child.pid, mark(self._child.pid), f"{ports.HOST}:{port}", time.time())

    def _options(self) -> list[str]:
        settings = self._settings
        configuration = settings.broker_dir / "log4j2.properties"
        private_folder(settings.logs)
        write_atomic(configuration, logging_properties(self._log), durable=False)
        temporary = settings.broker_dir / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)  # files that a killed broker left
        return jvm_options(
            settings.broker.heap_mb, configuration, settings.logs / "broker.crash.log", private_folder(temporary)
        )

    def _format(self, command: list[str], environment: dict[str, str], data: Path) -> None:
        """Give a new data folder its cluster id; the folder gets its name only when it is complete."""
        unfinished = data.with_name("data.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        configuration = data.with_name("format.properties")
        # Formatting opens no port; the two numbers only have to differ.
        write_atomic(configuration, as_properties(server_properties(unfinished, 9092, 9093)), durable=False)
        identity = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={identity}", "--config", str(configuration)]
        formatted = subprocess.run(
            [*command, *tool],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_READY_SECONDS,
            check=False,
            start_new_session=True,
            umask=0o077,
        )
        if formatted.returncode != 0:
            raise SetupError(
                f"the broker's data folder could not be made: {_tail(formatted.stdout + formatted.stderr)}",
                f"check disk space and the rights on the home folder: {commands.doctor()}",
            )
        unfinished.rename(data)
        configuration.unlink()

    def _port(self, attempt: int) -> int:
        configured = self._settings.broker.port
        if configured:
            if not ports.is_free(configured):
                raise SetupError(
                    f"the broker's port {configured} is taken by {ports.listener_name(configured)}",
                    "end that program, choose another port (RECOURSE_BROKER__PORT), or 0 for a free one",
                )
            return configured
        last = _last(self._settings)
        if attempt == 1 and last is not None and ports.is_free(last.port):
            return last.port
        return ports.free_port()

    def _wait_until_ready(self, broker: Running) -> None:
        """Wait until it answers and leads every partition; raises SetupError with the last lines of its log."""
        deadline = time.monotonic() + _READY_SECONDS
        admin = None
        while True:
            if not self.running():
                found = f"the broker ended while it started: {self._last_words()}"
                raise SetupError(found, self._look(), may_pass=True)
            if time.monotonic() > deadline:
                found = f"the broker did not answer within {_READY_SECONDS:.0f} s: {self._last_words()}"
                raise SetupError(found, self._look(), may_pass=True)
            if admin is None and _accepts(broker.port):
                admin = _admin(broker.bootstrap_servers)
            if admin is not None and _leads(admin):
                return
            time.sleep(_POLL)

    @property
    def _log(self) -> Path:
        return self._settings.logs / "broker.log"

    @property
    def _output(self) -> Path:
        return private_folder(self._settings.logs) / "broker.out"

    def _last_words(self) -> str:
        texts = (
            path.read_bytes()[begins if path.stat().st_size >= begins else 0 :].decode(errors="replace")
            for path, begins in ((self._log, self._log_begins), (self._output, 0))
            if path.exists()
        )
        return _tail("".join(texts)) or "it has logged nothing in this start"

    def _look(self) -> str:
        return f"its log is {self._log}; `{commands.doctor()}` checks Java, ports and disk"


def _last(settings: Settings) -> Running | None:
    try:
        return Running.of(json.loads((settings.broker_dir / "broker.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


@contextmanager
def _sole_starter(settings: Settings) -> Iterator[None]:
    """One process at a time starts a broker for a home: a second one waits, then attaches to the first one's."""
    folder = private_folder(settings.broker_dir)
    folder.chmod(0o700)
    with locked(folder / "lock"):
        yield


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((ports.HOST, port)) == 0


def _admin(bootstrap: str) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.ms": 10,
        "reconnect.backoff.max.ms": 100,
        "logger": _silent,
        "error_cb": lambda _: None,
    }
    return AdminClient(config)


def _leads(admin: AdminClient) -> bool:
    from confluent_kafka import KafkaException

    try:
        seen = admin.list_topics(timeout=1.0)
    except KafkaException:
        return False
    leaders = [partition.leader for topic in seen.topics.values() for partition in topic.partitions.values()]
    # After a kill the broker is fenced for some seconds: it answers, but is not listed and leads no partition.
    return bool(seen.brokers) and -1 not in leaders


def _tail(text: str, lines: int = 8) -> str:
    return "\n    ".join(["", *text.strip().splitlines()[-lines:]]) if text.strip() else ""
