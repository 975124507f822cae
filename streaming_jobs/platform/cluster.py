"""Executors on other machines: what a session sends them, what they have to prove, and how they are watched.

    send        the code of Recourse and of the user's streams, so that a cluster needs neither; before the first query
    check       each executor's Python and packages, and that it shares the folders of tables and state with the driver
    failure     an application that the master has ended, or one without an executor

Delta's jars go along as `spark.jars` (`spark.py`), and with state on S3 those of its checkpoint. The properties of
Kafka's client, with the credentials, go nowhere: executors read them where state is (`sources/connection.py`).
"""

from __future__ import annotations

import importlib.util
import platform
import py_compile
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol, TypedDict
from uuid import uuid4

import structlog

from streaming_jobs.errors import PermanentError, TransientError
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import scratch, write_atomic
from streaming_jobs.storage.locations import Location, Options, StorePath, made_folder, shared_root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()

VISIBLE = 5.0
"""Seconds that a network file system has to show one machine's file to another one."""
WITHOUT_EXECUTORS = 60.0
"""Seconds that a session has no executor before it is said to have failed."""
_ROUNDS = 5
_LOOK_EVERY = 2.0
_CODE = "recourse-code.zip"
_SAME = ("pyspark",)
_JAVA = "java.specification.version"
_APART = 5.0
"""Seconds that the clocks of two machines may differ without a warning."""
NEEDED = ("pyarrow", "confluent_kafka", "numpy", "msgspec", "deltalake", "obstore", "structlog", "pydantic")
"""Packages that reading a topic, judging its records and writing Parquet import on an executor."""


class Answer(TypedDict):
    """What a task says of its executor."""

    host: str
    folder: str
    """The executor's working folder: it tells the executors of a host apart."""
    python: str
    """The minor version, such as 3.11."""
    versions: dict[str, str]
    """By package; without those that are missing."""
    java: str
    """The major version; empty if it is not known."""
    clock: float
    """Its time in seconds since 1970."""
    code: str
    """The file from which it imports `streaming_jobs`; empty if it cannot."""
    files: list[tuple[str, str]]
    """Per folder the file that it wrote, or the reason for none."""


Task = Callable[[Iterable[object]], Iterator[Answer]]


class Executors(Protocol):
    def count(self) -> int:
        """How many are there now."""

    def cores(self) -> int:
        """How many cores they have together."""

    def stopped(self) -> bool:
        """Whether the application has ended."""

    def java(self) -> str:
        """The major version of the driver's Java."""

    def run(self, task: Task) -> list[Answer]:
        """The answers of a task on each core; it gets rows whose first value is the version of the executor's Java."""


@dataclass(frozen=True)
class SparkExecutors:
    spark: SparkSession

    def count(self) -> int:
        """As their block managers have registered; the driver's is one more."""
        return int(self.spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1

    def cores(self) -> int:
        """At least 2, as Spark counts; `spark.default.parallelism` replaces it."""
        return int(self.spark.sparkContext.defaultParallelism)

    def stopped(self) -> bool:
        return bool(self.spark.sparkContext._jsc.sc().isStopped())

    def java(self) -> str:
        jvm = self.spark._jvm
        assert jvm is not None
        return str(jvm.java.lang.System.getProperty(_JAVA))

    def run(self, task: Task) -> list[Answer]:
        """Spark offers a job's first tasks to each free executor in turn."""
        tasks = max(self.cores(), self.count())
        asked = self.spark.range(0, tasks, 1, tasks)
        return (
            asked.selectExpr(f"java_method('java.lang.System', 'getProperty', '{_JAVA}')")
            .rdd.mapPartitions(task)
            .collect()
        )


@dataclass(frozen=True)
class Checked:
    """Executors that can run the streams, each with one answer, and what is to be looked at in them."""

    answers: Sequence[Answer]
    warnings: Sequence[str]


# The code


def send(session: SparkSession, settings: Settings, folder: Path) -> None:
    """Let the executors' Python processes import Recourse and the modules of `flows` from an archive in `folder`."""
    archive = folder / _CODE
    write_archive(archive, ["streaming_jobs", *settings.flows])
    before = list(sys.path)
    session.sparkContext.addPyFile(str(archive))
    sys.path[:] = before  # the driver goes on importing from where its code versions are read


def write_archive(archive: Path, modules: Iterable[str]) -> None:
    """Write the top-level packages of these modules into a zip file, from which Python imports.

    Modules are compiled, since each process would compile them again; other files are copied, but for hidden ones: a
    `.env` stays here. Raises PermanentError for a module that is not in files.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into, TemporaryDirectory() as temporary:
        compiled = Path(temporary) / "compiled"
        for root in [root for name in sorted({m.partition(".")[0] for m in modules}) for root in _roots(name)]:
            for path in sorted([root, *root.rglob("*")]):
                name = path.relative_to(root.parent)
                if any(part.startswith(".") or part == "__pycache__" for part in name.parts):
                    continue
                if path.is_dir():
                    into.mkdir(f"{name.as_posix()}/")  # a package without `__init__.py` is found by it
                elif path.suffix == ".py" and _compiled(path, compiled, name):
                    into.write(compiled, str(name.with_suffix(".pyc")))
                else:
                    into.write(path, str(name))


def _compiled(path: Path, into: Path, name: Path) -> bool:
    """Compile a module; False for a file that is none, such as a template."""
    try:
        py_compile.compile(str(path), str(into), str(name), doraise=True)
    except py_compile.PyCompileError:
        return False
    return True


def _roots(name: str) -> list[Path]:
    """The folder of a package, or the file of a module."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
        return [Path(spec.origin)]
    raise PermanentError(
        f"module {name} is not in files of this machine, so it cannot be sent to the executors",
        "install the package of the streams as files, or set spark.master to local[*]",
    )


# What executors have to prove before the first batch
#
# Spark writes "successfully" to a disk that only one machine has: the driver would commit a batch without those rows,
# and state would be lost with its machine. An executor that joins later proves nothing; the rows in its files are
# counted.


def check(
    settings: Settings,
    executors: Executors,
    *,
    archive: str = _CODE,
    visible: float = VISIBLE,
    patience: float = WITHOUT_EXECUTORS,
) -> Checked:
    """Compare each executor's versions with the driver's, and let it read and write in the folders of tables and state.

    In each folder an executor reads a file of the driver, and writes one beside it that the driver reads. Raises
    TransientError if no executor comes, PermanentError for one that cannot run the streams. Another major version of
    Java, or another time, is a warning: what driver and executors exchange does not depend on them.
    """
    _await(settings, executors, patience)
    token, folders = uuid4().hex, (shared_root(settings.tables), shared_root(settings.state))
    asked = [made_folder(folder) / f".probe-{token}" for folder in folders]
    try:
        for file in asked:
            file.write_bytes(token.encode())
        seen: dict[tuple[str, str], Answer] = {}
        warnings: dict[str, None] = {}
        for _ in range(_ROUNDS):  # executors come one after the other, and each may be busy
            began = time.time()
            answers = executors.run(_task([(str(file), file_options(file)) for file in asked], visible))
            for answer in answers:
                seen[answer["host"], answer["folder"]] = answer
                _compare_versions(answer, archive)
                warnings |= dict.fromkeys(_differences(answer, executors.java(), began, time.time()))
                for folder, (written, reason) in zip(folders, answer["files"], strict=True):
                    file = Path(written) if isinstance(folder, Path) else StorePath(written, folder.options)
                    _enforce(answer["host"], folder, reason or _difference(file, token, visible))
            if len(seen) >= executors.count():
                break
    finally:
        for folder in folders:
            for file in folder.glob(f".probe-{token}*"):
                file.unlink(missing_ok=True)
    log.info("executors checked", executors=len(seen), hosts=sorted({host for host, _ in seen}))
    for warning in warnings:
        log.warning(warning)
    return Checked(list(seen.values()), list(warnings))


def _differences(answer: Answer, java: str, began: float, ended: float) -> Iterator[str]:
    """What an executor has otherwise than the driver, and can have so."""
    host = answer["host"]
    if answer["java"] and answer["java"] != java:
        yield f"the executor on {host} has Java {answer['java']}, the driver {java}: give both one version"
    behind, ahead = began - answer["clock"], answer["clock"] - ended
    if (apart := max(behind, ahead)) > _APART:
        order = "behind" if behind > ahead else "ahead of"
        yield f"the clock of {host} is {apart:.0f} s {order} the driver's: keep both by NTP"


def file_options(file: Location) -> Options:
    return file.options if isinstance(file, StorePath) else ()


def _await(settings: Settings, executors: Executors, patience: float) -> None:
    until = time.monotonic() + patience
    while not executors.count():
        if executors.stopped() or time.monotonic() > until:
            raise _without_executors(settings, patience)
        time.sleep(0.1)


def _without_executors(settings: Settings, seconds: float) -> TransientError:
    return TransientError(
        f"no executor for {seconds:.0f} s: {settings.spark.master} gives the session none",
        "the session is started again; look at the master's page for workers that are alive and have free cores and "
        "memory, and at a worker's log for executors that end at once",
    )


def _compare_versions(answer: Answer, archive: str) -> None:
    """Raises PermanentError for an executor whose Python, packages or code are not those that the driver works with."""
    here, host = ".".join(platform.python_version_tuple()[:2]), answer["host"]
    if answer["python"] != here:
        raise PermanentError(
            f"the executor on {host} has Python {answer['python']}, the driver {here}",
            f"set spark.executor_python to a Python {here} that every worker has",
        )
    missing = [name for name in (*_SAME, *NEEDED) if name not in answer["versions"]]
    if missing:
        raise PermanentError(
            f"the Python of the executor on {host} has no {', '.join(missing)}",
            "install the packages of recourse-streams for the Python that spark.executor_python names",
        )
    for name in _SAME:
        if answer["versions"][name] != metadata.version(name):
            raise PermanentError(
                f"the executor on {host} has {name} {answer['versions'][name]}, the driver {metadata.version(name)}",
                f"install {name} {metadata.version(name)} on every worker",
            )
    if archive not in answer["code"]:
        raise PermanentError(
            f"the executor on {host} imports streaming_jobs from {answer['code'] or 'nowhere'}, not from the driver's "
            "archive",
            "remove the package from the workers' Python: the session sends its own",
        )


def _enforce(host: str, folder: Location, reason: str) -> None:
    if reason:
        raise PermanentError(
            f"the executor on {host} does not share {folder} with the driver: {reason}",
            "set tables_dir and state_dir to folders that all machines have at the same path and may write, or "
            "tables_dir to a store for which all have credentials, or spark.master to local[*]",
        )


def _difference(file: Location, token: str, visible: float) -> str:
    """The reason why the file of an executor is not what the driver sees; empty if it is."""
    until = time.monotonic() + visible
    while True:
        try:
            if file.read_bytes() == token.encode():
                return ""
            reason = "the driver reads something else than the executor wrote"
        except OSError as error:
            reason = f"the driver does not see the executor's file ({error.strerror})"
        if time.monotonic() > until:
            return reason
        time.sleep(0.1)


def _task(asked: Sequence[tuple[str, Options]], visible: float) -> Task:
    """What runs on executors: a function within one is sent as code, so it needs nothing but the standard library.

    For a store it needs the driver's archive too; an executor without that is refused anyway.
    """
    packages = (*_SAME, *NEEDED)

    def prove(rows: Iterable[object]) -> Iterator[Answer]:
        import importlib.util
        import os
        import platform
        import socket
        import time
        import uuid
        from importlib import metadata

        java = "".join(str(row[0]) for row in rows)  # type: ignore[index]
        clock = time.time()
        versions = {}
        for name in packages:
            if importlib.util.find_spec(name) is not None:
                try:
                    versions[name] = metadata.version(name.replace("_", "-"))
                except metadata.PackageNotFoundError:  # Spark's own archive of pyspark
                    versions[name] = str(getattr(importlib.import_module(name), "__version__", ""))
        code = importlib.util.find_spec("streaming_jobs")
        files = []
        until = time.monotonic() + visible
        for path, options in asked:
            written, reason = f"{path}-{uuid.uuid4().hex}", "none"
            while reason:
                try:
                    if "://" in path:
                        from streaming_jobs.storage.locations import StorePath

                        StorePath(written, options).write_bytes(StorePath(path, options).read_bytes())
                        reason = ""
                        break
                    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - nothing but the standard library
                        text = file.read()
                    with open(written, "w", encoding="utf-8") as file:  # noqa: PTH123
                        file.write(text)
                    reason = ""
                except Exception as error:  # noqa: BLE001 - it is the answer, whatever it is
                    reason = f"{path}: {getattr(error, 'strerror', None) or error}"
                    if time.monotonic() > until:
                        break
                    time.sleep(0.1)
            files.append((written, reason))
        answer: Answer = {
            "host": socket.gethostname(),
            "folder": os.getcwd(),  # noqa: PTH109
            "python": ".".join(platform.python_version_tuple()[:2]),
            "versions": versions,
            "java": java,
            "clock": clock,
            "code": str(code.origin) if code is not None else "",
            "files": files,
        }
        return iter([answer])

    return prove


# The cores
#
# Executors come and go. Reading tasks follow them: the driver notes the number in a file, and a query's planner, a
# process on the driver's machine, reads it for each large batch (`BatchLimits`). The partitions of state cannot follow:
# a stream keeps those of its first start.

_CORES = "cores"
SETTLED = 2.0
"""Seconds without another executor, after which all that are to come at the start are taken to be there."""
_SETTLING = 20.0


def cores_file(settings: Settings) -> Path:
    """The file with the number of cores of this process's session."""
    return scratch(settings.home, "spark").folder / _CORES


def settled_cores(executors: Executors, still: float = SETTLED, at_most: float = _SETTLING) -> int:
    """The number of cores, once no executor has come for a while."""
    cores, began = executors.cores(), time.monotonic()
    since = began
    while (now := time.monotonic()) - since < still and now - began < at_most:
        time.sleep(min(still, 0.1))
        if (there := executors.cores()) != cores:
            cores, since = there, time.monotonic()
    return cores


# The watch


@dataclass
class ExecutorWatch:
    """Tells when a session's cluster is gone, and notes its cores; asks it every two seconds at most."""

    settings: Settings
    executors: Executors
    clock: Callable[[], float] = time.monotonic
    _asked: float = field(default=float("-inf"), init=False)
    _seen: float = field(init=False)
    """When there was an executor."""
    _cores: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._seen = self.clock()
        self._note_cores()

    def failure(self) -> TransientError | None:
        """The error of an application that has ended, or has had no executor for a minute."""
        now = self.clock()
        if now - self._asked < _LOOK_EVERY:
            return None
        self._asked = now
        if self.executors.stopped():
            return TransientError(
                f"the Spark application has ended: {self.settings.spark.master} has removed it, or somebody has",
                "the session is started again; the log of the master says why",
            )
        if self.executors.count():
            self._seen = now
            self._note_cores()
        elif now - self._seen > WITHOUT_EXECUTORS:
            return _without_executors(self.settings, now - self._seen)
        return None

    def _note_cores(self) -> None:
        cores = self.executors.cores()
        if cores != self._cores:
            write_atomic(cores_file(self.settings), str(cores), durable=False)
            log.info("the cluster's cores", cores=cores)
            self._cores = cores
