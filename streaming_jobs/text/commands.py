"""Every command that an error, an alert or a page advises, as a person types it.

A test parses each of them as the command line does, so advice names no command and no option that is gone.
"""

from __future__ import annotations

import shlex


def _command(*words: str, **options: object) -> str:
    """The command with these options: `to_batch=-1` is `--to-batch -1`, True a flag; None and False are left out."""
    line = ["recourse", *words]
    for name, value in options.items():
        if value is not None and value is not False:
            line.append(f"--{name.replace('_', '-')}")
            line += [] if value is True else [str(value)]
    return shlex.join(line)


def up(**options: object) -> str:
    return _command("up", **options)


def init(name: str = "NAME") -> str:
    return _command("init", name)


def send(topic: str, file: str, **options: object) -> str:
    return _command("send", topic, file, **options)


def doctor() -> str:
    return _command("doctor")


def settings() -> str:
    """Prints every setting with its origin."""
    return _command("config", "show")


def adopt(stream: str, **options: object) -> str:
    return _command("adopt", stream, **options)


def metrics() -> str:
    return _command("metrics")


def mcp() -> str:
    return _command("mcp")


def lineage() -> str:
    return _command("lineage")


def verify(**options: object) -> str:
    return _command("verify", **options)


def chaos(**options: object) -> str:
    return _command("chaos", **options)


def deploy(*streams: str, rebuild: bool = False) -> str:
    return _command("deploy", *streams, rebuild=rebuild)


def status(*streams: str) -> str:
    return _command("streams", "status", *streams)


def run(*streams: str, trigger: str | None = None) -> str:
    return _command("streams", "run", *streams, trigger=trigger)


def stop(stream: str) -> str:
    return _command("streams", "stop", stream)


def describe() -> str:
    return _command("streams", "describe")


def sample(table: str) -> str:
    return _command("streams", "sample", table)


def schema(subject: str) -> str:
    return _command("schema", subject)


def topic_schema(topic: str) -> str:
    return _command("topics", topic, "--schema")


def history(stream: str, **options: object) -> str:
    return _command("streams", "history", stream, **options)


def accept(stream: str, table: str, version: object, why: str = "...") -> str:
    """Accepts a commit that the stream did not make; the person who does writes why."""
    return f"{_command('streams', 'accept', stream, table=table, version=version)} --why '{why}'"


def write_marker(stream: str) -> str:
    return _command("streams", "write-marker", stream)


def plan(stream: str, **options: object) -> str:
    """Plans a recovery; options such as `to_batch=-1` or `before_first_broken="total"`."""
    return _command("recover", "plan", stream, **options)


def plans() -> str:
    return _command("recover", "list")


def show_plan(plan: str) -> str:
    return _command("recover", "show", plan)


def apply(plan: str, *, yes: bool = False) -> str:
    return _command("recover", "apply", plan, yes=yes)


def resume(plan: str, *, yes: bool = False) -> str:
    return _command("recover", "resume", plan, yes=yes)


def abort(plan: str) -> str:
    return _command("recover", "abort", plan)


def undo(plan: str, *, yes: bool = False) -> str:
    return _command("recover", "undo", plan, yes=yes)


def savepoints(*stream: str) -> str:
    return _command("savepoints", "list", *stream)


def take_savepoint(stream: str) -> str:
    return _command("savepoints", "create", stream)


def drop_savepoint(name: str) -> str:
    """Drops a savepoint of several streams by its name."""
    return _command("savepoints", "drop", name=name)


def rebuild_slice(stream: str, table: str, begin: str, end: str) -> str:
    return _command("slices", "rebuild", stream, **{"table": table, "from": begin, "to": end})


def late_days(stream: str) -> str:
    """Prints the days that lack late records."""
    return _command("late", "list", stream)


def rebuild_late(stream: str) -> str:
    return _command("late", "rebuild", stream)


def redrive(stream: str, **options: object) -> str:
    return _command("deadletters", "replay", stream, **options)


def list_redrives(stream: str) -> str:
    return _command("deadletters", "list", stream, redrives=True)


def run_suites(*suites: str) -> str:
    return _command("quality", "run", *suites)


def show_suite(suite: str) -> str:
    return _command("quality", "show", suite)
