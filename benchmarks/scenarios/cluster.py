"""A backlog read by a standalone Spark cluster of two workers with a core each, beside the driver's own two cores.

    python -m benchmarks cluster --records 1000000 --rounds 3 --out benchmarks/results/cluster.json

The same machine, the same topic, the same settings but for `spark.master`: what differs is that batches go from the
executors to the driver by files and Spark's connection, not within one JVM. Each run is compared with the truth.
`rate` is records per second from the start of the stream to its last commit, `steady_rate` without the first fifth
(benchmarks/speed). `cpu_s` are the CPU seconds of the session in that time, `executors_cpu_s` those of the workers and
their executors in the whole run; on a machine with other work they say more than the rates. Exit code 1: a run failed,
or wrote something else than the truth.

Needs the right to a mount namespace, and a Java of this machine with the module jdk.incubator.vector.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from benchmarks.feeds import create_topic, feed_backlog
from benchmarks.place import place
from benchmarks.processes import ChildFailed, cpu_seconds, family
from benchmarks.run import Report, Row, in_turn, progress
from benchmarks.speed.contestants import Recourse
from benchmarks.speed.measure import WrongOutput, backlog
from benchmarks.speed.records import Work, generate

if TYPE_CHECKING:
    from tests.support.standalone import StandaloneCluster

_TOPIC = "backlog"
_WORKS: tuple[Work, ...] = ("stateless", "windowed")
_FIGURES = ("rate", "steady_rate", "first_batch_s", "commits", "cpu_s", "executors_cpu_s")


def run(
    report: Report,
    *,
    records: Annotated[int, "of the backlog"] = 1_000_000,
    rounds: int = 3,
    works: tuple[Work, ...] = _WORKS,
) -> None:
    from tests.support.standalone import standalone

    runs: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder, standalone(Path(folder), memory_mb=1500) as cluster:
        here = Recourse("local-2", {"spark.master": "local[2]"})
        there = Recourse("cluster-2-x-1", {"spark.master": cluster.url, "spark.driver_host": "127.0.0.1"})
        with place(heap_mb=512) as at:
            payments = generate(records, 1)
            create_topic(at.bootstrap, _TOPIC)
            feed_backlog(at.bootstrap, _TOPIC, payments)
            for number in range(rounds):
                for work in works:
                    for contestant in in_turn([here, there], number):
                        progress(f"round {number + 1}: {work}, {contestant.name}")
                        before = _cpu_seconds(cluster)
                        try:
                            made = backlog(contestant, work, at, _TOPIC, payments)
                            runs.append({**made, "executors_cpu_s": round(_cpu_seconds(cluster) - before, 1)})
                        except (ChildFailed, WrongOutput, LookupError, TimeoutError) as error:
                            progress(f"{type(error).__name__}: {error}")
                            report.judge(False)
    report.keep(runs=runs)
    rows = [_medians(runs, work, name) for work in works for name in (here.name, there.name)]
    report.table("figures", [row for row in rows if row])


def _cpu_seconds(cluster: StandaloneCluster) -> float:
    """CPU seconds of the workers and their executors, also of executors that have ended."""
    return sum(cpu_seconds(process) for worker in cluster.workers for process in family(worker.pid))


def _medians(runs: list[Row], work: Work, name: str) -> Row:
    found = [run for run in runs if (run["work"], run["peer"]) == (work, name)]
    if not found:
        return {}
    medians = {figure: _median(found, figure) for figure in _FIGURES}
    return {"work": work, "master": name, "runs": len(found), **medians}


def _median(runs: list[Row], figure: str) -> float | str:
    values = [run[figure] for run in runs if figure in run]
    return float(statistics.median(values)) if values else "-"
