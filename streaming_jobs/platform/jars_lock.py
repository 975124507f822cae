"""A maintainer's tool: resolve the roots below and write `jars.lock`. Run after a change of version.

`python -m streaming_jobs.platform.jars lock`
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jgo.maven import Dependency, MavenContext

SPARK = (
    # Without their transitive jars: those would bring Hadoop and Parquet in a second time.
    "io.delta:delta-spark_4.2_2.13:4.4.0",
    "io.delta:delta-storage:4.4.0",
)
S3 = (
    # Of the version of Hadoop in PySpark, with the SDK that it was built with: as modules, which are 12 MB, where the
    # SDK's one `bundle` is 686 MB.
    "org.apache.hadoop:hadoop-aws:3.5.0",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1",
)
_SDK = "2.35.4"
S3_SDK = tuple(f"software.amazon.awssdk:{module}:{_SDK}!" for module in ("s3", "s3-transfer-manager", "sts"))
_IN_SPARK = ("io.netty", "org.apache.httpcomponents", "org.slf4j", "commons-codec", "commons-logging")
"""Groups that the SDK depends on and that PySpark has, some of them newer."""
PEERS = (
    # Spark's own Kafka source, for the benchmark beside it (benchmarks/speed/peers/plain_spark.py).
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",  # the newest stable one; tried with Spark 4.2.0
    "org.apache.kafka:kafka-clients:3.9.2",  # the version Spark 4.2.0 was built with
    "org.apache.commons:commons-pool2:2.12.1",
)
BROKER = (
    # `!`: take this version as it is. Without it jgo treats each root as a list of managed versions too, and
    # has put kafka-clients 3.9.1 under a 4.3.1 broker.
    "org.apache.kafka:kafka_2.13:4.3.1!",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.3!",  # Kafka depends on slf4j alone
    "org.apache.logging.log4j:log4j-core:2.25.3!",
)
_HEADER = """\
# Every jar Recourse runs with, and those of the benchmark's peers: set, Maven coordinate, bytes, SHA-256.
# Written by `python -m streaming_jobs.platform.jars lock`; the roots are in jars_lock.py.
"""


def write_lock(path: Path) -> None:
    """Resolve all sets with jgo and replace the lock at `path`."""
    from jgo.maven import MavenContext

    context = MavenContext(timeout=60)
    lines = [_line("spark", context.create_dependency(root)) for root in SPARK]
    lines += [_line("peers", context.create_dependency(root)) for root in PEERS]

    lines += [_line("s3", context.create_dependency(root)) for root in S3]
    sdk = [each for each in _resolved(context, S3_SDK) if each.artifact.groupId not in _IN_SPARK]
    lines += sorted(_line("s3", dependency) for dependency in sdk)
    lines += sorted(_line("broker", dependency) for dependency in _resolved(context, BROKER))
    path.write_text(_HEADER + "".join(lines), encoding="utf-8")


def _resolved(context: MavenContext, roots: Iterable[str]) -> Collection[Dependency]:
    """The roots, and what they need to run."""
    inputs, transitive = context.resolver.resolve([context.create_dependency(root) for root in roots])
    runtime = [d for d in transitive if (d.scope or "compile") in ("compile", "runtime") and not d.optional]
    return {dependency.artifact.key: dependency for dependency in [*inputs, *runtime]}.values()


def _line(name: str, dependency: Dependency) -> str:
    artifact = dependency.artifact
    data = artifact.resolve().read_bytes()
    coordinate = f"{artifact.groupId}:{artifact.artifactId}:{artifact.version}"
    return f"{name} {coordinate} {len(data)} {hashlib.sha256(data).hexdigest()}\n"
