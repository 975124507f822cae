"""Preparations of a command before it starts anything: checks, jars, sole use of the home, a broker and its topics."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestration.cli.text import progress_bar, say
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.settings import Settings


_WARM_UP_SECONDS = 900
PARTITIONS = 4
"""Number of partitions of a topic that a command creates for a stream."""


def quick_checks(settings: Settings, *, ui: bool) -> None:
    """Run the doctor's checks and print what is not in order; raises SetupError if one of them fails.

    The port of the UI is checked only with `ui`. Missing jars and class data are not mentioned: they are fetched or
    made next.
    """
    from orchestration.cli.doctor import verdict
    from streaming_jobs.errors import SetupError
    from streaming_jobs.preflight.doctor import checks

    relevant = [check for check in checks(settings) if ui or check.name != "UI port"]
    for check in relevant:
        if not check.ok and not (check.ok is None and check.name.startswith(("jars", "class data"))):
            say(f"{verdict(check)}: {check.name}: {check.found}. To correct it: {check.fix}")
    if failed := [check for check in relevant if check.ok is False]:
        raise SetupError(f"this machine is not ready: {', '.join(c.name for c in failed)}", failed[0].fix)


def fetch_jars(settings: Settings, *, broker: bool, spark: bool = True) -> None:
    """Fetch and verify the jars that are missing, with a progress bar. Raises SetupError."""
    from streaming_jobs.platform import jars, spark_on_store

    with _bar() as progress:
        if spark:
            jars.spark_jars(settings, progress=progress)
            spark_on_store.store_jars(settings, progress=progress)
        if broker:
            jars.broker_jars(settings, progress=progress)


def warm_up_once(settings: Settings) -> None:
    """Make the class-data archives in a child process where they are missing; a failure there costs only speed.

    The data that it needs are those of the extra `demo`.
    """
    from streaming_jobs.platform.extras import installed
    from streaming_jobs.warm_up import needed

    if installed("demo") and needed(settings):
        command = [sys.executable, "-m", "streaming_jobs.warm_up"]
        try:
            subprocess.run(command, stdout=sys.stderr.fileno(), timeout=_WARM_UP_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            say(f"the warm-up did not end within {_WARM_UP_SECONDS} s; sessions run without it, but start slower")


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar that appears with the first byte; without a terminal a line at the beginning and at the end."""
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn

    doing, name_of_jar = TextColumn("fetching jars"), TextColumn("{task.description}")
    bar = progress_bar(doing, BarColumn(), DownloadColumn(), TransferSpeedColumn(), name_of_jar)
    tasks: dict[int, TaskID] = {}

    def progress(name: str, done: int, total: int) -> None:
        if total not in tasks:
            bar.start()
            tasks[total] = bar.add_task("", total=total)
        bar.update(tasks[total], completed=done, description=name)
        if bar.disable and done in (0, total):
            say(f"fetching jars: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    try:
        yield progress
    finally:
        bar.stop()


@contextmanager
def sole_use(settings: Settings) -> Iterator[None]:
    """Lock the home against a second `recourse up`; raises UsageError while one runs."""
    from streaming_jobs.errors import UsageError
    from streaming_jobs.storage.files import private_folder
    from streaming_jobs.storage.locks import locked

    path = private_folder(settings.home) / "up.lock"

    def busy() -> UsageError:
        return UsageError(
            f"`{commands.up()}` runs already on {path.parent} (process {path.read_text().strip() or '?'})",
            "end that one, or use another home: recourse --set home=FOLDER up",
        )

    with locked(path, 0, busy) as descriptor:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


def restart_if_dead(broker: Broker) -> None:
    """Restart the broker if it has died; raises SetupError if it does not start."""
    if not broker.running():
        say("the broker has died; starting it again")
        broker.restart()


@contextmanager
def broker_for_command(settings: Settings, needs: str = "") -> Iterator[str]:
    """Address of the configured cluster, of the broker of a running `recourse up`, or of one started for the block.

    `needs` is the reason that is printed before one is started.
    """
    from streaming_jobs.errors import BrokerUnreachable
    from streaming_jobs.platform.broker import Broker, bootstrap_servers

    try:
        address = bootstrap_servers(settings)
    except BrokerUnreachable:
        if needs:
            say(f"{needs}; none runs, so the embedded one is started for this command")
        fetch_jars(settings, broker=True, spark=False)
        with Broker(settings) as broker:
            address = broker.start()
            say(f"embedded broker at {address}, for this command")
            yield address
        if needs:
            say("the embedded broker has been ended again")
        return
    yield address


def create_topics(settings: Settings, topology: Topology, bootstrap: str, *, ours: bool) -> list[str]:
    """Create the missing source topics, whose records never expire, and return their names.

    Raises SetupError if the default cluster is not `ours`, and for topics of other clusters: a misspelt name would
    become an empty topic there.
    """
    from streaming_jobs.declare.names import cluster_of
    from streaming_jobs.errors import SetupError
    from streaming_jobs.sources.topics import Topics

    topics = Topics.of(settings.kafka, bootstrap)
    clusters = {cluster_of(name) for name in topology.topics} | {""}
    existing = {name for cluster in clusters for name in topics.names(cluster)}
    missing = [name for name in topology.topics if name not in existing]
    if foreign := [name for name in missing if cluster_of(name) or not ours]:
        where = settings.kafka.of(foreign[0]).bootstrap_servers or bootstrap
        raise SetupError(
            f"{where} has no topic {', '.join(foreign)}, or this user may not see it",
            "correct the name in the stream's source, or create the topic with the partitions and the retention that "
            "it needs; Recourse creates topics only on its embedded broker",
        )
    for name in missing:
        topics.create(name, PARTITIONS)
    return missing
