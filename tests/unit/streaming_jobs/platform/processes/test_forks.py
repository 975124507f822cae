"""The fork server and its clients, as Spark uses them, without Spark."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from streaming_jobs.platform.processes import acknowledgements, failing_row, forks
from streaming_jobs.platform.processes.fork_client import address
from streaming_jobs.platform.processes.forks import ForkServer

pytestmark = pytest.mark.slow

FAILED = "Python is started without the fork server"
PROGRAM = """
import os, sys, time
if sys.argv[1] == "say":
    print(__name__, sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ["ONLY"], len(os.environ["LONG"]))
    print("an error", file=sys.stderr)
if sys.argv[1] == "path":
    print([entry for entry in sys.path if entry.endswith(".jar")], "pyarrow" in sys.modules, "pandas" in sys.modules)
if sys.argv[1] == "worker":
    from pyspark import worker
    print(worker.main.__module__, worker.read_udfs.__module__)
if sys.argv[1] == "zone":
    print(time.tzname[0])
if sys.argv[1] == "wait":
    print("waits", flush=True)
    time.sleep(60)
if sys.argv[1] == "deaf":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("waits", flush=True)
    time.sleep(60)
sys.exit(int(sys.argv[2]))
"""
Client = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A path that is longer than that of a socket may be, with characters that a shell would take apart."""
    made = tmp_path / "it's a $HOME" / ("long" * 30)
    made.mkdir(parents=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    return made


def await_answer(folder: Path) -> None:
    """Wait until the server has imported: on a busy machine, that takes longer than a client waits."""
    with socket.socket(socket.AF_UNIX) as empty, suppress(ConnectionError):
        empty.settimeout(60)
        descriptor, path = address(str(folder))
        try:
            empty.connect(path)
        finally:
            os.close(descriptor)
        empty.shutdown(socket.SHUT_WR)
        assert empty.recv(1) == b"", "nothing was asked"


@contextmanager
def served(folder: Path, **environment: str) -> Iterator[ForkServer]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        server = forks.start(folder)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    assert server is not None
    try:
        await_answer(folder)
        yield server
    finally:
        server.close()
    assert server.process.returncode is not None


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    with served(folder) as started:
        yield started


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[Client]:
    started = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        ours = {name: value for name, value in os.environ.items() if name.startswith(("LD_", "PYTHON"))}
        variables = {
            **ours,
            "PATH": os.environ["PATH"],
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            "ONLY": "its own",
            "PYTHONPATH": str(tmp_path),
            "LONG": "é" * 50_000,
        }
        started.append(
            subprocess.Popen(
                [folder / "python", "-m", "program", *arguments],
                env={**variables, **environment},
                cwd=tmp_path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def forked(server: ForkServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def gone(process: psutil.Process) -> bool:
    deadline = time.monotonic() + 30
    try:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended between two of these looks
        return True


def test_a_forked_process_has_what_its_client_has_and_ends_it(
    server: ForkServer, client: Client, tmp_path: Path
) -> None:
    output, errors = (process := client("say", "3")).communicate("from a pipe", timeout=30)
    assert output == f"__main__ ['say', '3'] from a pipe {tmp_path} its own 50000\n"
    assert errors == "an error\n"
    assert process.returncode == 3


@pytest.mark.parametrize("killed", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_and_its_client_end_together(server: ForkServer, client: Client, killed: signal.Signals) -> None:
    standing = client("wait", "0")
    assert standing.stdout is not None and standing.stdout.readline() == "waits\n"
    (process,) = forked(server)
    assert " ".join(process.cmdline()).split() == ["python", "-m", "program", "wait", "0"]
    standing.send_signal(killed)
    assert gone(process)
    standing = client("wait", "0")
    assert standing.stdout is not None and standing.stdout.readline() == "waits\n"
    (process,) = forked(server)
    process.send_signal(killed)
    assert standing.wait(10) == 128 + killed


def test_a_server_that_ends_ends_what_it_has_forked(folder: Path, client: Client) -> None:
    with served(folder) as server:
        waiting = [client("wait", "0"), client("deaf", "0")]
        for each in waiting:
            assert each.stdout is not None and each.stdout.readline() == "waits\n"
        processes = forked(server)
        assert len(processes) == 2
    assert all(gone(process) for process in processes)
    assert sorted(each.wait(10) for each in waiting) == [128 + signal.SIGKILL, 128 + signal.SIGTERM]


def test_after_the_server_was_killed_processes_run_on_and_clients_start_their_own(
    server: ForkServer, client: Client
) -> None:
    standing = client("wait", "0")
    assert standing.stdout is not None and standing.stdout.readline() == "waits\n"
    (process,) = forked(server)
    server.process.kill()
    server.process.wait(10)
    output, errors = client("say", "0").communicate("x", timeout=30)
    assert "['say', '0'] x" in output and FAILED in errors
    assert standing.poll() is None and process.is_running()
    process.kill()
    assert standing.wait(10) == 1


def test_a_client_that_asks_for_nothing_disturbs_nobody(server: ForkServer, client: Client, folder: Path) -> None:
    client("say", "0").communicate("x", timeout=30)
    for request in (b"", (9).to_bytes(4) + b"[1, 2, 3]", (1).to_bytes(4) + b"x"):
        with socket.socket(socket.AF_UNIX) as strange:
            descriptor, path = address(str(folder))
            strange.connect(path)
            os.close(descriptor)
            strange.sendall(request)
    assert FAILED not in client("say", "5").communicate("x", timeout=30)[1]
    assert not forked(server)


@pytest.mark.parametrize(("name", "value"), [("PYTHONWARNINGS", "error"), ("LD_PRELOAD", ""), ("PYTHONHASHSEED", "7")])
def test_what_counts_only_when_python_starts_is_not_forked(
    server: ForkServer, client: Client, name: str, value: str
) -> None:
    output, errors = client("say", "0", **{name: value}).communicate("x", timeout=30)
    assert "['say', '0']" in output and FAILED in errors


def test_a_client_that_has_not_waited_gets_no_process(server: ForkServer, client: Client, folder: Path) -> None:
    client("say", "0").communicate("x", timeout=30)
    server.process.send_signal(signal.SIGSTOP)
    waiting = client("wait", "0")
    assert waiting.stdout is not None and waiting.stdout.readline() == "waits\n", "it has helped itself"
    server.process.send_signal(signal.SIGCONT)
    assert FAILED not in client("say", "0").communicate("x", timeout=30)[1]
    assert not forked(server)


def test_forked_workers_acknowledge_tasks_at_once_and_name_rows(server: ForkServer, client: Client) -> None:
    output, _ = client("worker", "0").communicate("x", timeout=60)
    assert output == f"{acknowledgements.__name__} {failing_row.__name__}\n"


def test_a_time_zone_of_the_client_is_applied(server: ForkServer, client: Client) -> None:
    assert FAILED not in client("zone", "0", TZ="Asia/Tokyo").communicate("x", timeout=30)[1]
    assert client("zone", "0", TZ="Asia/Tokyo").communicate("x", timeout=30)[0] == "JST\n"


def test_no_process_looks_for_modules_in_the_jar_of_spark(server: ForkServer, client: Client, tmp_path: Path) -> None:
    started = client("path", "0", PYTHONPATH=f"{tmp_path}:/jars/spark-core_2.13-4.2.0.jar:/jars/with-python.jar")
    output, _ = started.communicate(timeout=60)
    assert (started.returncode, output) == (0, "['/jars/with-python.jar'] True False\n"), (
        "40 ms for each new worker, and pandas when it is used"
    )


@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "JE_ARROW_MALLOC_CONF"])
def test_it_has_one_thread_whatever_the_user_has_set(folder: Path, client: Client, variable: str) -> None:
    with served(folder, **{variable: "background_thread:true" if variable.startswith("JE") else "4"}) as server:
        assert FAILED not in client("say", "0").communicate("x", timeout=30)[1]
        assert psutil.Process(server.process.pid).num_threads() == 1


def test_with_a_thread_of_somebody_else_there_is_no_server(folder: Path, client: Client, tmp_path: Path) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(thread)
    with served(folder, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}") as server:
        output, errors = client("say", "0").communicate("x", timeout=30)
        assert "['say', '0']" in output and FAILED in errors
        assert server.process.wait(10) == 1


def test_where_no_program_may_be_started_there_is_no_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (folder / "python", os.X_OK))
    assert forks.start(folder) is None


def test_another_user_cannot_reach_the_server(server: ForkServer, folder: Path) -> None:
    assert (folder / "python").stat().st_mode & 0o777 == 0o700
