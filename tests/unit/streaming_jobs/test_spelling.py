"""No name can be misspelt in silence: an error follows at once, with the name that was probably meant.

And a user's folder with the name of one of our packages is reported, before anything is imported from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from orchestration.cli.options import Invocation
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.formats import Json
from streaming_jobs.platform import entry
from streaming_jobs.settings import load
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream, stream
from streaming_jobs.text.spelling import counted, instead, nearest
from tests.support import ROOT

PAYMENT = StructType([StructField("payment_id", StringType()), StructField("paid_at", LongType())])
PAYMENTS = KafkaTopic("payments", Json(PAYMENT))


def function(payments: object) -> object:
    return payments


def table(**options: Any) -> Callable[[], DeltaTable]:
    return lambda: DeltaTable("payments", **options)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one stream, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_flows.py").write_text(
        "from streaming_jobs import DeltaTable, Json, KafkaTopic, stream\n"
        "from pyspark.sql.types import StringType, StructField, StructType\n"
        "ORDERS = KafkaTopic('orders', Json(StructType([StructField('id', StringType())])))\n"
        "@stream(source=ORDERS, sink=DeltaTable('orders'))\n"
        "def airport_hours(orders):\n"
        "    return orders\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("declare", "hint"),
    [
        (table(keys="payment_id"), "keys=['payment_id']"),
        (table(keys=["payment_id"], order_by="paid_at"), "order_by=['paid_at']"),
        (table(partition_by="day"), "partition_by=['day']"),
        (table(owners="team:pay"), "owners=['team:pay']"),
        (table(keys=[1]), "keys=['first', 'second']"),
        (table(schema=PAYMENT, keys=["payment_id"], order_by=["payed_at"]), "did you mean 'paid_at'?"),
        (table(schema=PAYMENT, keys=["paymentid"]), "did you mean 'payment_id'?"),
        (table(schema=PAYMENT, partition_by=["nope"]), "there are: payment_id, paid_at"),
        (lambda: KafkaTopic("payments", Json(PAYMENT), event_time="payd_at", lateness="1 hour"), "'paid_at'"),
        (lambda: KafkaTopic("payments", Json(PAYMENT), tombstones="kept"), "did you mean 'keep'?"),  # type: ignore[arg-type]
        (lambda: KafkaTopic("payments", Json(PAYMENT), owners="me"), "owners=['me']"),
        (
            lambda: Stream("s", function, {"payments": "payments"}, {"t": DeltaTable("t")}),
            "KafkaTopic('payments', ...)",
        ),
        (lambda: Stream("s", function, {"payments": PAYMENTS}, {"t": "t"}), "DeltaTable('t', ...)"),  # type: ignore[dict-item]
        (lambda: stream(source=PAYMENTS, sink=DeltaTable("t"), owners="me")(function), "owners=['me']"),
    ],
)
def test_a_declaration_says_what_was_probably_meant(declare: Callable[[], object], hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        declare()
    assert hint in caught.value.next_step


@pytest.mark.parametrize(
    ("flags", "error", "hint"),
    [
        ({"stream.max_restart": "3"}, "stream.max_restart (flag): no such setting", "'stream.max_restarts'"),
        ({"streem.max_restarts": "3"}, "streem (flag): no such setting", "'stream'"),
        ({"streams.airport_hours.tigger": "continuous"}, "no such setting", "'streams.airport_hours.trigger'"),
        ({"stream.trigger": "continous"}, "'continous' is not a trigger; did you mean 'continuous'?", ""),
        ({"stream.trigger": "every 10 parsecs"}, "'10 parsecs' is not a duration", ""),
        ({"stream.start": "earlest"}, "'earlest' is not a start; write earliest, latest, or a time with zone", ""),
        ({"stream.start": "2026-01-01T00:00:00"}, "is not a start", ""),
        ({"streams.airport_hours.start": "erliest"}, "is not a start", ""),
    ],
)
def test_a_setting_says_what_was_probably_meant(flags: dict[str, Any], error: str, hint: str) -> None:
    with pytest.raises(RecourseError) as caught:
        load(flags)
    assert error in caught.value.found and hint in caught.value.next_step


def test_a_misspelt_variable_is_told_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOURSE_KAFAK__BOOTSTRAP_SERVERS", "host:9092")
    with pytest.raises(RecourseError, match="did you mean 'RECOURSE_KAFKA__BOOTSTRAP_SERVERS'"):
        load()


def test_settings_for_a_stream_that_is_not_declared_are_refused_by_every_command_that_reads_streams(
    project: Path,
) -> None:
    (project / "recourse.toml").write_text('flows = ["shop_flows"]\n[streams.airport_hour]\nmax_restarts = 1\n')
    with pytest.raises(UsageError) as caught:
        _ = Invocation().topology
    assert "stream 'airport_hour'" in caught.value.found and "'airport_hours'" in caught.value.next_step
    (project / "recourse.toml").write_text('flows = ["shop_flows"]\n[streams.airport_hours]\nmax_restarts = 1\n')
    assert list(Invocation().topology.streams) == ["airport_hours"]


def test_a_stream_or_a_sink_that_is_not_there_is_told_with_the_nearest_one_if_it_is_near() -> None:
    with pytest.raises(UsageError) as caught:
        Topology.load(["shop_flows"])["airport_houres"]
    assert caught.value.next_step.startswith("did you mean 'airport_hours'?")
    declared = Stream("s", lambda payments: {"evnes": payments}, {"payments": PAYMENTS}, {"evens": DeltaTable("evens")})
    with pytest.raises(UsageError, match="did you mean 'evens'"):
        declared.outputs(payments=object())  # type: ignore[arg-type]
    assert nearest("Trigger", ["trigger", "start"]) == "trigger"
    assert nearest("zzz", ["trigger", "start"]) is None
    assert instead("zzz", ["trigger", "start"]) == "there are: trigger, start"
    assert instead("zzz", []) == "there are none"
    assert [counted(n, "row") for n in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(n, "row", "differs", "differ") for n in (1, 2)] == ["1 row differs", "2 rows differ"]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("DeltaTable('orders', partion_by=['day'])", "did you mean 'partition_by'?"),
        ("KafkaTopic('orders', value=None, eventtime='t')", "did you mean 'event_time'?"),
        ("stream(sorce=None, sink=None)", "did you mean 'source'?"),
    ],
)
def test_an_argument_that_no_declaration_has_is_told_with_the_nearest_one(project: Path, line: str, hint: str) -> None:
    name = f"flows_{abs(hash(line))}"
    (project / f"{name}.py").write_text(f"from streaming_jobs import DeltaTable, KafkaTopic, stream\n{line}\n")
    with pytest.raises(UsageError) as caught:
        Topology.load([name])
    assert hint in caught.value.next_step


def test_a_folder_without_flows_says_whose_streams_are_shown(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "flights_clean" in Invocation().topology.streams
    printed = capsys.readouterr()
    assert printed.out == "" and f"looked for from {project} upwards, names flows" in printed.err
    (project / "recourse.toml").write_text('flows = ["shop_flows"]\n')
    _ = Invocation().topology
    assert capsys.readouterr().err == ""


RECOURSE = "import sys; from streaming_jobs.platform.entry import main; sys.argv[0] = 'recourse'; sys.exit(main())"


def run(folder: Path, path: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param("orchestration", ".", id="on PYTHONPATH"),
        pytest.param("quality", "/nowhere", id="in the working directory"),
        pytest.param("quality", ".", marks=pytest.mark.long),
        pytest.param("orchestration", "/nowhere", marks=pytest.mark.long),
    ],
)
def test_a_package_of_the_users_is_named_and_what_to_do(tmp_path: Path, name: str, where: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    session = run(tmp_path, where, "-m", "streaming_jobs.session", "--streams", "nothing")
    for process in (run(tmp_path, where, "-c", RECOURSE, "streams", "list"), session):
        assert process.returncode == 2
        assert f"{tmp_path / name} is found as the package '{name}'" in process.stderr
        assert f"rename your {name}" in process.stderr and "Traceback" not in process.stderr


def test_a_folder_without_code_and_another_name_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality" / "rules.sql").touch()
    (tmp_path / "flows.py").touch()
    assert run(tmp_path, ".", "-c", RECOURSE, "--help").returncode == 0


def test_a_module_of_that_name_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry.check()
    (tmp_path / "reprocessing.py").touch()
    with pytest.raises(UsageError, match=r"reprocessing.py is found as the package 'reprocessing'"):
        entry.check()
