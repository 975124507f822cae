"""The steps that a command has started, ended in the opposite order however the command ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from orchestration.cli.output import say


@dataclass(frozen=True)
class Step:
    """Something that was started, with its orderly end and its immediate end."""

    name: str
    stop: Callable[[], object]
    kill: Callable[[], object]


@dataclass
class Steps:
    """A stack of steps. Leaving the block stops them, last one first; another Ctrl-C meanwhile kills the rest.

    Add a step before it starts, so that an interrupted start is ended too: `stop` and `kill` have to work then.
    If a stop fails, the others are stopped all the same; the first error is raised at the end.
    """

    started: list[Step] = field(default_factory=list)

    def add(self, name: str, stop: Callable[[], object], kill: Callable[[], object] | None = None) -> None:
        """Register a step; without `kill` its stop is used for both."""
        self.started.append(Step(name, stop, kill or stop))

    def close(self) -> None:
        """End every step."""
        in_order = True
        first: Exception | None = None
        while self.started:
            step = self.started[-1]
            try:
                if in_order:
                    say(f"stopping: {step.name}")
                    step.stop()
                else:
                    step.kill()
            except KeyboardInterrupt:
                if in_order:
                    say("ending at once")
                in_order = False
                continue  # the same step again, killed
            except Exception as error:  # noqa: BLE001 - raised after the other steps have ended
                say(f"stopping: {step.name} failed: {error}")
                first = first or error
            self.started.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
