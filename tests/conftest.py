"""What all tests share. A test's folder is its marker: tests/unit, tests/spark, tests/broker, tests/dagster."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings as hypothesis_settings

from streaming_jobs.platform.broker import Broker
from streaming_jobs.pytest_plugin.fixtures import stream_test
from streaming_jobs.settings import Settings
from tests.support.store_server import StoreServer, store_server
from tests.support.versity_server import versity_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["stream_test"]  # here too, for an environment that was made before the package had the entry point

TESTS = Path(__file__).parent
KINDS = ("unit", "spark", "broker", "dagster")
SettingsFactory = Callable[..., Settings]
QUICK_START = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
"""A JVM that lives for seconds is quicker without its optimising compiler."""
_KEPT = ("RECOURSE_JARS_DIR", "RECOURSE_MAVEN_REPOSITORY")
LONGEST_FIRST = (TESTS / "longest_first.txt").read_text(encoding="utf-8").split()
"""Files of tests that take 20 seconds or more, the longest first: then no process is alone with one in the end."""


def pytest_configure() -> None:
    """No test sees how this machine is configured, other than where jars come from, nor how this run was started.

    Bytecode is kept, whatever the environment says: without it pytest rewrites every file at each start, and every
    process that a test starts compiles all that it imports.

    A shell that starts the tests in the background has them ignore SIGINT. Dagster, once imported, treats SIGTERM as
    SIGINT: then no child of the tests could be asked to end.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:  # PySpark ends a process whose main module has no file: see main_module.py
        sys.modules["__main__"].__file__ = str(Path(pytest.__file__).with_name("__main__.py"))
    for name in [name for name in os.environ if name.startswith("RECOURSE_") and name not in _KEPT]:
        del os.environ[name]
    os.environ["RECOURSE_DEMO"] = "1"  # the streams of tests that name none
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}  # of the S3 server, as a user has them
    hypothesis_settings.register_profile("recourse", deadline=None)  # a test asserts no time that a machine can miss
    hypothesis_settings.load_profile("recourse")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the folder it lies in, and put the longest files first."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.relative_to(TESTS).as_posix(), len(place)))
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(kind)


@pytest.fixture
def settings(tmp_path: Path) -> SettingsFactory:
    """Makes settings with a home of this test's own: `settings()`, `settings({"broker.port": 9092})`."""

    def make(flags: Mapping[str, Any] | None = None) -> Settings:
        return Settings.load({"home": tmp_path / ".recourse", **(flags or {})})

    return make


@pytest.fixture(scope="session")
def moto() -> Iterator[StoreServer]:
    """The S3 server of this test run."""
    with store_server() as server:
        yield server


@pytest.fixture(scope="session")
def versity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """An S3 server that keeps its conditions without our help."""
    with versity_server(tmp_path_factory.mktemp("versity")) as server:
        yield server


@pytest.fixture
def object_store(request: pytest.FixtureRequest) -> StoreServer:
    """The S3 server `moto`, or the one that a test names by `ON_BOTH_SERVERS`."""
    server: StoreServer = request.getfixturevalue(getattr(request, "param", "moto"))
    server.clear()
    return server


ON_BOTH_SERVERS = pytest.mark.parametrize(
    "object_store", ["moto", pytest.param("versity", marks=pytest.mark.long)], indirect=True
)
"""Marks a test that runs on moto always and, in its long form, on VersityGW."""


@pytest.fixture
def tables_on_a_store(object_store: StoreServer) -> dict[str, Any]:
    """Settings of a home whose tables are on the S3 server, at a prefix of this test's own."""
    return {
        "tables_dir": f"{object_store.url}/{uuid.uuid4().hex}",
        "storage.endpoint": object_store.endpoint,
        "storage.region": "us-east-1",
        "storage.allow_http": True,
        "storage.timeout": "5s",
    }


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The one broker of this test run; `broker.start()` gives its address. Tests use topics of their own.

    It gets the topics of all tests, and records of 10 MB: more than its usual heap holds.
    """
    with Broker(Settings.load({"home": tmp_path_factory.mktemp("broker-home"), "broker.heap_mb": 256})) as broker:
        yield broker


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of this test run."""
    from streaming_jobs.platform.spark import start

    quick = {
        "home": tmp_path_factory.mktemp("spark-home"),
        "spark.master": "local[2]",
        "spark.driver_memory_mb": 1024,
        "spark.extra": QUICK_START,
    }
    session = start(Settings.load(quick), name="tests")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def recourse_spark(spark: SparkSession) -> SparkSession:
    """The session of `stream_test`."""
    return spark
