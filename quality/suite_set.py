"""All suites of a configuration, found in its modules and checked against its streams.

Suites are in the modules of the setting `flows`, beside their streams, and in those of `quality.suites`. The shipped
streams have theirs in `quality/examples`: a module of `streaming_jobs` cannot import this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from quality.suites import Suite
from streaming_jobs.declared_table import DeclaredTable
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.spelling import instead, nearest
from streaming_jobs.stream import Stream
from streaming_jobs.topology import Topology, modules_of

SHIPPED: Mapping[str, str] = {"streaming_jobs.examples.flights.streams": "quality.examples.flights"}
"""The modules with the suites of shipped streams, by the modules of the streams."""


@dataclass(frozen=True)
class Output:
    """A table of a stream, as a suite looks at it."""

    stream: Stream
    declared: DeclaredTable


@dataclass(frozen=True)
class SuiteSet:
    """The suites by name, and every table of the streams by name."""

    suites: Mapping[str, Suite]
    outputs: Mapping[str, Output]

    @classmethod
    def of(cls, suites: Iterable[Suite], topology: Topology) -> SuiteSet:
        """Check and index the suites; raises UsageError for a doubled name and for a table that no stream writes."""
        outputs = outputs_of(topology)
        by_name: dict[str, Suite] = {}
        for suite in suites:
            if by_name.setdefault(suite.name, suite) is not suite:
                raise UsageError(f"two suites are named {suite.name}", "give one another name: @suite(name=...)")
            if suite.table not in outputs:
                raise UsageError(
                    f"suite {suite.name} is about table '{suite.table}', and no stream writes that table",
                    instead(suite.table, sorted(outputs)),
                )
        return cls(dict(sorted(by_name.items())), outputs)

    @classmethod
    def of_settings(cls, settings: Settings, topology: Topology) -> SuiteSet:
        """The suites of the settings' modules."""
        suites = {id(suite): suite for name in _modules(settings) for suite in _declared_in(name)}
        return cls.of(suites.values(), topology)

    def __getitem__(self, name: str) -> Suite:
        try:
            return self.suites[name]
        except KeyError:
            near = nearest(name, self.suites)
            meant = f"did you mean '{near}'? " if near else ""
            known = ", ".join(self.suites) or "none"
            raise UsageError(f"no suite is named '{name}'", f"{meant}the suites are: {known}") from None

    def select(self, names: Iterable[str]) -> list[Suite]:
        """The named suites in that order, or all of them when no name is given."""
        return [self[name] for name in dict.fromkeys(names)] or list(self.suites.values())

    def key_of(self, suite: Suite) -> tuple[str, ...]:
        """The columns that name a row: those of the suite, else the keys of its table."""
        return tuple(suite.key) or tuple(self.outputs[suite.table].declared.keys)


def outputs_of(topology: Topology) -> dict[str, Output]:
    """Every table that the streams write, by name."""
    return {
        declared.name: Output(stream, declared)
        for stream in topology.streams.values()
        for declared, _ in all_tables(stream)
    }


def _modules(settings: Settings) -> list[str]:
    shipped = [SHIPPED[name] for name in settings.flows if name in SHIPPED]
    return list(dict.fromkeys([*settings.flows, *settings.quality.suites, *shipped]))


def _declared_in(name: str) -> Iterator[Suite]:
    for module in modules_of(name):
        yield from (value for value in vars(module).values() if isinstance(value, Suite))
