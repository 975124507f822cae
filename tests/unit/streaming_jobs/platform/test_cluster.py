"""A cluster's executors prove themselves before the first batch, and are watched; functions stand for machines."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from pyspark.cloudpickle import dumps, loads

from streaming_jobs.errors import ConfigurationError, PermanentError, SetupError, TransientError
from streaming_jobs.platform.cluster import (
    NEEDED,
    Answer,
    ExecutorWatch,
    Task,
    check,
    cores_file,
    settled_cores,
    write_archive,
)
from streaming_jobs.platform.spark import launch, profile
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import in_this_process
from streaming_jobs.sources.kafka import TopicReading
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.sources.record_blocks import RecordBlocks
from streaming_jobs.storage.locations import files_below
from tests.conftest import SettingsFactory
from tests.support.store_server import Fault, StoreServer
from tests.support.things import THINGS


@dataclass
class Machines:
    """One executor on each; `arriving` tells how many are there at each run, `on` puts a task on its machine."""

    hosts: Sequence[str]
    on: Callable[[str], Callable[[], object]] = lambda _: contextmanager(lambda: iter([None]))
    arriving: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    said: dict[str, object] = field(default_factory=dict)
    """What an executor says otherwise than this Python."""
    ended: bool = False
    having: list[int] = field(default_factory=list)
    """The cores at each look, if they are not two on each machine."""

    def count(self) -> int:
        return len(self.hosts)

    def cores(self) -> int:
        return self.having.pop(0) if len(self.having) > 1 else (self.having or [2 * len(self.hosts)])[0]

    def stopped(self) -> bool:
        return self.ended

    def java(self) -> str:
        return "17"

    def run(self, task: Task) -> list[Answer]:
        there = self.hosts[: self.arriving.pop(0) if self.arriving else None]
        self.asked += there
        return [answer for host in there for answer in self._answers(host, task)]

    def _answers(self, host: str, task: Task) -> Iterator[Answer]:
        with self.on(host)():  # type: ignore[attr-defined]
            for answer in task([("17",)]):
                yield {**answer, **self.said, "host": host}  # type: ignore[typeddict-item]


def hidden(folder: Path, host: str) -> Callable[[str], Callable[[], object]]:
    """The machine `host` has no such folder."""

    @contextmanager
    def without() -> Iterator[None]:
        away = folder.rename(folder.with_name("away"))
        yield
        away.rename(folder)

    @contextmanager
    def unchanged() -> Iterator[None]:
        yield

    return lambda asked: without if asked == host else unchanged


def left(settings: Settings) -> list[Path]:
    return [file for folder in (settings.tables, settings.state) for file in folder.iterdir()]


def test_executors_that_share_both_folders_leave_nothing_there_and_one_that_is_never_free_is_not_waited_for(
    settings: SettingsFactory,
) -> None:
    machines = Machines(["a", "b"])
    check(settings(), machines, archive="", visible=0)
    assert machines.asked == ["a", "b"] and not left(settings())
    machines = Machines(["a", "b"], arriving=[1] * 100)
    check(settings(), machines, archive="", visible=0)
    assert set(machines.asked) == {"a"}


@pytest.mark.parametrize("name", ["tables", "state"])
def test_a_folder_that_one_executor_does_not_have_is_named_with_its_host(settings: SettingsFactory, name: str) -> None:
    folder: Path = getattr(settings(), name)
    with pytest.raises(PermanentError, match=f"executor on b does not share {folder} .*No such file") as told:
        check(settings(), Machines(["a", "b"], hidden(folder, "b")), archive="", visible=0)
    assert "tables_dir and state_dir" in told.value.next_step and not left(settings())


def test_a_folder_of_which_an_executor_has_only_a_copy_is_refused(settings: SettingsFactory) -> None:
    folder = settings().tables

    @contextmanager
    def copied() -> Iterator[None]:
        yield
        for file in folder.glob(".probe-*-*"):
            file.unlink()

    with pytest.raises(PermanentError, match=f"{folder} .*the driver does not see the executor's file"):
        check(settings(), Machines(["a"], lambda _: copied), archive="", visible=0)


def test_executors_that_come_one_after_the_other_are_all_asked(settings: SettingsFactory) -> None:
    machines = Machines(["a", "b"], hidden(settings().state, "b"), arriving=[1, 1, 2])
    with pytest.raises(PermanentError, match="executor on b "):
        check(settings(), machines, archive="", visible=0)
    assert machines.asked == ["a", "a", "a", "b"]


ELSEWHERE = """
import sys

sys.modules["streaming_jobs"] = None
from pyspark.cloudpickle import loads, dumps
sys.stdout.buffer.write(dumps([*loads(sys.stdin.buffer.read())([])]))
"""


def test_the_task_runs_where_this_project_is_not_installed(settings: SettingsFactory) -> None:
    class Elsewhere(Machines):
        def run(self, task: Task) -> list[Answer]:
            command = [sys.executable, "-c", ELSEWHERE]
            ran = subprocess.run(command, input=dumps(task), stdout=subprocess.PIPE, check=True)
            answers: list[Answer] = loads(ran.stdout)
            return answers

    check(settings(), Elsewhere(["a"]), archive="", visible=0)


@pytest.mark.parametrize(
    ("master", "alone"),
    [("local", True), ("local[*]", True), ("local[2,4]", True), ("local-cluster[2,1,512]", False), ("yarn", False)],
)
def test_a_local_master_has_no_other_executors(master: str, alone: bool) -> None:
    assert in_this_process(master) is alone


IMAGE = {"spark.kubernetes.container.image": "streams:1", "spark.kubernetes.namespace": "lake"}
K8S = {"spark.master": "k8s://https://10.0.0.1:6443"}


@pytest.mark.parametrize(
    ("places", "lacks"),
    [
        ({**K8S, "spark.driver_host": "driver"}, "spark.kubernetes.container.image"),
        ({**K8S, "spark.extra": IMAGE}, "driver_host is empty"),
        ({**K8S, "spark.driver_host": "driver", "spark.extra": IMAGE}, ""),
        ({"spark.master": "yarn"}, ""),
        ({"spark.master": "yarn", "spark.extra": {"spark.submit.deployMode": "cluster"}}, "deployMode is not client"),
        ({"spark.master": "mesos://there:5050"}, "not a master that is supported"),
        ({"spark.master": "k8s://"}, "not a master that is supported"),
    ],
)
def test_a_master_is_refused_with_what_it_lacks(
    settings: SettingsFactory, places: dict[str, object], lacks: str
) -> None:
    if lacks:
        with pytest.raises(ConfigurationError, match=lacks):
            settings(places)
        return
    properties = profile(settings(places))
    assert properties["spark.master"] == places["spark.master"]
    assert properties.get("spark.kubernetes.namespace") == (None if places["spark.master"] == "yarn" else "lake")


def test_yarn_needs_the_folder_of_hadoops_configuration(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SetupError, match="spark.master is yarn, and no folder") as told:
        launch(settings({"spark.master": "yarn"}))
    assert "HADOOP_CONF_DIR" in told.value.next_step


HERE = {"pyspark": metadata.version("pyspark"), **dict.fromkeys(NEEDED, "1")}


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        pytest.param({"python": "3.9"}, r"executor on a has Python 3\.9, the driver 3\.", id="another Python"),
        pytest.param(
            {"versions": {**HERE, "pyspark": "4.0.0"}}, r"has pyspark 4\.0\.0, the driver", id="another Spark"
        ),
        pytest.param({"versions": {"pyspark": HERE["pyspark"]}}, "has no pyarrow, confluent_kafka", id="no packages"),
        pytest.param(
            {"code": "/opt/streaming_jobs/__init__.py"}, "imports streaming_jobs from /opt", id="another copy"
        ),
        pytest.param({"code": ""}, "imports streaming_jobs from nowhere", id="no code"),
    ],
)
def test_an_executor_that_could_not_run_the_streams_is_refused_with_its_host(
    settings: SettingsFactory, said: dict[str, object], refusal: str
) -> None:
    with pytest.raises(PermanentError, match=refusal):
        check(settings(), Machines(["a"], said=said), visible=0)
    assert not left(settings())


@pytest.mark.parametrize(
    ("said", "ahead", "warnings"),
    [
        ({}, None, []),
        ({"java": "21"}, None, ["the executor on a has Java 21, the driver 17: give both one version"]),
        ({}, -3600, ["the clock of a is 36.. s behind the driver's"]),
        ({}, 3600, ["the clock of a is 3[56].. s ahead of the driver's"]),
    ],
)
def test_another_java_and_another_time_are_warnings(
    settings: SettingsFactory, said: dict[str, object], ahead: float | None, warnings: list[str]
) -> None:
    if ahead is not None:
        said = {"clock": time.time() + ahead}
    checked = check(settings(), Machines(["a"], said=said), archive="", visible=0)
    assert len(checked.warnings) == len(warnings)
    assert all(re.match(wanted, found) for wanted, found in zip(warnings, checked.warnings, strict=True))
    assert [answer["host"] for answer in checked.answers] == ["a"]


def test_a_cluster_that_gives_no_executor_is_tried_again_later(settings: SettingsFactory) -> None:
    with pytest.raises(TransientError, match=r"no executor for 0 s: spark://there:7077 gives the session none"):
        check(settings({"spark.master": "spark://there:7077"}), Machines([]), patience=0)


def test_an_application_that_has_ended_or_has_no_executor_for_a_minute_has_failed(settings: SettingsFactory) -> None:
    now, machines = [0.0], Machines(["a"])
    watch = ExecutorWatch(settings({"spark.master": "spark://there:7077"}), machines, lambda: now[0])
    assert watch.failure() is None
    machines.hosts = []
    for now[0] in (3.0, 59.0):
        assert watch.failure() is None
    now[0] = 62.0
    assert (gone := watch.failure()) is not None and "no executor for 62 s" in gone.found
    machines.hosts, now[0] = ["b"], 65.0
    assert watch.failure() is None
    machines.ended, now[0] = True, 66.0
    assert watch.failure() is None, "it asks every two seconds"
    now[0] = 68.0
    assert (gone := watch.failure()) is not None and "application has ended" in gone.found


def test_a_batch_is_read_by_the_cores_that_are_there_when_it_is_planned(settings: SettingsFactory) -> None:
    made = settings({"spark.master": "spark://there:7077"})
    limits = BatchLimits(1, 1, 1, 0, cores=cores_file(made))
    reading: TopicReading = TopicReading(
        "kafka-s-t", {}, limits=limits, workers=3, blocks=RecordBlocks(THINGS, "all"), client=made.home
    )
    planner: Any = SimpleNamespace(take=lambda *_: None, first={})
    ends = dict.fromkeys(range(100), 5)

    def tasks() -> int:
        return len(reading.split(planner, {}, ends)[0])

    assert tasks() == 3, "as when the query was built"
    now, machines = [0.0], Machines(["a"])
    watch = ExecutorWatch(made, machines, lambda: now[0])
    assert tasks() == 2
    machines.hosts, now[0] = ["a", "b", "c"], 3.0
    assert watch.failure() is None and tasks() == 6
    machines.hosts, now[0] = [], 6.0
    assert watch.failure() is None and tasks() == 6, "they may come back; two tasks would be too few"
    assert replace(limits, tasks=50).tasks_now() == 50


def test_cores_are_counted_once_no_executor_comes_any_more() -> None:
    assert settled_cores(Machines([], having=[2, 4, 4, 6]), still=0.3) == 6
    assert settled_cores(Machines([], having=[*range(99)]), still=0.3, at_most=0.5) < 9


def test_executors_import_what_is_sent_and_nothing_of_it_is_compiled_there(tmp_path: Path) -> None:
    package = tmp_path / "here" / "my_flows"
    (package / "nested").mkdir(parents=True)
    (package / "__init__.py").write_text("WORDS = 'sent'")
    (package / "nested" / "deep.py").write_text("DEPTH = 2")
    (package / "values.json").write_text("{}")
    (package / ".env").write_text("PASSWORD=hush")
    (package / "template.py").write_text("def {{ name }}():")
    (tmp_path / "here" / "single.py").write_text("ALONE = True")
    archive, script = tmp_path / "code.zip", "import my_flows.nested.deep as deep, my_flows, single; print(deep.DEPTH)"
    sys.path.insert(0, str(package.parent))
    try:
        write_archive(archive, ["my_flows.nested.deep", "single"])
        with pytest.raises(PermanentError, match="module sys is not in files"):
            write_archive(tmp_path / "other.zip", ["sys"])
    finally:
        sys.path.remove(str(package.parent))
    ran = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(archive)!r}); {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "2\n"
    names = ZipFile(archive).namelist()
    assert "my_flows/values.json" in names and "my_flows/.env" not in names
    assert [name for name in names if name.endswith(".py")] == ["my_flows/template.py"]


def test_executors_prove_that_they_reach_the_store_of_the_tables(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any], object_store: StoreServer
) -> None:
    stored = settings(tables_on_a_store)
    check(stored, Machines(["a", "b"]), archive="", visible=0)
    assert not list(files_below(stored.tables)) and not list(stored.state.iterdir())

    @contextmanager
    def without_rights() -> Iterator[None]:
        object_store.inject(Fault("denied", "GET", key="probe", times=100))
        yield
        object_store.clear()

    with pytest.raises(PermanentError, match=f"on a does not share {stored.tables} .*refuses access") as told:
        check(stored, Machines(["a"], lambda _: without_rights), archive="", visible=0)
    assert "a store for which all have credentials" in told.value.next_step


def test_executors_of_a_replay_prove_it_beside_the_tables_and_leave_nothing(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any], object_store: StoreServer
) -> None:
    stored = settings(tables_on_a_store)
    check(stored.with_tables(stored.tables / "*/staged-1"), Machines(["a"]), archive="", visible=0)
    assert not list(files_below(stored.tables))
    probes = [each.key for each in object_store.requests() if each.method == "PUT"]
    assert probes and all(f"/{stored.tables.name}/.probe-" in key and key.count("/") == 2 for key in probes)
