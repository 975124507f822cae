"""A driver that is paused at any point of a batch, while another one takes its stream over, changes nothing after it.

The table of cases is in docs/cluster.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from streaming_jobs.errors import Fenced, LeaseLost
from streaming_jobs.testing import MemoryLease, MemoryLeases
from tests.support.batch_driver import Driver, Start, commits_of, numbers
from tests.support.worlds import PRIMARY, SECONDARY, STREAM, Disk

POINTS = ("staged", "secondary_committed", "primary_committed")


def led(driver: Driver, leases: MemoryLeases) -> MemoryLease:
    """Give a driver the lease, as the session does that builds its query; the lease before has run out."""
    leases.held.clear()
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    for sink in driver.sinks.values():
        sink.under(lease, 1)
    for output in driver.pipeline.sinks:
        output.under(lease, 1)  # type: ignore[attr-defined] # each is a DeltaSink over the table
    driver.pipeline.hooks = replace(driver.pipeline.hooks, check_lease=lease.check)
    return lease


@pytest.mark.parametrize("point", POINTS)
def test_it_is_refused_wherever_it_wakes_and_each_row_is_there_once(disk: Disk, start: Start, point: str) -> None:
    leases = MemoryLeases(expires=True)
    paused, next_one = start(), start()
    led(paused, leases)

    def takeover(name: str, stream: str, number: int) -> None:
        if (name, number) == (point, 0):
            led(next_one, leases)
            next_one.run(0)

    paused.at = takeover
    if point == "primary_committed":
        paused.run(0)
    else:
        with pytest.raises(Fenced):
            paused.run(0)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == ([2, 4], [1, 3])
    assert [commits_of(disk, table) for table in (PRIMARY, SECONDARY)] == [1, 1]
    with pytest.raises(Fenced):
        paused.run(1)
    next_one.run(1)
    assert disk.findings() == []


def test_past_the_end_of_its_lease_it_begins_no_batch_and_commits_none(disk: Disk, start: Start) -> None:
    driver = start()
    lease = led(driver, MemoryLeases(expires=True))

    def ends(name: str, stream: str, number: int) -> None:
        lease.lost = name == "staged"

    driver.at = ends
    with pytest.raises(LeaseLost):
        driver.run(0)
    lease.lost, driver.at = True, lambda *_: None
    driver.log.clear()
    with pytest.raises(LeaseLost):
        driver.run(0)
    assert driver.log == [] and numbers(disk, PRIMARY) == numbers(disk, SECONDARY) == []
