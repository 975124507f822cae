"""Adoptions and their undos, each in a process of its own that is killed before one of its writes.

`python -m tests.support.killed_adoption FOLDER undo|adopt [WRITE...]`: FOLDER/template has the home of
`test_adoption_kills.py`. A write is what the interpreter reports of a file below the home that is made, opened for
writing, renamed or removed (`sys.addaudithook`), or the commit to the table, which deltalake makes. One JSON line for
each write, or for those whose words end as one of WRITE: its words, and what is there after a process was killed before
it and another one has run. The first line is that of the process that nobody killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from streaming_jobs.inspection import adoption
from streaming_jobs.ledger.entry import app_id, epoch_id
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from tests.unit.streaming_jobs.inspection.test_adoption import TwoPartitions, fits, orders

COMMIT = "commit"
_CHANGES = {"os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0, "os.rename": 1, "os.link": 1}
"""Events, and which of their arguments is the path that changes."""


def act(home: Path, undo: bool) -> None:
    settings = Settings.load({"home": home / ".recourse"})
    if not undo:
        checkpoint = next(home.glob("job/checkpoint-*"))
        adoption.adopt(settings, orders, adoption.plan_adoption(settings, orders, checkpoint, TwoPartitions(), fits))
    elif stream_record.load(settings, "orders") is not None:
        adoption.undo(settings, orders, adoption.plan_undo(settings, orders))


def writes_of(home: Path, counted: Callable[[str], None]) -> None:
    """Have each write of this process below a folder announced before it is made."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == COMMIT:
            counted(COMMIT)
        elif event in _CHANGES or (event == "open" and _writes(arguments)):
            path = str(arguments[_CHANGES.get(event, 0)])
            in_tree = not path.startswith("/")  # `rmtree` names a file within its folder
            if in_tree or (path.startswith(str(home)) and not (event == "os.mkdir" and Path(path).is_dir())):
                counted(f"{event} {path if in_tree else os.path.relpath(path, home)}")

    def announced(commit: Callable[..., Any]) -> Callable[..., Any]:
        def make(*arguments: Any) -> Any:
            sys.audit(COMMIT)
            return commit(*arguments)

        return make

    for name in ("_take_over", "_give_back"):
        setattr(adoption, name, announced(getattr(adoption, name)))
    sys.addaudithook(hook)


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    return isinstance(path, str) and (any(c in (mode or "") for c in "wax+") or bool(flags & (os.O_WRONLY | os.O_RDWR)))


def in_a_process(home: Path, undo: bool, kill_before: int | None) -> list[str]:
    """Act in a child, which is killed before one of its writes; returns the writes that it came to."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        seen = 0

        def counted(what: str) -> None:
            nonlocal seen
            os.write(write, f"{what}\n".encode())
            if seen == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

        try:
            writes_of(home, counted)
            act(home, undo)
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            os.write(write, f"failed: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        writes = lines.read().splitlines()
    _, status = os.waitpid(child, 0)
    expected = 0 if kill_before is None else -signal.SIGKILL
    assert os.waitstatus_to_exitcode(status) == expected, writes
    return writes


def there(home: Path) -> dict[str, Any]:
    """All that an adoption writes and must not write; without times, and without the id of the new query."""
    settings = Settings.load({"home": home / ".recourse"})
    table = DeltaTable(str(settings.tables / "orders"))
    record = stream_record.load(settings, "orders")
    value = None if record is None else asdict(record)
    if value is not None:
        del value["tag"]
        for each in (*value["generations"], *value["accepted"]):
            for name in ("at", "opened_at"):
                each.pop(name, None)
    state = home / ".recourse" / "state" / "orders"
    carried = {str(p.relative_to(home)): p.read_bytes().hex() for p in files(state) if p.name != "metadata"}
    job = {str(p.relative_to(home)): p.read_bytes().hex() for p in files(home / "job")}
    return {
        "record": value,
        "carried": {name: text for name, text in carried.items() if "/g0001" in name},
        "others": sorted(name for name in carried if "/g0001" not in name and not name.endswith("~")),
        "job": job,
        "version": table.version(),
        "properties": table.metadata().configuration,
        "files": sorted(Path(each).name for each in table.file_uris()),
        "txns": [table.transaction_version(each) for each in (app_id("orders", "orders"), epoch_id("orders"))],
    }


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def main(folder: Path, what: str, *chosen: str) -> None:
    undo, template = what == "undo", folder / "template"

    def story(name: str, kill_before: int | None) -> list[str]:
        home = folder / name
        shutil.copytree(template, home)
        came = in_a_process(home, undo, kill_before)
        if kill_before is not None:
            in_a_process(home, undo, None)
        return came

    writes = story("whole", None)
    print(json.dumps({"write": "none", "there": json_of(folder / "whole")}))
    for number, write in enumerate(writes):
        if not chosen or write.endswith(chosen):
            killed_before = story(str(number), number)[-1]
            print(json.dumps({"write": killed_before, "there": json_of(folder / str(number))}))
            shutil.rmtree(folder / str(number))


def json_of(home: Path) -> dict[str, Any]:
    """`there` in a child: a process that has used deltalake cannot be forked."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        with os.fdopen(write, "w") as out:
            json.dump(there(home), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as text:
        value: dict[str, Any] = json.load(text)
    os.wait()
    return value


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
