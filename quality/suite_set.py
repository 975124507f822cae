"""All suites of a configuration, found in its modules and checked against its streams.

Suites are in the modules of the setting `flows`, beside their streams, and in those of `quality.suites`. The shipped
streams have theirs in `quality/examples`: a module of `streaming_jobs` cannot import this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from quality.suites import Suite
from streaming_jobs.catalog.topology import Topology, modules_of
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import instead, nearest

SHIPPED: Mapping[str, str] = {"streaming_jobs.examples.flights.streams": "quality.examples.flights"}
"""The modules with the suites of shipped streams, by the modules of the streams."""


@dataclass(frozen=True)
class SuiteSet:
    """The suites by name, and the stream that writes each table."""

    suites: Mapping[str, Suite]
    writers: Mapping[str, str]

    @classmethod
    def of(cls, suites: Iterable[Suite], topology: Topology) -> SuiteSet:
        """Check and index the suites; raises UsageError for a doubled name and for a table that no stream writes."""
        writers = _writers(topology)
        by_name: dict[str, Suite] = {}
        for suite in suites:
            if by_name.setdefault(suite.name, suite) is not suite:
                raise UsageError(f"two suites are named {suite.name}", "give one another name: @suite(name=...)")
            _check_table(suite, writers)
        return cls(dict(sorted(by_name.items())), writers)

    @classmethod
    def of_settings(cls, settings: Settings, topology: Topology) -> SuiteSet:
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


def output_of(topology: Topology, suite: Suite) -> tuple[Stream, DeclaredTable]:
    """The table of a suite, and its stream; raises UsageError if no stream writes it."""
    writers = _writers(topology)
    _check_table(suite, writers)
    stream = topology[writers[suite.table]]
    return next((stream, declared) for declared, _ in all_tables(stream) if declared.name == suite.table)


def _writers(topology: Topology) -> dict[str, str]:
    return {table: stream.name for stream in topology.streams.values() for table in stream.table_names}


def _check_table(suite: Suite, writers: Mapping[str, str]) -> None:
    if suite.table not in writers:
        raise UsageError(
            f"suite {suite.name} is about table '{suite.table}', and no stream writes that table",
            instead(suite.table, sorted(writers)),
        )


def _modules(settings: Settings) -> list[str]:
    shipped = [SHIPPED[name] for name in settings.flows if name in SHIPPED]
    return list(dict.fromkeys([*settings.flows, *settings.quality.suites, *shipped]))


def _declared_in(name: str) -> Iterator[Suite]:
    for module in modules_of(name):
        yield from (value for value in vars(module).values() if isinstance(value, Suite))
