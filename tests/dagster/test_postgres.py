"""Dagster's storage in PostgreSQL, as a team has it: what sensors read and delete there by SQL, and through Dagster.

The tests are those of SQLite, on an instance in a real server (`tests/support/postgres.py` says where it comes from).
"""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest
from dagster_postgres.event_log import PostgresEventLogStorage

from streaming_jobs.settings import Settings
from tests.dagster.test_sensors import (  # noqa: F401
    test_a_cancelled_duplicate_does_not_start_again_what_was_given_up,
    test_a_dead_stream_is_red_on_its_table_and_green_when_a_driver_is_at_work_again,
    test_a_failed_session_is_alerted_on_every_table,
    test_keepalive_asks_for_the_first_session_and_not_for_a_second,
    test_keepalive_sees_markers_leases_and_what_recourse_up_stopped,
    test_the_watchdog_fails_a_recovery_whose_process_is_gone,
)
from tests.dagster.ticks import Ticks
from tests.support.postgres import Postgres, postgres_server
from tests.unit.orchestration.quality.test_alerts import (  # noqa: F401
    every_level,
    test_a_receiver_that_is_down_gets_each_change_later_and_the_other_one_gets_none_twice,
    test_red_and_green_again_are_told_once_each_to_log_webhook_and_mail,
)
from tests.unit.orchestration.sessions.test_retention import (  # noqa: F401
    test_in_an_instance_of_our_own_old_events_are_deleted_and_the_newest_of_each_kind_stay,
    test_old_runs_of_every_kind_are_deleted_until_none_is_left_and_those_of_others_stay,
    test_the_newest_event_of_each_partition_stays,
    test_what_another_team_has_reported_stays,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def instance(server: Postgres) -> Iterator[dg.DagsterInstance]:
    with server.instance() as instance:
        assert isinstance(instance.event_log_storage, PostgresEventLogStorage)
        yield instance


@pytest.fixture
def ticks(shop: Settings, instance: dg.DagsterInstance) -> Ticks:
    return Ticks(shop, instance)
