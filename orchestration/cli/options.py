"""The global options, what is derived from them once per command, and parameters that several commands have."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.text import say
from orchestration.sessions.configuration import Configuration
from streaming_jobs.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.settings import Loaded, Settings


AnyStreams = Annotated[
    list[str] | None, typer.Argument(metavar="[STREAM...]", help="Streams; none: all.", show_default=False)
]
StreamNames = Annotated[list[str], typer.Argument(metavar="STREAM...", help="Streams.", show_default=False)]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="A stream.", show_default=False)]


@dataclass
class Invocation:
    """One run of `recourse`: the configuration file and the values of --set."""

    config: Path | None = None
    values: dict[str, str] = field(default_factory=dict)

    @cached_property
    def loaded(self) -> Loaded:
        """The merged settings with their origins; raises ConfigurationError."""
        from streaming_jobs import settings

        flags = {key: settings.flag_value(key, text) for key, text in self.values.items()}
        return settings.load(flags, config_file=self.config)

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @cached_property
    def topology(self) -> Topology:
        """The declared streams, or the shipped ones where none are configured, with a message on stderr."""
        from streaming_jobs.catalog.topology import Topology
        from streaming_jobs.settings_files import FILES

        if self.demonstration:
            say(f"nothing in {FILES}, looked for from {Path.cwd()} upwards, names flows:")
            say("these are the shipped streams, over flights of 2013")
        return Topology.of_settings(self.settings)

    @property
    def demonstration(self) -> bool:
        """True if the streams are the shipped ones, because nothing names `flows`."""
        return any(o.key == "flows" and o.origin == "demonstration" for o in self.loaded.origins)

    def demonstrate(self) -> None:
        """Take the shipped streams where nothing names `flows`, in this process and its children."""
        from streaming_jobs.settings import demonstrate

        if not self.settings.flows:
            demonstrate()
            del self.loaded

    def names(self, names: list[str]) -> list[str]:
        """The named streams, or all; raises UsageError for an unknown one."""
        return [stream.name for stream in self.topology.select(dict.fromkeys(names))]

    def environment(self) -> dict[str, str]:
        """The environment variables with which a child process loads the same settings.

        Values are passed in the environment, not in arguments: every user of a machine can read arguments.
        """
        variables = Configuration(values={**self.values, "home": str(self.settings.home)}).environment()
        if self.config:
            variables["RECOURSE_CONFIG"] = str(self.config.absolute())
        return variables

    def export(self) -> None:
        """Set the variables of `environment` in this process, for the children it will start."""
        os.environ.update(self.environment())


def invocation(context: typer.Context) -> Invocation:
    context_object = context.find_object(Invocation)
    assert context_object is not None, "the callback of the app sets it"
    return context_object


def moment_of(option: str, text: str, now: float, *, or_else: str = "") -> float:
    """A time as an option has it, in seconds since 1970: a duration before `now`, or an ISO time, UTC without a zone.

    `or_else` are further words that the option takes. Raises UsageError.
    """
    from streaming_jobs.text.durations import parse_duration

    try:
        return now - parse_duration(text).total_seconds()
    except ConfigurationError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{option} '{text}' is neither a duration nor a time", f"such as '2 days', '2026-11-24 09:30'{or_else}"
        ) from None
    return at.replace(tzinfo=at.tzinfo or UTC).timestamp()


def parse_set(texts: list[str]) -> dict[str, str]:
    """Read the values of --set; raises UsageError for anything but key=value, and for a key that is part of another."""
    values: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"--set {key} is not key=value", "such as --set stream.trigger=available-now")
        values[key] = value
    for key in values:
        if inside := next((k for k in values if k.startswith(f"{key}.")), None):
            raise UsageError(f"--set {inside} is a part of --set {key}", "give one of the two")
    return values
