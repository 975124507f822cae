"""Hadoop's local file system, without a process for each file.

Without its native library, which no package brings, Hadoop sets the permissions of a file by the program `chmod`, and
it does so twice per file: Spark would start four processes in each batch, for two files of the checkpoint, and more for
state. Java itself can set permissions; so the local file system that Spark has gets the same class with that one method
of its own.

The class is compiled when a session starts, by Janino, with which Spark compiles its queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()

_CLASS = "recourse.LocalFiles"
_SOURCE = """
package recourse;

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
        _without_programs(session, files)
    except Exception as error:  # noqa: BLE001 - only speed is lost
        log.warning("Hadoop sets permissions by a program", reason=str(error)[:300])


def _without_programs(session: SparkSession, files: Any) -> None:
    """Give the local file system the class that sets permissions itself."""
    jvm, hadoop = session._jvm, session._jsc.hadoopConfiguration()
    assert jvm is not None
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(_SOURCE)
    gateway = session.sparkContext._gateway
    assert gateway is not None
    constructor = compiler.getClassLoader().loadClass(_CLASS).getDeclaredConstructors()[0]
    ours = constructor.newInstance(gateway.new_array(jvm.java.lang.Object, 0))
    ours.initialize(jvm.java.net.URI.create("file:///"), hadoop)
    inner = jvm.java.lang.Class.forName("org.apache.hadoop.fs.FilterFileSystem").getDeclaredField("fs")
    inner.setAccessible(True)
    inner.set(files, ours)
