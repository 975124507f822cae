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
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import structlog

from streaming_jobs.errors import SetupError
from streaming_jobs.platform import class_data, java, spark_jvm, spark_on_store
from streaming_jobs.platform.jars import spark_jars
from streaming_jobs.platform.processes import forks
from streaming_jobs.platform.processes.forks import ForkServer
from streaming_jobs.platform.processes.pandas_on_demand import pandas_on_demand
from streaming_jobs.platform.spark_jvm import (
    CLASS_PATH,
    JAVA_OPTIONS,
    LATER_SECOND_COMPILER,
    StartingJvm,
    check_types_by_one_call,
    collect_early,
    new_object,
    read_promptly,
)
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import SparkSettings
from streaming_jobs.storage.files import private_folder, scratch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Hadoop's part of a session: its local file system without a process for each file, and a small configuration.
#
# Files: without its native library, which no package brings, Hadoop sets the permissions of a file by the program
# `chmod`, and it does so twice per file: Spark would start four processes in each batch, for two files of the
# checkpoint, and more for state. Java itself can set permissions; so the local file system that Spark has gets the
# same class with that one method of its own.
#
# Configuration: Spark copies and serialises it in each batch, twice for each operator with state. Two thirds of it
# are what Hadoop's jar has as defaults for YARN and MapReduce, which a session on this machine does not use, but
# for those of reading and writing files. Beside each property Hadoop notes which file has set it, and compresses these
# notes one by one whenever it serialises them.

log = structlog.get_logger()

_LOCAL_FILES = """
public class LocalFiles extends org.apache.hadoop.fs.RawLocalFileSystem {
    public void setPermission(org.apache.hadoop.fs.Path path, org.apache.hadoop.fs.permission.FsPermission permission)
            throws java.io.IOException {
        if (permission.getStickyBit() || pathToFile(path).isDirectory()) {  // Java would take away setgid
            super.setPermission(path, permission);
            return;
        }
        java.nio.file.Files.setPosixFilePermissions(
            pathToFile(path).toPath(),
            java.nio.file.attribute.PosixFilePermissions.fromString(permission.toString()));
    }
}
"""
_DEFAULTS = """
public class UnusedDefaults implements java.util.function.Function {
    private static final String KEPT = "mapreduce\\\\.(fileoutputcommitter|outputcommitter|input|output)\\\\..*";

    public Object apply(Object configuration) throws Exception {
        org.apache.hadoop.conf.Configuration all = (org.apache.hadoop.conf.Configuration) configuration;
        java.util.List unused = new java.util.ArrayList();
        for (java.util.Iterator entries = all.iterator(); entries.hasNext();) {
            String name = (String) ((java.util.Map.Entry) entries.next()).getKey();
            String[] sources = all.getPropertySources(name);
            String source = sources == null ? "" : sources[sources.length - 1];
            if (source.equals("yarn-default.xml") || source.equals("mapred-default.xml") && !name.matches(KEPT)) {
                unused.add(name);
            }
        }
        for (java.util.Iterator names = unused.iterator(); names.hasNext();) {
            all.unset((String) names.next());
        }
        Class kind = org.apache.hadoop.conf.Configuration.class;
        java.lang.reflect.Field sources = kind.getDeclaredField("updatingResource");
        sources.setAccessible(true);
        ((java.util.Map) sources.get(all)).clear();
        return Integer.valueOf(unused.size());
    }
}
"""


def use_local_files(session: SparkSession) -> None:
    """Let the session's JVM write local files without programs, and without a `.crc` file beside each.

    The checkpoint's own checksums stay.
    """
    jvm = session._jvm
    assert jvm is not None
    hadoop = session._jsc.hadoopConfiguration()
    root = jvm.java.net.URI.create("file:///")
    files = jvm.org.apache.hadoop.fs.FileSystem.get(root, hadoop)  # one instance, which Hadoop keeps
    files.setWriteChecksum(False)
    files.setVerifyChecksum(False)
    if not jvm.java.lang.Class.forName("org.apache.hadoop.fs.LocalFileSystem").isInstance(files):
        return  # a user's own (spark.hadoop.fs.file.impl)
    try:
        ours = new_object(session, "LocalFiles", _LOCAL_FILES)
        ours.initialize(root, hadoop)
        inner = jvm.java.lang.Class.forName("org.apache.hadoop.fs.FilterFileSystem").getDeclaredField("fs")
        inner.setAccessible(True)
        inner.set(files, ours)
    except Exception as error:  # noqa: BLE001 - only speed is lost
        log.warning("Hadoop sets permissions by a program", reason=str(error)[:300])


def without_unused_defaults(session: SparkSession) -> None:
    """Take the defaults for YARN and MapReduce out of the session's Hadoop configuration; what a user has set stays."""
    try:
        new_object(session, "UnusedDefaults", _DEFAULTS).apply(session._jsc.hadoopConfiguration())
    except Exception as error:  # noqa: BLE001 - only speed is lost
        log.warning("Hadoop's configuration stays whole", reason=str(error)[:300])


# PySpark's utilities for tests, which PySpark uses itself: `lit` and each call of Java ask them if NumPy is there.
#
# They answer by importing all that PySpark's tests need, as far as it is installed: pandas, PyYAML, Jinja and more,
# a third of a second and 36 MB in each driver. With `answer_first` that question is answered without them; they are
# loaded when somebody asks them something else, such as `assertDataFrameEqual`.

_PACKAGE, _UTILITIES = "pyspark.testing", "pyspark.testing.utils"


class _Unloaded(ModuleType):
    """A placeholder for a module, until code uses an attribute that the placeholder lacks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (name != "__path__" or self.__name__ != _PACKAGE):
            raise AttributeError(name)  # of a package, which it is not
        for each in (_UTILITIES, _PACKAGE):
            if isinstance(sys.modules.get(each), _Unloaded):
                del sys.modules[each]
        importlib.import_module(_PACKAGE)  # and with it the utilities
        return getattr(importlib.import_module(self.__name__), name)


def answer_first() -> None:
    """Answer the question about NumPy in their place, unless they are loaded already."""
    if _PACKAGE in sys.modules or _UTILITIES in sys.modules:
        return
    pyspark = importlib.import_module("pyspark")
    package, utilities = _Unloaded(_PACKAGE), _Unloaded(_UTILITIES)
    utilities.have_numpy = True  # type: ignore[attr-defined]  # a dependency of ours
    package.utils = utilities  # type: ignore[attr-defined]
    pyspark.testing = package  # type: ignore[attr-defined]
    sys.modules.update({_PACKAGE: package, _UTILITIES: utilities})


_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
PARTITIONS = "spark.sql.shuffle.partitions"
_GATEWAY_PORT, _GATEWAY_SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
"""spark-submit names by them the JVM that it has started, and PySpark connects to it."""
_FUNCTIONS = "org.apache.spark.sql.ml.InternalFunctionRegistration$"
"""Spark's own extension of each session; it uses the table of functions."""
_INITIALISED = 60.0
_HADOOP = {"HADOOP_CONF_DIR", "YARN_CONF_DIR"}
_HEAP = (
    "-Xms192m -XX:NewSize=96m -XX:SurvivorRatio=4 -XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=30 "
    "-XX:-ShrinkHeapInSteps -XX:MetaspaceSize=64m"
)
"""Java would begin with a 64th of the machine's memory, give little back, and collect all at 21 MB of classes.

A batch allocates 40 MB. With less room for what outlives one collection, most of what a batch holds becomes old, and
all of the heap is collected, which takes 0.2 s, two or three times as often.
"""
_HEAP_OPTION = re.compile(
    r"-Xm[nsx]|-XX:(Initial|Max|Min)(HeapSize|HeapFreeRatio|RAMPercentage)|-XX:(Max)?New(Size|Ratio)"
)
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")
_EXECUTOR_OPTIONS, _EXECUTOR_MEMORY = "spark.executor.extraJavaOptions", "spark.executor.memory"
_SMALL_HEAP = 2048
"""MB below which an executor's heap is collected by one thread, as Java itself decides by the memory of the machine."""


def profile(settings: Settings) -> dict[str, str]:
    """The session's properties."""
    cores = _cores(settings.spark.master)
    partitions = settings.spark.shuffle_partitions or cores
    heap = settings.spark.driver_memory_mb
    return {
        "spark.master": settings.spark.master,
        "spark.app.name": "recourse",
        "spark.driver.memory": f"{heap}m",
        **_addresses(settings.spark),
        # A batch that would not fit the driver fails here, before the heap is full, and then takes the executors.
        "spark.driver.maxResultSize": f"{heap // 2}m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.scheduler.mode": "FAIR",
        "spark.sql.session.timeZone": "UTC",
        PARTITIONS: str(partitions),
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
        "spark.ui.liveUpdate.period": "-1",  # nobody looks at what runs
        # A broadcast of a few KB, of which a batch has three or four, would take a buffer of 4 MB each.
        "spark.broadcast.blockSize": "256k",
        # An aggregation would clear 2 MB for each of its hash tables; one that is full goes on in a map that grows.
        "spark.sql.codegen.aggregate.fastHashMap.capacityBit": "12",
        # Unlimited by default: the session's main thread would wait, without a heartbeat of any stream.
        "spark.sql.streaming.stopTimeout": "5s",
        # Kafka options travel with the plan: keep credentials out of what explain prints.
        "spark.sql.redaction.options.regex": "(?i)secret|password|token|access[.]?key|url|jaas|keystore|truststore",
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        "spark.sql.variant.allowDuplicateKeys": "true",
        # The plan is optimised again for each batch, and inferring filters takes a sixth of that time.
        "spark.sql.constraintPropagation.enabled": "false",
        **spark_on_store.properties(settings.state, settings.storage),
        **settings.spark.extra,
        **({_EXECUTOR_OPTIONS: _executor_options(settings.spark.extra)} if settings.spark.has_executors else {}),
    }


ONE_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""Java would keep 48 MB for code with one compiler; 240 MB is what it keeps with both."""


def _executor_options(extra: Mapping[str, str]) -> str:
    """The Java options of executors beside the driver: ours, then the user's, of which Java takes the last one.

    An executor's JVM begins without the driver's archive of classes and profiles. Java's second compiler then takes
    more CPU time than the batches do (22 of 80 s for a million records), and most of a task's time is Python's, Arrow's
    and RocksDB's. So small executors have the first compiler alone, and a collector of one thread, unless the user says
    otherwise (`-XX:TieredStopAtLevel=4`). Large ones have Java's usual: their loss over hours was not measured.
    """
    user_options = extra.get(_EXECUTOR_OPTIONS, "")
    if _megabytes(extra.get(_EXECUTOR_MEMORY, "1g")) >= _SMALL_HEAP:
        return user_options
    collector = "" if _COLLECTOR.search(user_options) else "-XX:+UseSerialGC"
    return " ".join(option for option in (collector, ONE_COMPILER, user_options) if option)


def _megabytes(size: str) -> float:
    """The MB of a size as Spark writes it, such as 1536m, 2g or 2gb, without a unit MB; infinite if it is none."""
    found = re.fullmatch(r"(\d+)([kmgt]?)b?", size.strip().lower())
    return float(found[1]) * 1024.0 ** ("kmgt".index(found[2] or "m") - 1) if found else float("inf")


def _addresses(spark: SparkSettings) -> dict[str, str]:
    """The loopback address alone, unless executors on other machines have to reach the driver."""
    if not spark.has_executors:
        host, bind = spark.driver_host or "127.0.0.1", spark.bind_address or "127.0.0.1"
    else:
        host, bind = spark.driver_host, spark.bind_address  # empty: as Spark finds this machine's name
    addresses = {"spark.driver.host": host, "spark.driver.bindAddress": bind}
    return {name: value for name, value in addresses.items() if value}


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
        answer_first()
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
    existing, alone = _GATEWAY_PORT in os.environ, not settings.spark.has_executors
    own = scratch(settings.home, "spark")
    store_jars = [] if existing else spark_on_store.store_jars(settings)
    properties = _properties(settings, name, own.folder, record_classes, store_jars, archive=not existing)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if existing:
        return Launched(properties, None, None)
    from pyspark.find_spark_home import _find_spark_home

    if settings.spark.master == "yarn" and not (_HADOOP & os.environ.keys()):
        raise SetupError(
            "spark.master is yarn, and no folder of Hadoop's configuration is named",
            "set HADOOP_CONF_DIR to the folder with yarn-site.xml and core-site.xml",
        )
    home = Path(_find_spark_home())
    keep = (*keep_open, own.descriptor)  # a JVM may outlive its driver
    environment = dict(os.environ)
    if not alone:
        # One name for the Python of all machines: here it is the fork server's client, or this Python.
        here, python = private_folder(own.folder / "bin"), settings.spark.executor_python
        (here / python).unlink(missing_ok=True)
        (here / python).symlink_to(own.folder / "python")
        environment["PATH"] = os.pathsep.join([str(here), environment.get("PATH", os.defpath)])
    if store_jars:
        # Behind all others: Java uses a class-data archive that was made without them.
        further = environment.get(spark_jvm.FURTHER_CLASS_PATH)
        environment[spark_jvm.FURTHER_CLASS_PATH] = os.pathsep.join(
            [*([further] if further else []), *map(str, store_jars)]
        )
    jvm = spark_jvm.launch(
        java.choose(settings),
        home,
        properties,
        keep_open=keep,
        output=output,
        scratch=own.folder,
        environment=environment,
    )
    try:
        server = forks.start(own.folder, output)
    except BaseException:
        jvm.kill()
        raise
    if not alone:
        os.environ["PYSPARK_PYTHON"] = python
    elif server is not None:
        os.environ["PYSPARK_PYTHON"] = str(server.executable)
    return Launched(properties, jvm, server)


def start(settings: Settings, **options: Any) -> SparkSession:
    """`launch`, and wait for the session."""
    return launch(settings, **options).session()


def _properties(
    settings: Settings,
    name: str,
    folder: Path,
    record_classes: Path | None,
    store_jars: Sequence[Path],
    *,
    archive: bool,
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
    if settings.spark.has_executors:
        own = {"spark.jars": ",".join(map(str, [*jars, *store_jars]))}
    else:
        own = {"spark.hadoop.fs.s3a.buffer.dir": str(folder / "s3a")} if store_jars else {}
    return {
        **own,
        **profile(settings),
        CLASS_PATH: os.pathsep.join([*(str(jar) for jar in jars), *([user_jars] if user_jars else [])]),
        JAVA_OPTIONS: _java_options(settings, name, further),
        "spark.local.dir": str(folder),
    }


def _gateway() -> Any:
    """PySpark's connection to the JVM that the environment names."""
    read_promptly()
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

    check_types_by_one_call()
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
    with suppress(Exception):  # the session meets the error too, and reports it
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
    options = (*quoted, collector, heap, LATER_SECOND_COMPILER, "-XX:+ExitOnOutOfMemoryError", user_options)
    return " ".join(option for option in options if option)


_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
# It would warn of each batch that is longer than the trigger's interval, which is every one of a stream with pace=live.
logger.trigger.name = org.apache.spark.sql.execution.streaming.runtime.ProcessingTimeExecutor
logger.trigger.level = error
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
