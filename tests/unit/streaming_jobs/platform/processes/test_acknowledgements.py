"""A worker acknowledges a task at once: the JVM sends its command, and its rows after that."""

from __future__ import annotations

import os
import socket
import threading
import time
from io import BufferedReader, BufferedWriter
from statistics import median

import pytest
from pyspark import worker

from streaming_jobs.platform.processes.acknowledgements import acknowledge_tasks


def test_a_task_in_pieces_is_read_without_waiting_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(infile: BufferedReader, outfile: BufferedWriter) -> None:
        outfile.write(infile.readline() + infile.readline())

    def work(connected: socket.socket) -> None:
        for _ in range(20):  # as PySpark's daemon does
            reads, writes = os.dup(connected.fileno()), os.dup(connected.fileno())
            with os.fdopen(reads, "rb") as infile, os.fdopen(writes, "wb") as outfile:
                worker.main(infile, outfile)

    monkeypatch.setattr(worker, "main", main)
    acknowledge_tasks()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as jvm:
        jvm.settimeout(30)
        connected, _ = server.accept()
        thread = threading.Thread(target=work, args=(connected,))
        thread.start()
        answers, took = jvm.makefile("rb"), []
        for _ in range(20):
            began = time.monotonic()
            jvm.sendall(b"command\n")
            jvm.sendall(b"rows\n")
            assert answers.readline() + answers.readline() == b"command\nrows\n"
            took.append(time.monotonic() - began)
        thread.join(30)
        assert not thread.is_alive()
        connected.close()
    assert median(took) < 0.02, "Linux acknowledges after 40 ms by itself"


def test_a_worker_with_a_socket_of_another_kind_works_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(worker, "main", lambda infile, _: asked.append(infile.readline()))
    acknowledge_tasks()
    jvm, connected = socket.socketpair()
    with jvm, connected, connected.makefile("rb") as infile, connected.makefile("wb") as outfile:
        jvm.sendall(b"command\n")
        worker.main(infile, outfile)
    assert asked == [b"command\n"]


def test_a_default_timeout_that_a_function_has_set_does_not_hold_for_the_next_tasks_of_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks: list[bool] = []
    monkeypatch.setattr(worker, "main", lambda infile, _: blocks.append(os.get_blocking(infile.fileno())))
    acknowledge_tasks()
    jvm, connected = socket.socketpair()
    with jvm, connected, connected.makefile("rb") as infile, connected.makefile("wb") as outfile:
        socket.setdefaulttimeout(5)
        try:
            worker.main(infile, outfile)
        finally:
            socket.setdefaulttimeout(None)
    assert blocks == [True]
