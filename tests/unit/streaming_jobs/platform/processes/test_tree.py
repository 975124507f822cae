"""A child's tree includes processes that left its group; one that has ended but is not collected counts as ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from streaming_jobs.platform.processes.child import ChildCommand, ProcessTree
from tests.support.waiting import wait_for

STARTS_ONE_IN_A_GROUP_OF_ITS_OWN = """
import subprocess, time
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
time.sleep(60)
"""


def test_a_tree_holds_what_has_a_group_of_its_own_and_ends_it_when_its_parent_has_ended(tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = ChildCommand([sys.executable, "-c", STARTS_ONE_IN_A_GROUP_OF_ITS_OWN], dict(os.environ))
    with output.open("wb") as file:
        child = command.start(file)
    below = int(wait_for(output.read_text, "the process below"))
    tree = ProcessTree.of(child)
    assert [process.pid for process in tree.processes] == [child.pid, below]
    child.kill()
    left = tree.wait(0.0)
    assert [process.pid for process in left.processes] == [below]
    left.kill()
    assert left.wait(20.0) == ProcessTree()


def test_a_process_that_nobody_has_collected_yet_has_ended() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        tree = ProcessTree((psutil.Process(child.pid),))
        assert tree.wait(0.0) == tree
        child.kill()
        assert tree.wait(3600.0) == ProcessTree()


def test_a_child_that_has_ended_has_no_tree(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        child = ChildCommand(["/bin/true"], {}).start(file)
    assert child.wait(20.0) == 0
    child.process.pid = os.getpid()  # the system has given the pid to another process
    assert ProcessTree.of(child) == ProcessTree()
