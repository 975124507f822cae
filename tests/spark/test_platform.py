"""The session as it is started: its files, and its Python processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

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


def test_workers_are_forked_from_a_daemon_that_has_imported_what_they_need(spark: SparkSession) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        for _ in batches:
            ready = "streaming_jobs.sources.kafka_data_source" in sys.modules and "pyarrow" in sys.modules
            from_archive = ".zip" in str(sys.modules["pyspark"].__file__)
            rows = {"pid": [os.getpid()], "parent": [os.getppid()], "ready": [ready], "from_archive": [from_archive]}
            yield pa.RecordBatch.from_pydict(rows)

    found = spark.range(1).mapInArrow(look, "pid long, parent long, ready boolean, from_archive boolean").collect()
    (worker,) = found
    assert worker.ready and not worker.from_archive
    daemon = psutil.Process(worker.parent)
    assert "streaming_jobs.platform.worker_daemon" in daemon.cmdline()
    assert daemon.num_threads() == 1, "a process with threads must not fork"


def test_no_process_has_looked_for_data_sources(spark: SparkSession) -> None:
    class Nothing(DataSource):
        def schema(self) -> str:
            return "a int"

    spark.dataSource.register(Nothing)
    assert spark.read.format("Nothing").load().columns == ["a"]
    jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]
    commands = [" ".join(child.cmdline()) for child in jvm.children(recursive=True)]
    assert not [command for command in commands if "lookup_data_sources" in command]
