"""A PostgreSQL server for tests, without a service and without TCP: its files and its socket lie in a temporary folder.

Its programs are those of the machine (on PATH, or in Debian's folder), else those of Debian's packages, which are
downloaded once, without root, into the cache. A machine with neither fails the test with what to install.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg2
import pytest
import yaml

from tests.support.waiting import wait_for

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "recourse" / "postgresql"
PACKAGES = ("postgresql", "libpq5")
TEMPLATE = "dagster_template"
_PROGRAMS = "usr/lib/postgresql/*/bin"


def programs() -> Path:
    """The folder of `initdb` and `postgres`."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    here = [*Path("/").glob(_PROGRAMS), *CACHE.glob(_PROGRAMS)]
    return here[-1] if here else _downloaded()


def _downloaded() -> Path:
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        of_release = _run(["apt-cache", "depends", "--important", "postgresql"]).stdout
        server = next(word for word in of_release.split() if word.startswith("postgresql-"))
        _run(["apt-get", "download", server, *PACKAGES[1:]], cwd=CACHE)
        for package in CACHE.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(CACHE)])
        return next(CACHE.glob(_PROGRAMS))
    except (OSError, StopIteration, subprocess.SubprocessError) as error:
        pytest.fail(
            f"no PostgreSQL: install one (Debian: apt install postgresql); its packages were not to be had: {error}"
        )


@dataclass(frozen=True)
class Postgres:
    """A running server; `socket` is the folder of its socket."""

    socket: Path
    user: str

    def url(self, database: str, scheme: str = "postgresql+psycopg2") -> str:
        """With the driver: SQLAlchemy 2.1 takes another one by default, which dagster-postgres does not install."""
        return f"{scheme}://{self.user}@/{database}?host={self.socket}"

    def connect(self, database: str = "postgres") -> Any:
        return psycopg2.connect(self.url(database, "postgresql"))

    def execute(self, statement: str, database: str = "postgres") -> None:
        connection = self.connect(database)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
        finally:
            connection.close()

    def rows(self, query: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """The rows of a query."""
        connection = self.connect(database)
        try:
            with connection.cursor() as cursor:
                cursor.execute(query)
                return list(cursor.fetchall())
        finally:
            connection.close()

    @contextmanager
    def instance(self, **settings: Any) -> Iterator[dg.DagsterInstance]:
        """An instance in a database of its own; `settings` are further sections of dagster.yaml."""
        database = f"dagster_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {database} TEMPLATE {TEMPLATE}")
        with tempfile.TemporaryDirectory(prefix="dagster-home-") as home:
            storage = {"storage": {"postgres": {"postgres_url": self.url(database)}}}
            with dg.DagsterInstance.from_config(_written(home, {**storage, **settings})) as instance:
                yield instance


def _written(home: str, values: Mapping[str, object]) -> str:
    """The instance's folder; it lies in the home, which a test's settings find above it."""
    folder = Path(home, "dagster")
    folder.mkdir()
    (folder / "dagster.yaml").write_text(yaml.safe_dump({"telemetry": {"enabled": False}, **values}))
    return str(folder)


@contextmanager
def postgres_server(*, dagster: bool = True) -> Iterator[Postgres]:
    """A server, ended with the block; with the tables of a Dagster instance in the database `TEMPLATE`."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    bin_folder, user = programs(), "recourse"
    libraries = (
        [str(path) for path in bin_folder.parents[3].glob("usr/lib/*-linux-gnu")] if CACHE in bin_folder.parents else []
    )
    server = None
    try:
        account = _unprivileged(folder)
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "LC_ALL": "C"}
        common: dict[str, Any] = {"env": environment, "cwd": folder, **account}
        data = folder / "data"
        _run(
            [str(bin_folder / "initdb"), "-D", str(data), "-U", user, "--auth=trust", "--no-sync", "-E", "UTF8"],
            **common,
        )
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=50", "-k", str(folder)]
        with (folder / "log").open("w") as log:
            server = subprocess.Popen([str(bin_folder / "postgres"), "-D", str(data), *options], stderr=log, **common)
        found = Postgres(folder, user)
        _wait_for(found, server, folder / "log")
        if dagster:
            _make_template(found)
        yield found
    finally:
        if server is not None:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _make_template(server: Postgres) -> None:
    server.execute(f"CREATE DATABASE {TEMPLATE}")
    with tempfile.TemporaryDirectory(prefix="dagster-home-") as home:
        config = {"storage": {"postgres": {"postgres_url": server.url(TEMPLATE)}}}
        with dg.DagsterInstance.from_config(_written(home, config)):
            pass  # it creates the tables


def _unprivileged(folder: Path) -> dict[str, Any]:
    """The account that the server runs with, which must not be root; it owns the folder."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _wait_for(server: Postgres, process: subprocess.Popen[Any], log: Path) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            server.connect().close()
        except psycopg2.OperationalError:
            return False
        return True

    wait_for(answers, "PostgreSQL")


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, **options)
