"""The options of the JVM, as text; tests/spark starts it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from streaming_jobs.platform.spark import _java_options, profile
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory


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
    assert "-Xms96m" in _java_options(settings(), "both")
    options = _java_options(settings({"spark.extra": {"spark.driver.extraJavaOptions": own}}), "both").split()
    assert [o for o in options if o.startswith(("-Xm", "-XX:M", "-XX:I"))] == [own]


def test_a_query_that_does_not_stop_holds_the_session_up_for_seconds_only(settings: SettingsFactory) -> None:
    assert profile(settings())["spark.sql.streaming.stopTimeout"] == "5s"
