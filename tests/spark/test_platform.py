"""The session as it is started: its files, and its Python processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from streaming_jobs.platform.spark_jvm import LATER_SECOND_COMPILER
from tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


def local_files(spark: SparkSession) -> Any:
    jvm: Any = spark._jvm
    root = jvm.java.net.URI.create("file:///")
    return jvm.org.apache.hadoop.fs.FileSystem.get(root, spark._jsc.hadoopConfiguration())


def test_a_file_has_the_permissions_of_the_umask_and_java_sets_them(spark: SparkSession, tmp_path: Path) -> None:
    jvm: Any = spark._jvm
    files = local_files(spark)
    path = jvm.org.apache.hadoop.fs.Path
    assert files.getRawFileSystem().getClass().getName() == "recourse.LocalFiles"
    files.create(path(f"{tmp_path}/of a/file"), True).close()
    assert (tmp_path / "of a" / "file").stat().st_mode & 0o777 == 0o644
    assert not list((tmp_path / "of a").glob(".*.crc"))
    private = jvm.org.apache.hadoop.fs.permission.FsPermission("600")
    files.setPermission(path(f"{tmp_path}/of a/file"), private)
    assert (tmp_path / "of a" / "file").stat().st_mode & 0o777 == 0o600
    files.setPermission(path(f"{tmp_path}/of a"), jvm.org.apache.hadoop.fs.permission.FsPermission("1777"))
    assert (tmp_path / "of a").stat().st_mode & 0o7777 == 0o1777


def test_defaults_of_yarn_and_mapreduce_are_not_in_the_configuration_and_what_was_set_is(spark: SparkSession) -> None:
    hadoop = spark._jsc.hadoopConfiguration()
    jvm: Any = spark._jvm
    whole = jvm.org.apache.hadoop.conf.Configuration()
    for name in ("yarn.resourcemanager.hostname", "mapreduce.map.memory.mb"):
        assert whole.get(name) is not None and hadoop.get(name) is None
    for name in ("mapreduce.outputcommitter.factory.scheme.s3a", "mapreduce.input.fileinputformat.split.minsize"):
        assert hadoop.get(name) == whole.get(name) is not None
    assert hadoop.get("mapreduce.fileoutputcommitter.algorithm.version") == "2"
    assert hadoop.get("fs.s3a.impl") and hadoop.get("fs.AbstractFileSystem.file.impl")
    assert whole.getPropertySources("fs.s3a.impl") and not hadoop.getPropertySources("fs.s3a.impl")


def test_old_objects_of_the_jvm_are_collected_before_its_heap_is_full(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    beans = jvm.java.lang.management.ManagementFactory
    (old,) = [pool for pool in beans.getMemoryPoolMXBeans() if pool.getName() == "Tenured Gen"]
    jvm.java.lang.System.gc()
    threshold = old.getUsageThreshold()
    assert 128 << 20 <= threshold < old.getUsage().getMax()
    held: list[Any] = []

    def grown() -> bool:
        """Hold more. Java compares after a collection, so these are small enough to be young first."""
        held.append(jvm.java.nio.ByteBuffer.allocate(8 << 20))
        return bool(old.getUsageThreshold() > threshold)

    wait_for(grown, "twice what is in use is the next threshold")
    held.clear()

    def small_again() -> bool:
        """Py4J lets go of the buffers in a thread of its own."""
        jvm.java.lang.System.gc()
        return bool(old.getUsage().getUsed() < threshold)

    wait_for(small_again, "the buffers are let go of")


def test_python_processes_are_forked_with_their_imports_done(spark: SparkSession) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys  # of the worker

        from pyspark.sql.pandas.serializers import TransformWithStateInPySparkRowSerializer as Rows

        for _ in batches:
            ready = "streaming_jobs.sources.kafka" in sys.modules and "pyarrow" in sys.modules
            ready = ready and pa.array([1])
            ready = ready and Rows.load_stream.__module__.endswith("processor_rows")
            from_archive = ".zip" in str(sys.modules["pyspark"].__file__)
            equal_hashes = hash("a value") == expected
            row = [[os.getppid()], [ready], [from_archive], [equal_hashes], [os.environ.get("OPENBLAS_NUM_THREADS")]]
            yield pa.RecordBatch.from_arrays([*map(pa.array, row[:4]), pa.array(row[4], pa.string())], names)

    command = [sys.executable, "-c", "print(hash('a value'))"]
    expected = int(subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": "0"}))
    names = ["parent", "ready", "from_archive", "equal_hashes", "threads"]
    types = "parent long, ready boolean, from_archive boolean, equal_hashes boolean, threads string"
    (worker,) = spark.range(1).mapInArrow(look, types).collect()
    assert worker.ready and worker.equal_hashes and not worker.from_archive
    assert worker.threads == os.environ.get("OPENBLAS_NUM_THREADS")
    daemon = psutil.Process(worker.parent)
    assert " ".join(daemon.cmdline()).split() == ["python", "-m", "pyspark.daemon", "pyspark.worker"]
    assert daemon.num_threads() == 1, "a process with threads must not fork"
    server = psutil.Process(daemon.ppid())
    assert "streaming_jobs.platform.processes.fork_server" in server.cmdline() and server.ppid() == os.getpid()


def test_javas_second_compiler_takes_methods_later_than_by_default(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    bean = jvm.java.lang.Class.forName("com.sun.management.HotSpotDiagnosticMXBean")
    hotspot = jvm.java.lang.management.ManagementFactory.getPlatformMXBean(bean)
    asked = dict(option.removeprefix("-XX:").split("=") for option in LATER_SECOND_COMPILER.split())
    assert asked and {name: hotspot.getVMOption(name).getValue() for name in asked} == asked


def test_no_process_has_looked_for_data_sources(spark: SparkSession) -> None:
    class Nothing(DataSource):
        def schema(self) -> str:
            return "a int"

    spark.dataSource.register(Nothing)
    assert spark.read.format("Nothing").load().columns == ["a"]
    jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]
    commands = [" ".join(child.cmdline()) for child in jvm.children(recursive=True)]
    assert not [command for command in commands if "lookup_data_sources" in command]
