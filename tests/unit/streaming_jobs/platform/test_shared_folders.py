"""Executors that do not share the folders of tables and state with the driver are refused; functions stand for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.cloudpickle import dumps, loads

from streaming_jobs.errors import PermanentError
from streaming_jobs.platform.cluster import Answer, Task, check, in_this_process
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory


@dataclass
class Machines:
    """One executor on each; `arriving` tells how many are there at each run, `on` puts a task on its machine."""

    hosts: Sequence[str]
    on: Callable[[str], Callable[[], object]] = lambda _: contextmanager(lambda: iter([None]))
    arriving: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def count(self) -> int:
        return len(self.hosts)

    def run(self, task: Task) -> list[Answer]:
        there = self.hosts[: self.arriving.pop(0) if self.arriving else None]
        self.asked += there
        return [answer for host in there for answer in self._answers(host, task)]

    def _answers(self, host: str, task: Task) -> Iterator[Answer]:
        with self.on(host)():  # type: ignore[attr-defined]
            for answer in task([]):
                yield {**answer, "host": host}


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


def test_executors_that_share_both_folders_leave_nothing_there(settings: SettingsFactory) -> None:
    machines = Machines(["a", "b"])
    check(settings(), machines, archive="", visible=0)
    assert machines.asked == ["a", "b"] and not left(settings())


@pytest.mark.parametrize("name", ["tables", "state"])
def test_a_folder_that_one_executor_does_not_have_is_named_with_its_host(settings: SettingsFactory, name: str) -> None:
    folder: Path = getattr(settings(), name)
    with pytest.raises(
        PermanentError, match=f"executor on b does not share the folder {folder} .*No such file"
    ) as told:
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


def test_an_executor_that_is_never_free_is_not_waited_for(settings: SettingsFactory) -> None:
    machines = Machines(["a", "b"], arriving=[1] * 100)
    check(settings(), machines, archive="", visible=0)
    assert set(machines.asked) == {"a"}


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
