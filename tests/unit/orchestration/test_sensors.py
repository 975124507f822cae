"""Figures of topics in Dagster: what is reported, when, and what a broker that does not answer changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from orchestration import sensors as sensor
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import BrokerUnreachable
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import TopicFigures
from tests.support.worlds import PRIMARY, TOPIC, Disk, parity, plain

FIGURES = TopicFigures(1_000.0, TOPIC, "id-1", -1, "delete", {0: 0, 1: 5}, {0: 100, 1: 50})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def tick(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, figures: TopicFigures, cursor: str | None = None
) -> dg.SensorResult:
    monkeypatch.setattr(sensor, "_look", lambda *_: {TOPIC: figures})
    made, _ = sensor.definitions(Topology({"parity": parity, "plain": plain}), settings).sensors or ()
    assert isinstance(made, dg.SensorDefinition)
    result = made(dg.build_sensor_context(cursor=cursor))
    assert isinstance(result, dg.SensorResult)
    return result


def test_the_first_look_is_reported_with_the_lag_of_streams_that_do_not_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(settings).open().run(0, 1)
    result = tick(settings, monkeypatch, FIGURES)
    (event,) = result.asset_events
    assert event.asset_key == dg.AssetKey(["kafka", TOPIC])
    values = {name: value.value for name, value in event.metadata.items()}
    assert values == {
        "end_offset": 150,
        "records": 145,
        "partitions": 2,
        "retention": "for ever",
        "cleanup_policy": "delete",
        "lag_of_parity": 80 + 40,
    }
    assert PRIMARY not in str(event.asset_key)


def test_rates_are_between_two_looks_and_nothing_is_reported_while_nothing_comes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tick(settings, monkeypatch, FIGURES)
    grown = replace(FIGURES, at=1_060.0, latest={0: 400, 1: 50})
    second = tick(settings, monkeypatch, grown, first.cursor)
    assert second.asset_events[0].metadata["records_per_s"].value == 5.0
    quiet = tick(settings, monkeypatch, replace(grown, at=1_120.0), second.cursor)
    assert not quiet.asset_events and quiet.skip_reason is not None
    later = tick(settings, monkeypatch, replace(grown, at=1_060.0 + sensor.AT_LEAST_EVERY), quiet.cursor)
    assert later.asset_events[0].metadata["records_per_s"].value == 0.0
    kinds = [type(each.asset_events[0]) for each in (first, second, later)]
    assert kinds == [dg.AssetMaterialization, dg.AssetMaterialization, dg.AssetObservation]
    anew = tick(settings, monkeypatch, replace(grown, at=3_000.0, id="id-2", latest={0: 3, 1: 0}), later.cursor)
    assert "records_per_s" not in anew.asset_events[0].metadata


def test_a_stream_that_catches_up_with_a_topic_that_does_not_grow_is_reported(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(settings).open().run(0)
    first = tick(settings, monkeypatch, FIGURES)
    disk.run(1)
    second = tick(settings, monkeypatch, replace(FIGURES, at=1_060.0), first.cursor)
    assert isinstance(second.asset_events[0], dg.AssetMaterialization)
    lag = [each.asset_events[0].metadata["lag_of_parity"].value for each in (first, second)]
    assert lag == [90 + 45, 80 + 40]
    assert not tick(settings, monkeypatch, replace(FIGURES, at=1_120.0), second.cursor).asset_events


def test_without_a_broker_the_cursor_stays(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tick(settings, monkeypatch, FIGURES)

    def unreachable(*_: object) -> None:
        raise BrokerUnreachable("no answer from broker:9092", "start it")

    monkeypatch.setattr(sensor, "_look", unreachable)
    made, _ = sensor.definitions(Topology({"parity": parity}), settings).sensors or ()
    assert isinstance(made, dg.SensorDefinition)
    result = made(dg.build_sensor_context(cursor=first.cursor))
    assert isinstance(result, dg.SensorResult)
    assert result.cursor == first.cursor and "no answer from broker" in str(result.skip_reason)


def test_a_cluster_that_is_away_hides_its_own_topics_only_and_keeps_their_place_in_the_cursor(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    abroad = replace(parity, name="abroad", sources={"things": replace(parity.topics[0], cluster="eu")})
    away = False

    def look(_: Settings, names: list[str]) -> dict[str, TopicFigures]:
        if away and names == [f"{TOPIC}@eu"]:
            raise BrokerUnreachable("no answer from eu:9092", "start it")
        return {name: replace(FIGURES, name=name) for name in names}

    monkeypatch.setattr(sensor, "_look", look)
    made, _ = sensor.definitions(Topology({"parity": parity, "abroad": abroad}), settings).sensors or ()
    assert isinstance(made, dg.SensorDefinition)
    first = made(dg.build_sensor_context())
    assert isinstance(first, dg.SensorResult)
    keys = {event.asset_key.to_user_string() for event in first.asset_events}
    assert keys == {f"kafka/{TOPIC}", f"kafka/eu/{TOPIC}"}
    away = True
    second = made(dg.build_sensor_context(cursor=first.cursor))
    assert isinstance(second, dg.SensorResult) and second.cursor is not None
    assert json.loads(second.cursor) == json.loads(first.cursor or "")
