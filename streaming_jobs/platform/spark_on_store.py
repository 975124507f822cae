"""Spark's checkpoint on S3: the jars of Hadoop's S3A, its properties, and a checkpoint file manager of ours.

The jars are no part of `make setup`: the first session whose state is on S3 fetches them. The file manager
(`StoreCheckpointFiles.java`) is compiled by Janino, with which Spark compiles its queries, into a jar of the cache.
Executors load it by its name, so it has to be on their class path too.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata, resources
from pathlib import Path
from urllib.parse import urlsplit

from streaming_jobs.errors import ConfigurationError, SetupError
from streaming_jobs.platform import java
from streaming_jobs.platform.jars import Progress, cache, ensure, locked
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import StorageSettings
from streaming_jobs.storage.locations import Location, StorePath
from streaming_jobs.text import commands

_CLASS = "StoreCheckpointFiles"
_COMPILE_SECONDS = 120.0
_LEAST_TIMEOUT = timedelta(seconds=15)
"""S3A takes no less."""
_CONNECTORS = {
    "gs": "the Cloud Storage connector (com.google.cloud.bigdataoss:gcs-connector)",
    "abfss": "the ABFS connector (org.apache.hadoop:hadoop-azure)",
}
_COMPILER = """
package recourse;

public class Compiler {
    public static void main(String[] names) throws Exception {
        org.codehaus.janino.SimpleCompiler compiler = new org.codehaus.janino.SimpleCompiler();
        compiler.cook(names[0], new java.io.FileInputStream(names[0]));
        java.util.jar.JarOutputStream jar = new java.util.jar.JarOutputStream(new java.io.FileOutputStream(names[1]));
        for (java.util.Iterator classes = compiler.getBytecodes().entrySet().iterator(); classes.hasNext();) {
            java.util.Map.Entry each = (java.util.Map.Entry) classes.next();
            jar.putNextEntry(new java.util.zip.ZipEntry(((String) each.getKey()).replace('.', '/') + ".class"));
            jar.write((byte[]) each.getValue());
        }
        jar.close();
    }
}
"""


def state_store(state: Location) -> StorePath | None:
    """The location of state if it is on S3, None for a folder; raises ConfigurationError for any other store."""
    if not isinstance(state, StorePath):
        return None
    scheme = state.url.partition("://")[0]
    if scheme != "s3":
        needs = _CONNECTORS.get(scheme, "a Hadoop file system with conditional writes")
        raise ConfigurationError(
            f"Spark's checkpoint cannot be at {state}: that needs {needs}, which Recourse does not bring, and a file "
            "manager for it that writes under a condition",
            "put state_dir on s3://, or in a folder that every machine of the session sees; tables may stay on the "
            "store",
        )
    return state


def hadoop_path(place: Location) -> str:
    """The path or URL under which Hadoop, and so Spark, knows a location."""
    text = str(place)
    return f"s3a://{text.removeprefix('s3://')}" if text.startswith("s3://") else text


def properties(
    state: Location, storage: StorageSettings, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The properties of a session with its state on S3; none for a folder.

    None is a secret: each JVM looks for credentials itself, as the AWS SDK does (environment, web identity, profile,
    container, instance).
    """
    there = state_store(state)
    if there is None:
        return {}
    timeout = max(_LEAST_TIMEOUT, storage.timeout)
    span = f"{timeout.total_seconds():.0f}s"
    region = storage.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    values = {
        "endpoint.region": region,
        "path.style.access": str(storage.addressing == "path").lower(),
        "aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
        # No looks before and after: whether something is there, whether it is a folder, whether its parent is.
        "performance.flags": "create,delete,mkdir",
        "create.conditional.enabled": "true",
        # One GET for a small file; the others read ahead, or look at the object first.
        "input.stream.type": "classic",
        # State's own files, by the same client as all others, and without asking first whether a PUT is welcome.
        "optimized.copy.from.local.enabled": "false",
        "connection.expect.continue": "false",
        "connection.timeout": span,
        "connection.request.timeout": span,
        "connection.establish.timeout": span,
        # About half a minute in all: 7 and 20 repetitions by default, each with 5 attempts of the SDK.
        "attempts.maximum": "3",
        "retry.limit": "4",
        "retry.interval": "200ms",
        "retry.throttle.limit": "5",
        "retry.throttle.interval": "200ms",
        **_endpoint(storage, urlsplit(there.url).netloc),
    }
    return {
        **{f"spark.hadoop.fs.s3a.{name}": value for name, value in values.items()},
        "spark.sql.streaming.checkpointFileManagerClass": f"recourse.{_CLASS}",
        # A second object for each file of state; TLS and the store have checksums of their own.
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    }


def _endpoint(storage: StorageSettings, bucket: str) -> dict[str, str]:
    """The SDK puts the bucket into the host name itself, where the setting has it already."""
    if not storage.endpoint:
        return {}
    parts = urlsplit(storage.endpoint)
    return {
        "endpoint": f"{parts.scheme}://{parts.netloc.removeprefix(f'{bucket}.')}",
        "connection.ssl.enabled": str(parts.scheme == "https").lower(),
    }


def store_jars(settings: Settings, *, progress: Progress | None = None) -> list[Path]:
    """The jars that a session needs beside `spark_jars`: none, unless its state is on S3.

    Fetches and compiles what is missing. Raises SetupError, and ConfigurationError as `state_store` does.
    """
    if state_store(settings.state) is None:
        return []
    fetched = ensure(settings, locked("s3"), progress=progress)
    return [*fetched, _compiled(settings, fetched)]


def _compiled(settings: Settings, jars: list[Path]) -> Path:
    """The jar with the checkpoint file manager; its name has a hash of what it is made of."""
    source = resources.files("streaming_jobs.platform").joinpath(f"{_CLASS}.java").read_text(encoding="utf-8")
    parts = [source, _COMPILER, metadata.version("pyspark"), *(jar.name for jar in jars)]
    folder, digest = cache(settings), hashlib.sha256("\n".join(parts).encode()).hexdigest()
    made = folder / f"recourse-checkpoint-{digest[:16]}.jar"
    if made.is_file():
        return made
    from pyspark.find_spark_home import _find_spark_home

    class_path = os.pathsep.join([str(Path(_find_spark_home()) / "jars" / "*"), *map(str, jars)])
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as scratch:
        program, file, jar = (Path(scratch) / name for name in ("Compiler.java", f"{_CLASS}.java", made.name))
        program.write_text(_COMPILER, encoding="utf-8")
        file.write_text(source, encoding="utf-8")
        ended = subprocess.run(
            [
                str(java.choose(settings).executable),
                *("-cp", class_path, "org.codehaus.janino.SimpleCompiler"),
                *(str(program), "recourse.Compiler", str(file), str(jar)),
            ],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
        if ended.returncode:
            lines = (ended.stdout + ended.stderr).strip().splitlines()
            raise SetupError(
                f"Java did not compile {_CLASS}.java: {lines[0] if lines else f'exit code {ended.returncode}'}",
                f"`{commands.doctor()}` checks Java and PySpark; both have to be the ones that are pinned",
            )
        jar.replace(made)
    return made
