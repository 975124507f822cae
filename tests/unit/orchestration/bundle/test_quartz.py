"""Quartz expressions: their next times, the cron for Dagster's ticks, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from orchestration.bundle.job import CronSchedule, Periodic
from orchestration.bundle.quartz import Quartz

NOW = datetime(2026, 11, 26, 10, 7, 30, tzinfo=UTC)
"""A Thursday."""


@pytest.mark.parametrize(
    ("quartz", "expected"),
    [
        ("0 0 3 * * ?", "2026-11-27 03:00"),
        ("0 0 12 * * ?", "2026-11-26 12:00"),
        ("0 15 10 ? * *", "2026-11-26 10:15"),
        ("0 15 10 * * ?", "2026-11-26 10:15"),
        ("0 15 10 * * ? *", "2026-11-26 10:15"),
        ("0 15 10 * * ? 2027", "2027-01-01 10:15"),
        ("0 15 10 * * ? 2027-2028", "2027-01-01 10:15"),
        ("0 15 10 * * ? 2020/4", "2028-01-01 10:15"),
        ("0 * 14 * * ?", "2026-11-26 14:00"),
        ("0 0/5 14 * * ?", "2026-11-26 14:00"),
        ("0 0/5 14,18 * * ?", "2026-11-26 14:00"),
        ("0 0-5 14 * * ?", "2026-11-26 14:00"),
        ("0 10,44 14 ? 3 WED", "2027-03-03 14:10"),
        ("0 15 10 ? * MON-FRI", "2026-11-26 10:15"),
        ("0 15 10 15 * ?", "2026-12-15 10:15"),
        ("0 15 10 L * ?", "2026-11-30 10:15"),
        ("0 15 10 L-2 * ?", "2026-11-28 10:15"),
        ("0 15 10 LW * ?", "2026-11-30 10:15"),
        ("0 0 9 LW 1 ?", "2027-01-29 09:00"),
        ("0 0 9 15W * ?", "2026-12-15 09:00"),
        ("0 0 9 1W 5 ?", "2027-05-03 09:00"),
        ("0 0 9 31W 10 ?", "2027-10-29 09:00"),
        ("0 0 9 6W 12 ?", "2026-12-07 09:00"),
        ("0 0 9 5W 12 ?", "2026-12-04 09:00"),
        ("0 15 10 ? * 6L", "2026-11-27 10:15"),
        ("0 15 10 ? * FRIL", "2026-11-27 10:15"),
        ("0 15 10 ? * 6L 2027", "2027-01-29 10:15"),
        ("0 15 10 ? * 6#3", "2026-12-18 10:15"),
        ("0 15 10 ? * MON#1", "2026-12-07 10:15"),
        ("0 15 10 ? * SUN#5", "2026-11-29 10:15"),
        ("0 0 4 ? * L", "2026-11-28 04:00"),
        ("0 0 12 1/5 * ?", "2026-11-26 12:00"),
        ("0 11 11 11 11 ?", "2027-11-11 11:11"),
        ("0 30 2 ? * 1", "2026-11-29 02:30"),
        ("0 30 2 ? * 7", "2026-11-28 02:30"),
        ("0 30 2 ? * SUN,WED", "2026-11-29 02:30"),
        ("0 0 4 ? * FRI-MON", "2026-11-27 04:00"),
        ("0 0 0 1 1/3 ?", "2027-01-01 00:00"),
        ("0 0 0 1 JAN-MAR ? *", "2027-01-01 00:00"),
        ("0 */20 * * * ?", "2026-11-26 10:20"),
        ("0 0 22-1 * * ?", "2026-11-26 22:00"),
        ("0 0 3 29 2 ?", "2028-02-29 03:00"),
        ("0 0 3 29-31 2 ?", "2028-02-29 03:00"),
        ("0 0 3 31 2,3 ?", "2027-03-31 03:00"),
        ("0 0/15 8-18 ? * MON-FRI", "2026-11-26 10:15"),
        ("27 7 10 * * ?", "2026-11-27 10:07"),
        ("45 7 10 * * ?", "2026-11-26 10:07"),
    ],
)
def test_the_next_time_is_that_of_quartz(quartz: str, expected: str) -> None:
    found = Quartz.of(quartz).after(NOW, UTC)
    assert found is not None
    assert f"{found:%Y-%m-%d %H:%M}" == expected


@pytest.mark.parametrize(
    ("quartz", "expected"),
    [
        ("0 0 3 * * ?", "2026-11-26 03:00"),
        ("0 15 10 L * ?", "2026-10-31 10:15"),
        ("0 0 9 ? * MON#1", "2026-11-02 09:00"),
        ("0 0 3 29 2 ?", "2024-02-29 03:00"),
    ],
)
def test_the_last_time_is_that_of_quartz(quartz: str, expected: str) -> None:
    found = Quartz.of(quartz).latest(NOW, UTC)
    assert found is not None
    assert f"{found:%Y-%m-%d %H:%M}" == expected


def test_a_schedule_without_a_further_time_has_none() -> None:
    assert Quartz.of("0 0 3 * * ? 2024").after(NOW, UTC) is None


def test_times_are_those_of_the_zone_and_a_skipped_hour_has_none() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    daily = Quartz.of("0 30 2 * * ?")
    before = datetime(2027, 3, 27, 12, tzinfo=UTC)
    found = daily.after(before, berlin)
    assert found is not None and found.date().isoformat() == "2027-03-29"
    assert Quartz.of("0 0 8 * * ?").after(NOW, berlin) == datetime(2026, 11, 27, 7, tzinfo=UTC)


@pytest.mark.parametrize(
    ("quartz", "cron"),
    [
        ("0 0 3 * * ?", "0 3 * * *"),
        ("0 0/15 8-18 ? * MON-FRI", "0,15,30,45 8-18 * * 1-5"),
        ("0 30 2 ? * 1", "30 2 * * 0"),
        ("0 30 2 ? * 7", "30 2 * * 6"),
        ("0 30 2 ? * SUN,WED", "30 2 * * 0,3"),
        ("0 0 4 ? * FRI-MON", "0 4 * * 0,1,5,6"),
        ("0 0 0 1 1/3 ?", "0 0 1 1,4,7,10 *"),
        ("0 0 0 1 JAN-MAR ? *", "0 0 1 1-3 *"),
        ("0 */20 * * * ?", "0,20,40 * * * *"),
        ("0 0 22-1 * * ?", "0 0,1,22,23 * * *"),
        ("0 5 6 ? * *", "5 6 * * *"),
        ("0 0 3 29 2 ?", "0 3 29 2 *"),
        ("0 0 3 29-31 2 ?", "0 3 29-31 2 *"),
        ("0 0 3 31 2,3 ?", "0 3 31 2,3 *"),
    ],
)
def test_what_cron_can_say_is_said_by_cron(quartz: str, cron: str) -> None:
    found = Quartz.of(quartz)
    assert (found.cron, found.exact) == (cron, True)


@pytest.mark.parametrize(
    "quartz", ["0 0 3 L * ?", "0 0 3 15W * ?", "0 0 3 ? * 6#3", "0 0 3 ? * 6L", "0 0 3 * * ? 2030"]
)
def test_what_cron_cannot_say_is_decided_at_the_tick(quartz: str) -> None:
    schedule = CronSchedule(quartz, Quartz.of(quartz).cron, "Europe/Oslo", paused=False)
    assert (schedule.cron, Quartz.of(quartz).exact) == ("0 3 * * *", False)
    due = schedule.after(NOW)
    assert due is not None
    assert schedule.runs_at(due)
    assert not schedule.runs_at(due.replace(day=due.day - 1 if due.day > 1 else 2, year=due.year - 1))


@pytest.mark.parametrize(
    ("quartz", "expected"),
    [
        ("0 3 * * *", "has 5 fields"),
        ("* 0 3 * * ?", "more than once a minute"),
        ("0/10 0 3 * * ?", "more than once a minute"),
        ("0 0 3 * * *", "exactly one of"),
        ("0 0 3 ? * ?", "exactly one of"),
        ("0 0 3 1 * MON", "exactly one of"),
        ("0 0 3 ? * 0", "'0' is not a number from 1 to 7"),
        ("0 0 3 ? * 8", "'8' is not a number"),
        ("0 0 3 ? * 6#6", "'6' is not a number from 1 to 5"),
        ("0 0 3 32W * ?", "'32' is not a number"),
        ("0 0 3 L-31 * ?", "'31' is not a number from 0 to 30"),
        ("0 60 3 * * ?", "'60' is not a number"),
        ("0 0/0 3 * * ?", "'0' is not a number"),
        ("0 0 3 * * ? 1960", "'1960' is not a number"),
        ("0 0 3 30 2 ?", "no month of '2' has a day '30'"),
        ("0 0 3 30,31 FEB ?", "no month of 'FEB'"),
        ("0 0 3 31 2,4,6,9,11 ?", "so it would never run"),
        ("0 0 3 29 2 ? 2027", "so it would never run"),
        ("", "has 0 fields"),
    ],
)
def test_what_is_no_schedule_is_refused(quartz: str, expected: str) -> None:
    with pytest.raises(ValueError, match="exactly one" if "exactly" in expected else r"\w") as caught:
        Quartz.of(quartz)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("interval", "unit", "cron", "expected"),
    [
        (15, "MINUTES", "*/15 * * * *", "2026-11-26 10:15"),
        (7, "MINUTES", "* * * * *", "2026-11-26 10:08"),
        (60, "MINUTES", "* * * * *", "2026-11-26 11:00"),
        (6, "HOURS", "0 */6 * * *", "2026-11-26 12:00"),
        (5, "HOURS", "0 * * * *", "2026-11-26 14:00"),
        (1, "DAYS", "0 0 * * *", "2026-11-27 00:00"),
        (1, "WEEKS", "0 0 * * *", "2026-11-30 00:00"),
        (2, "WEEKS", "0 0 * * *", "2026-12-07 00:00"),
    ],
)
def test_a_period_has_its_next_time_and_a_cron_that_ticks_then(
    interval: int, unit: str, cron: str, expected: str
) -> None:
    period = Periodic(interval, unit, paused=False)
    found = period.after(NOW)
    assert (period.cron, f"{found:%Y-%m-%d %H:%M}") == (cron, expected)
    assert period.runs_at(found)
    assert not period.runs_at(NOW.replace(minute=9))
