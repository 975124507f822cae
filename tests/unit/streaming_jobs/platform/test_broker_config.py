"""The configuration of the embedded broker; tests/broker starts it."""

from __future__ import annotations

import socket
from pathlib import Path

from streaming_jobs.platform import ports
from streaming_jobs.platform.broker import jvm_options, logging_properties, server_properties
from streaming_jobs.platform.java import as_properties

PROPERTIES = server_properties(Path("/data"), 20001, 20002)


def test_it_may_register_again_soon_after_a_kill() -> None:
    # Its start takes two seconds on a free machine, and five are promised.
    session, heartbeat = (int(PROPERTIES[f"broker.{key}.ms"]) for key in ("session.timeout", "heartbeat.interval"))
    assert session <= 2000
    assert heartbeat * 2 < session


def test_each_listener_is_on_the_loopback() -> None:
    assert PROPERTIES["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"
    assert PROPERTIES["advertised.listeners"] == "PLAINTEXT://127.0.0.1:20001"
    assert PROPERTIES["controller.quorum.voters"] == "1@127.0.0.1:20002"


def test_one_node_is_enough_for_every_internal_topic() -> None:
    copies = [key for key in PROPERTIES if key.endswith(("replication.factor", "min.isr"))]
    assert len(copies) == 5
    assert {PROPERTIES[key] for key in copies} == {"1"}


def test_the_heap_is_as_set_and_a_full_one_ends_the_broker() -> None:
    options = jvm_options(96, Path("/home/log4j2.properties"), Path("/home/crash.log"), Path("/home/tmp"))
    assert {"-Xmx96m", "-XX:+ExitOnOutOfMemoryError", "-XX:ErrorFile=/home/crash.log"} <= set(options)
    assert "-Djava.io.tmpdir=/home/tmp" in options
    assert "-Dlog4j2.configurationFile=file:///home/log4j2.properties" in options


def test_its_log_is_bounded() -> None:
    lines = logging_properties(Path("/home/broker.log")).splitlines()
    assert "appender.file.type=RollingFile" in lines
    assert "appender.file.policies.size.size=5MB" in lines
    assert "appender.file.strategy.max=2" in lines


def test_a_path_of_any_letters_survives_java_s_properties_files() -> None:
    text = as_properties({"log.dirs": "/home/Jürgen \U0001f4c1/a\\b"})
    assert text == "log.dirs=/home/J\\u00fcrgen \\ud83d\\udcc1/a\\\\b\n"


def test_a_free_port_is_free_and_below_those_that_clients_are_given() -> None:
    first = ports.free_port()
    assert ports.is_free(first)
    assert first < 32_768


def test_a_taken_port_is_not_free_and_its_listener_is_known() -> None:
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        assert not ports.is_free(port)
        assert "process" in ports.listener_name(port)
    assert ports.is_free(port)
    assert ports.listener_name(port) == "another program"
