"""The configuration of the embedded broker: properties, options of its JVM, its log. Pure text, no process."""

from __future__ import annotations

from pathlib import Path

from streaming_jobs.platform.java_properties import as_properties
from streaming_jobs.platform.ports import HOST

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
