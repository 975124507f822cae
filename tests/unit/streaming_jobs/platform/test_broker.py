"""The embedded broker's configuration, and the lines of its log that a failed start shows; tests/broker starts it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from streaming_jobs.errors import SetupError
from streaming_jobs.platform import ports
from streaming_jobs.platform.broker import Broker, Running, jvm_options, logging_properties, server_properties
from streaming_jobs.platform.java import as_properties
from streaming_jobs.storage.files import private_folder
from tests.conftest import SettingsFactory

PROPERTIES = server_properties(Path("/data"), 20001, 20002)


def test_it_has_one_node_on_the_loopback_which_may_register_again_soon_after_a_kill() -> None:
    # Its start takes two seconds on a free machine, and five are promised.
    session, heartbeat = (int(PROPERTIES[f"broker.{key}.ms"]) for key in ("session.timeout", "heartbeat.interval"))
    assert session <= 2000
    assert heartbeat * 2 < session
    assert PROPERTIES["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"
    assert PROPERTIES["advertised.listeners"] == "PLAINTEXT://127.0.0.1:20001"
    assert PROPERTIES["controller.quorum.voters"] == "1@127.0.0.1:20002"
    copies = [key for key in PROPERTIES if key.endswith(("replication.factor", "min.isr"))]
    assert len(copies) == 5
    assert {PROPERTIES[key] for key in copies} == {"1"}


def test_its_heap_is_as_set_and_its_log_is_bounded() -> None:
    options = jvm_options(96, Path("/home/log4j2.properties"), Path("/home/crash.log"), Path("/home/tmp"))
    assert {"-Xmx96m", "-XX:+ExitOnOutOfMemoryError", "-XX:ErrorFile=/home/crash.log"} <= set(options)
    assert "-Djava.io.tmpdir=/home/tmp" in options
    assert "-Dlog4j2.configurationFile=file:///home/log4j2.properties" in options
    lines = logging_properties(Path("/home/broker.log")).splitlines()
    assert "appender.file.type=RollingFile" in lines
    assert "appender.file.policies.size.size=5MB" in lines
    assert "appender.file.strategy.max=2" in lines


def test_any_path_and_any_value_survive_java_s_properties_files() -> None:
    text = as_properties({"log.dirs": "/home/Jürgen \U0001f4c1/a\\b"})
    assert text == "log.dirs=/home/J\\u00fcrgen \\ud83d\\udcc1/a\\\\b\n"
    assert as_properties({"spark.a b": " x\\y\nz=ü"}) == "spark.a\\ b=\\ x\\\\y\\nz=\\u00fc\n"


def test_a_free_port_is_below_those_that_clients_are_given_and_the_listener_of_a_taken_one_is_known() -> None:
    first = ports.free_port()
    assert ports.is_free(first)
    assert first < 32_768
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        assert not ports.is_free(port)
        assert "process" in ports.listener_name(port)
    assert ports.is_free(port)
    assert ports.listener_name(port) == "another program"


def test_a_failed_start_shows_lines_of_this_start_only(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = settings()
    log = private_folder(here.logs) / "broker.log"
    log.write_text("the disk was full twenty minutes ago\n")
    script = f"open({str(log)!r}, 'a').write('the port is still bound\\n')"

    def launch(self: Broker) -> Running:
        self._running = self._spawn([sys.executable, "-c", script], dict[str, str](), 9)
        self._wait_until_ready(self._running)
        raise AssertionError

    private_folder(here.broker_dir)
    monkeypatch.setattr(Broker, "_launch", launch)
    with pytest.raises(SetupError) as raised:
        Broker(here).start()
    assert "the port is still bound" in str(raised.value)
    assert "twenty minutes ago" not in str(raised.value)
