"""The schedule of faults for the kill loop, made from the seed alone. Pure.

Most faults end a session. The kill of a planner or of a worker, two Python processes of its JVM, does not: the session
must continue unaided. Workers run with large batches only, so each of their kills has a phase of its own, which begins
with a burst of records.

On a Spark cluster the Python workers are below executors, and two other kinds of kills are in their place: of an
executor, and of a machine, which is a Spark worker with its executors. All streams share one session there, since a
session takes all cores of the cluster.

A run is a sequence of phases. In a phase the streams share one session, or each has its own; each session (a lane) has
a queue of faults, and is started again after each. Up to six in ten kills hit a named point of a batch, each point of
each stream once if there are enough; the others hit at a random moment. The seed fixes the kinds of faults, their
order and their parameters; which batch a moment falls into depends on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Victim = Literal["python", "jvm", "both"]
VICTIMS: tuple[Victim, ...] = ("python", "jvm", "both")
PythonProcess = Literal["planner", "worker"]
ClusterProcess = Literal["executor", "machine"]
Then = Literal["broker", "zombie"]
PYTHON_PROCESSES: tuple[PythonProcess, ...] = ("planner", "worker")
CLUSTER_PROCESSES: tuple[ClusterProcess, ...] = ("executor", "machine")

_NAMED_SHARE = 0.6
_MOST_BATCHES = 3
_MOST_COMMITS = 12
_LATEST = 1.5
_EARLY_SHARE, _EARLY_LATEST = 0.15, 8.0
_PHASE = (3, 6)
_APART_SHARE = 0.35
_BROKER_EVERY = (5, 8)
_MOST_PROCESSES = 64
_Kind = Victim | PythonProcess | ClusterProcess
_IN_TURN: tuple[_Kind, ...] = ("python", "planner", "worker", "jvm", "both")
_ON_A_CLUSTER: tuple[_Kind, ...] = ("executor", "machine", "python", "planner", "jvm", "both")


@dataclass(frozen=True)
class PointKill:
    """The driver ends itself with SIGKILL at a named point, `batches` batches after the next one of the stream."""

    stream: str
    point: str
    batches: int

    def __str__(self) -> str:
        return f"{self.stream} at {self.point}"


@dataclass(frozen=True)
class RandomKill:
    """kill -9 of a driver's Python, its JVM, or both, `seconds` after its `versions`-th commit (0: after its start)."""

    victim: Victim
    versions: int
    seconds: float

    def __str__(self) -> str:
        when = f"{self.seconds:.1f} s after "
        when += f"commit {self.versions}" if self.versions else "its start"
        return f"{self.victim}, {when}"


@dataclass(frozen=True)
class ProcessKill:
    """kill -9 of a process that a session survives, `seconds` after the `versions`-th commit of its streams.

    For a Python worker: `seconds` after one was first seen reading. `choice` says which of several, modulo their
    number.
    """

    process: PythonProcess | ClusterProcess
    versions: int
    seconds: float
    choice: int

    def __str__(self) -> str:
        after = "workers began to read" if self.process == "worker" else f"commit {self.versions}"
        return f"{self.process}, {self.seconds:.1f} s after {after}"


Fault = PointKill | RandomKill | ProcessKill


@dataclass(frozen=True)
class Lane:
    """One session's streams and the faults it meets, in order.

    With `runs_on` it is restarted after its last fault, and runs until the faults of the other lanes have happened:
    other streams read what it writes.
    """

    streams: tuple[str, ...]
    faults: tuple[Fault, ...]
    runs_on: bool = False


@dataclass(frozen=True)
class Phase:
    """Sessions that run at the same time; the next phase begins when all of their faults have happened."""

    lanes: tuple[Lane, ...]

    @property
    def burst(self) -> bool:
        """True if a backlog has to be there when its sessions start: workers read large batches only."""
        return any(isinstance(f, ProcessKill) and f.process == "worker" for lane in self.lanes for f in lane.faults)

    @property
    def kills(self) -> int:
        return sum(len(lane.faults) for lane in self.lanes)


@dataclass(frozen=True)
class Freeze:
    """The driver stops itself in the transaction of `stream`, `batches` batches after the next one (`sessions.py`)."""

    streams: tuple[str, ...]
    stream: str
    batches: int
    then: Then

    def __str__(self) -> str:
        what = "the broker is killed" if self.then == "broker" else "another driver takes over"
        return f"{what} while {self.stream} has a transaction open"


Steps = Sequence[Phase | Freeze]


@dataclass(frozen=True)
class FaultSchedule:
    """A whole run; the broker is killed once each of the numbers of `broker_after` kills is reached."""

    phases: tuple[Phase, ...]
    broker_after: tuple[int, ...]

    @property
    def kills(self) -> int:
        return sum(phase.kills for phase in self.phases)

    @property
    def faults(self) -> Iterator[Fault]:
        return (fault for phase in self.phases for lane in phase.lanes for fault in lane.faults)


def schedule(seed: int, kills: int, points: Mapping[str, Sequence[str]], *, cluster: bool = False) -> FaultSchedule:
    """The faults of a run, for streams with their points; the same arguments give the same faults."""
    streams = tuple(points)
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    faults, of_workers = _faults(chance, kills, points, _ON_A_CLUSTER if cluster else _IN_TURN)
    phases: list[Phase] = []
    while faults:
        size = min(chance.randint(*_PHASE), len(faults))
        part, faults = faults[:size], faults[size:]
        apart = bool(phases) and chance.random() < _APART_SHARE and not cluster
        phases.append(_apart(chance, part, streams) if apart else Phase((Lane(streams, tuple(part)),)))
    for fault in of_workers:
        phases.insert(chance.randint(1, len(phases)), Phase((Lane(streams, (fault,)),)))
    return FaultSchedule(tuple(phases), tuple(_broker(chance, kills)))


def _faults(
    chance: random.Random, kills: int, points: Mapping[str, Sequence[str]], turns: Sequence[_Kind]
) -> tuple[list[Fault], list[ProcessKill]]:
    """Every point of every stream once if the kills suffice for it, each victim in turn for the others; shuffled.

    The kills of workers are apart.
    """
    pairs = [(stream, point) for stream in points for point in points[stream]]
    chance.shuffle(pairs)
    named = min(len(pairs), round(kills * _NAMED_SHARE))
    faults: list[Fault] = [PointKill(s, p, chance.randint(0, _MOST_BATCHES)) for s, p in pairs[:named]]
    of_workers: list[ProcessKill] = []
    for number in range(kills - named):
        victim = turns[number % len(turns)]
        seconds = round(chance.uniform(0, _LATEST), 2)
        if victim == "worker":
            of_workers.append(ProcessKill("worker", 0, round(seconds / 3, 2), chance.randrange(_MOST_PROCESSES)))
        elif victim == "planner" or victim == "executor" or victim == "machine":
            versions = chance.randint(1, _MOST_COMMITS)
            faults.append(ProcessKill(victim, versions, seconds, chance.randrange(_MOST_PROCESSES)))
        elif chance.random() < _EARLY_SHARE:
            faults.append(RandomKill(victim, 0, round(chance.uniform(0, _EARLY_LATEST), 2)))
        else:
            faults.append(RandomKill(victim, chance.randint(1, _MOST_COMMITS), seconds))
    chance.shuffle(faults)
    return faults, of_workers


def _apart(chance: random.Random, faults: Sequence[Fault], streams: Sequence[str]) -> Phase:
    queues: dict[str, list[Fault]] = {stream: [] for stream in streams}
    for fault in faults:
        target = fault.stream if isinstance(fault, PointKill) else chance.choice(list(streams))
        queues[target].append(fault)
    return Phase(tuple(Lane((stream,), tuple(queue)) for stream, queue in queues.items() if queue))


def _broker(chance: random.Random, kills: int) -> Iterator[int]:
    at = chance.randint(1, min(_BROKER_EVERY[0], max(kills - 1, 1)))
    while at < kills:
        yield at
        at += chance.randint(*_BROKER_EVERY)
