"""The Spark session every driver and test uses: one profile, with the reason for each odd value beside it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from streaming_jobs.files import private_folder
from streaming_jobs.platform import class_data, java, spark_jvm, testing_utilities
from streaming_jobs.platform.hadoop import use_local_files, without_unused_defaults
from streaming_jobs.platform.jars import spark_jars
from streaming_jobs.platform.jvm_heap import collect_early
from streaming_jobs.platform.processes import forks
from streaming_jobs.platform.processes.forks import ForkServer
from streaming_jobs.platform.processes.pandas_on_demand import pandas_on_demand
from streaming_jobs.platform.spark_jvm import CLASS_PATH, JAVA_OPTIONS, StartingJvm
from streaming_jobs.scratch import scratch
from streaming_jobs.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_GATEWAY_PORT, _GATEWAY_SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
"""spark-submit names by them the JVM that it has started, and PySpark connects to it."""
_FUNCTIONS = "org.apache.spark.sql.ml.InternalFunctionRegistration$"
"""Spark's own extension of each session; it uses the table of functions."""
_INITIALISED = 60.0
_HEAP = "-Xms96m -XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=30 -XX:-ShrinkHeapInSteps -XX:MetaspaceSize=64m"
"""Java would begin with a 64th of the machine's memory, give little back, and collect all at 21 MB of classes."""
_HEAP_OPTION = re.compile(r"-Xm[nsx]|-XX:(Initial|Max|Min)(HeapSize|HeapFreeRatio|RAMPercentage)")
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")


def profile(settings: Settings) -> dict[str, str]:
    """The session's properties."""
    cores = _cores(settings.spark.master)
    partitions = settings.spark.shuffle_partitions or cores
    heap = settings.spark.driver_memory_mb
    return {
        "spark.master": settings.spark.master,
        "spark.app.name": "recourse",
        "spark.driver.memory": f"{heap}m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # A batch that would not fit the driver fails here, before the heap is full, and then takes the executors.
        "spark.driver.maxResultSize": f"{heap // 2}m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.scheduler.mode": "FAIR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # 50 by default, which makes each commit by delta-spark two to four seconds long.
        "spark.databricks.delta.snapshotPartitions": "1",
        # 30,000 tasks for a VACUUM of a small table otherwise.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
        # INT96 has no statistics in Parquet footers.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        # No chmod process per file; only safe with state files that carry unique ids (format 2).
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_FILES,
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        # Kept for Spark's own UI, which is off: 1,000 of each and 100,000 tasks by default, 20 MB after 1,500 queries.
        "spark.ui.retainedJobs": "50",
        "spark.ui.retainedStages": "50",
        "spark.ui.retainedTasks": "500",
        "spark.sql.ui.retainedExecutions": "50",
        "spark.sql.streaming.numRecentProgressUpdates": "20",
        # Unlimited by default: the session's main thread would wait, without a heartbeat of any stream.
        "spark.sql.streaming.stopTimeout": "5s",
        # Kafka options travel with the plan: keep credentials out of what explain prints.
        "spark.sql.redaction.options.regex": "(?i)secret|password|token|access[.]?key|url|jaas|keystore|truststore",
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        "spark.sql.variant.allowDuplicateKeys": "true",
        # The plan is optimised again for each batch, and inferring filters takes a sixth of that time.
        "spark.sql.constraintPropagation.enabled": "false",
        **settings.spark.extra,
    }


@dataclass(frozen=True)
class Launched:
    """The processes of a session that is being started. Ask for the `session`, or `kill` them.

    `jvm` and `server`, the fork server, are None if the JVM existed before (spark-submit, Databricks).
    """

    properties: Mapping[str, str]
    jvm: StartingJvm | None
    server: ForkServer | None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The JVM."""
        return self.jvm.process if self.jvm is not None else None

    def session(self) -> SparkSession:
        """Wait for the JVM, and make the session in it. Raises TransientError if the JVM ends before it answers."""
        testing_utilities.answer_first()
        pandas_on_demand()
        try:
            for module in ("pyspark.sql", "pyspark.java_gateway"):  # while the JVM starts
                importlib.import_module(module)
            gateway = _gateway() if self.jvm is None else _gateway_to(self.jvm)
            return _session(self.properties, gateway)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End what was started, at once."""
        if self.jvm is not None:
            self.jvm.kill()
        if self.server is not None:
            self.server.close()


def launch(
    settings: Settings,
    *,
    name: str = "recourse",
    keep_open: Sequence[int] = (),
    output: IO[bytes] | None = None,
    record_classes: Path | None = None,
) -> Launched:
    """Start the JVM of a session and the fork server of its Python processes, without waiting for them.

    `keep_open` are descriptors that the JVM inherits (the leases); `output` receives what the JVM itself prints;
    `record_classes` is a file for the class-data archive that the JVM writes when it ends.
    Spark's log goes to `<home>/logs/<name>.spark.log`, three files of 10 MB at most. If there is a JVM
    already (spark-submit, Databricks), it is used. Raises SetupError when a jar is missing or damaged, or there is no
    Java to use.
    """
    existing = _GATEWAY_PORT in os.environ
    own = scratch(settings.home, "spark")
    properties = _properties(settings, name, own.folder, record_classes, archive=not existing)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if existing:
        return Launched(properties, None, None)
    from pyspark.find_spark_home import _find_spark_home

    home = Path(_find_spark_home())
    keep = (*keep_open, own.descriptor)  # a JVM may outlive its driver
    jvm = spark_jvm.launch(java.choose(settings), home, properties, keep_open=keep, output=output, scratch=own.folder)
    try:
        server = forks.start(own.folder, output) if settings.spark.master.startswith("local") else None
    except BaseException:
        jvm.kill()
        raise
    if server is not None:
        os.environ["PYSPARK_PYTHON"] = str(server.executable)
    return Launched(properties, jvm, server)


def start(settings: Settings, **options: Any) -> SparkSession:
    """`launch`, and wait for the session."""
    return launch(settings, **options).session()


def _properties(
    settings: Settings, name: str, folder: Path, record_classes: Path | None, *, archive: bool
) -> dict[str, str]:
    """Those of the profile, and what is of this session and this machine."""
    jars = spark_jars(settings)
    # Files that a killed JVM leaves (unpacked native libraries, folders of Spark) are then removed with its scratch.
    further = [f"-Djava.io.tmpdir={folder}"]
    if record_classes is not None:
        further += class_data.recording(record_classes)
    elif archive:
        further += class_data.reading(class_data.archive(settings, "spark", jars))
    user_jars = settings.spark.extra.get(CLASS_PATH)
    return {
        **profile(settings),
        CLASS_PATH: os.pathsep.join([*(str(jar) for jar in jars), *([user_jars] if user_jars else [])]),
        JAVA_OPTIONS: _java_options(settings, name, further),
        "spark.local.dir": str(folder),
    }


def _gateway() -> Any:
    """PySpark's connection to the JVM that the environment names."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._active_spark_context is None:  # PySpark would take the gateway of a JVM that has ended
        SparkContext._gateway = SparkContext._jvm = None
    return launch_gateway()  # type: ignore[no-untyped-call]


def _gateway_to(starting: StartingJvm) -> Any:
    """PySpark connects to our JVM as to that of spark-submit, and imports the classes that it needs."""
    jvm = starting.answer()
    os.environ.update({_GATEWAY_PORT: str(jvm.port), _GATEWAY_SECRET: jvm.secret})
    try:
        gateway = _gateway()
    finally:
        del os.environ[_GATEWAY_PORT], os.environ[_GATEWAY_SECRET]
    gateway.proc = jvm.process
    return gateway


def _session(properties: Mapping[str, str], gateway: Any) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    functions = threading.Thread(target=_initialise_functions, args=[gateway], name="functions", daemon=True)
    functions.start()
    context = SparkContext(conf=SparkConf(loadDefaults=False).setAll([*properties.items()]), gateway=gateway)
    functions.join(_INITIALISED)  # two threads that initialise the same classes could wait for each other
    session = SparkSession(context)
    use_local_files(session)
    if properties["spark.master"].startswith("local"):
        without_unused_defaults(session)
        collect_early(session)
    return session


def _initialise_functions(gateway: Any) -> None:
    """Let the JVM make its table of SQL functions, which takes half a second, while it makes the Spark context."""
    with suppress(Exception):  # the session meets it too, and tells
        gateway.jvm.java.lang.Class.forName(_FUNCTIONS)


def _cores(master: str) -> int:
    inside = master.partition("[")[2].rstrip("]").split(",")[0]
    return int(inside) if inside.isdigit() else (os.cpu_count() or 2)


def _java_options(settings: Settings, name: str, further: Sequence[str] = ()) -> str:
    """Our options, then the user's; Spark splits them at blanks outside of quotes."""
    folder = private_folder(settings.logs).absolute()
    file = folder / f"{name}.log4j2.properties"
    file.write_text(_LOG4J.format(path=folder / f"{name}.spark.log"))
    user_options = settings.spark.extra.get(JAVA_OPTIONS, "")
    collector = "" if _COLLECTOR.search(user_options) else "-XX:+UseSerialGC"  # the JVM does not start with two
    own_files = (f"-Dlog4j2.configurationFile={file.as_uri()}", f"-XX:ErrorFile={folder / name}.crash.log")
    quoted = (f'"{option}"' for option in (*own_files, *further))
    heap = "" if _HEAP_OPTION.search(user_options) else _HEAP
    options = (*quoted, collector, heap, "-XX:+ExitOnOutOfMemoryError", user_options)
    return " ".join(option for option in options if option)


_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {path}
appender.file.filePattern = {path}.%i
appender.file.filePermissions = rw-------
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
"""
