"""Hadoop's part of a session: its local file system without a process for each file, and a small configuration.

Files: without its native library, which no package brings, Hadoop sets the permissions of a file by the program
`chmod`, and it does so twice per file: Spark would start four processes in each batch, for two files of the checkpoint,
and more for state. Java itself can set permissions; so the local file system that Spark has gets the same class with
that one method of its own.

Configuration: Spark copies and serialises it in each batch, twice for each operator with state. Two thirds of it are
what Hadoop's jar has as defaults for YARN and MapReduce, which a session on this machine does not use, but for those of
reading and writing files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from streaming_jobs.platform.jvm_code import new_object

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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

    public Object apply(Object configuration) {
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
