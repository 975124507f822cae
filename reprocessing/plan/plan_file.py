"""Plans on disk: `<state>/recoveries/<plan>/plan.json`, and the folders of a plan's other files.

Reading a plan checks its fingerprint and refuses a file that was edited by hand. `about.json` beside a plan
names its streams, so that finding the plans of a stream does not require reading all plans in full.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan
from streaming_jobs.declare.names import checked_name
from streaming_jobs.errors import LeaseBusy, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state.records import json_bytes, record_bytes
from streaming_jobs.state.stream_folder import local_folder, state_files
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locations import Location, StorePath, remove_tree
from streaming_jobs.storage.locks import locked
from streaming_jobs.storage.object_files import AlreadyThere, ObjectFiles, ObjectHandle
from streaming_jobs.text import commands

_FORMAT = 2
_PLAN, _ABOUT = "plan.json", "about.json"
_HOUR = 3600.0
_ID = re.compile(r"[a-z][a-z0-9_]*-\d{4,}")


def folder(settings: Settings, plan: str) -> Path:
    """The folder of this machine for a plan's lock and scratch files; raises UsageError for a name that no plan has."""
    stream_of(plan)
    return local_folder(settings) / "recoveries" / plan


def replay_state(settings: Settings, plan: str) -> Location:
    """The state of a plan's replays."""
    stream_of(plan)
    return settings.state / "recoveries" / plan / "state"


def plan_object(settings: Settings, plan: str, name: str) -> ObjectHandle:
    """An object of a plan; raises UsageError for a name that no plan has."""
    stream_of(plan)
    return ObjectHandle(_plans(settings), f"{plan}/{name}")


def _plans(settings: Settings) -> ObjectFiles:
    return state_files(settings).below("recoveries")


def _ids(settings: Settings) -> list[str]:
    return [name for name in _plans(settings).folders() if _ID.fullmatch(name)]


def stream_of(plan: str) -> str:
    """The first stream of a plan, which its id begins with; raises UsageError for a name that no plan has."""
    if not _ID.fullmatch(plan):
        raise UsageError(f"'{plan}' is not the name of a plan", f"see `{commands.plans()}`")
    return plan.rpartition("-")[0]


@contextmanager
def only_operator(settings: Settings, plan: str) -> Iterator[None]:
    """Hold a plan; raises LeaseBusy if another process works on it."""
    busy = LeaseBusy(f"another process is working on plan {plan}", "wait until it has ended")
    with locked(private_folder(folder(settings, plan)) / "lock", 0, lambda: busy):
        yield


def staging_folder(settings: Settings, plan: StreamRecoveryPlan, part: str = "") -> Location:
    """The location of the staging tables of a plan's stream, or of a part of them.

    In folders they are beside the tables, on the same file system. On a store each is below the table that it is
    staged for, so that a publish moves no file.
    """
    tables = settings.tables
    if isinstance(tables, Path):
        return tables / "_staging" / plan.staging / part
    return StorePath(f"{tables}/*/_staged-{plan.staging}{part and f'-{part}'}", tables.options)


def compared_folder(settings: Settings, plan: StreamRecoveryPlan) -> Location:
    """The location of the tables that a comparison makes of pieces of the others, and of what its queries spill."""
    tables = settings.tables
    if isinstance(tables, Path):
        return staging_folder(settings, plan, "_compared")
    return tables / "_staging" / f"{plan.staging}-compared"  # not below one of the tables: it reads several


def next_id(settings: Settings, stream: str) -> str:
    """A name that no plan has yet, reserved by its first object, so that two planners never get the same."""
    checked_name("stream", stream)
    taken = [int(name.rpartition("-")[2]) for name in _ids(settings) if stream_of(name) == stream]
    number = max(taken, default=0) + 1
    while True:
        name = f"{stream}-{number:04d}"
        reserved = {"streams": [stream], "undoes": None, "id": uuid.uuid4().hex}
        with suppress(AlreadyThere):
            plan_object(settings, name, _ABOUT).create(json_bytes(reserved))
            return name
        number += 1


def save(settings: Settings, plan: RecoveryPlan) -> ObjectHandle:
    """Write the plan; it is durable when this returns."""
    # First, so that a plan never lacks it.
    plan_object(settings, plan.id, _ABOUT).put(json_bytes({"streams": list(plan.names), "undoes": plan.undoes}))
    handle = plan_object(settings, plan.id, _PLAN)
    handle.put(record_bytes(asdict(plan), _FORMAT))
    return handle


def load(settings: Settings, name: str) -> RecoveryPlan:
    """The plan of that name; raises UsageError if there is none or its file was changed by hand."""
    handle = plan_object(settings, name, _PLAN)
    if (found := handle.read()) is None:
        raise UsageError(f"there is no plan {name}", f"see `{commands.plans()}`")
    try:
        value = json.loads(found.data)
        if value.pop("format") != _FORMAT:
            raise UsageError(f"{handle} was written by another version", "use the version that wrote it, or plan anew")
        plan = msgspec.convert(value, RecoveryPlan, str_keys=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"plan {name} cannot be read: {error}", "make a new plan") from error
    if plan != sealed(plan) or plan.id != name:
        raise UsageError(f"plan {name} was changed by hand after it was made", "make a new plan")
    return plan


def names(settings: Settings) -> list[str]:
    """All plans, oldest first."""
    return _by_age(settings, _ids(settings))


def _by_age(settings: Settings, ids: Iterable[str]) -> list[str]:
    """Those of the names that have a plan, oldest first."""
    times = {name: found.at for name in ids if (found := plan_object(settings, name, _PLAN).read())}
    return sorted(times, key=lambda name: times[name])


def forget(settings: Settings, plan: str) -> None:
    """Remove plan.json, and with it the plan, durably. The plan's other files stay for now.

    A plan without its journal would look as if it was never applied, so plan.json is the first to go.
    """
    plan_object(settings, plan, _PLAN).delete()


def remove(settings: Settings, plan: str) -> None:
    """Remove what is left of a plan without plan.json: its objects, and its folder of this machine."""
    remove_tree(replay_state(settings, plan).parent)
    remove_tree(folder(settings, plan))


def unfinished(settings: Settings) -> list[str]:
    """Names without a plan that were reserved an hour ago: the making of the plan, or its removal, was killed."""
    old, without = time.time() - _HOUR, []
    for name in _ids(settings):
        if not plan_object(settings, name, _PLAN).exists():
            reserved = plan_object(settings, name, _ABOUT).read()
            if reserved is None or reserved.at < old:
                without.append(name)
    return without


def names_of(settings: Settings, stream: str) -> list[str]:
    """The plans with a stream, oldest first; a plan that cannot be read counts for the stream in its name."""
    return _by_age(settings, [name for name in _ids(settings) if stream in _about(settings, name)["streams"]])


def undos_of(settings: Settings, plan: str) -> list[str]:
    """The plans that were made to undo a plan, oldest first, whatever has become of them."""
    return _by_age(settings, [name for name in _ids(settings) if _about(settings, name)["undoes"] == plan])


def sealed(plan: RecoveryPlan) -> RecoveryPlan:
    return replace(plan, fingerprint=_fingerprint(plan))


def _about(settings: Settings, name: str) -> dict[str, Any]:
    """The streams of a plan, and the plan that it undoes; if its file does not say so, the stream in its name."""
    try:
        found = plan_object(settings, name, _ABOUT).read()
        about = json.loads(found.data if found is not None else "")
    except (OSError, ValueError):
        about = None
    if isinstance(about, dict) and isinstance(about.get("streams"), list) and "undoes" in about:
        return about
    return {"streams": [name.rpartition("-")[0]], "undoes": None}


def _fingerprint(plan: RecoveryPlan) -> str:
    """A hash of the fields; a field that a later version has added counts only if it is not empty."""
    value = {**_without_empty(asdict(plan), "left"), "fingerprint": "", "streams": []}
    for each in asdict(plan)["streams"]:
        stream = _without_empty(each, "until", "wrong_from", "ends_written", "void", "wrong_versions", "append_rate")
        saw, code = each["saw"], each["saw"]["code"]
        topics = [_without_empty(topic, "archive", "continues") for topic in saw["topics"]]
        for topic in topics:
            if "archive" not in topic:
                del topic["first"]
        stream["saw"] = {**saw, "code": code if len(code) < 3 or code[2] else code[:2], "topics": topics}
        stream["checks"] = _without_empty(each["checks"], "suites")
        value["streams"].append(stream)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_empty(value: dict[str, Any], *later: str) -> dict[str, Any]:
    return {key: each for key, each in value.items() if each or key not in later}
