"""Changes made outside a stream are found before it starts; the refusal names the change and the next command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable, write_deltalake

from streaming_jobs.errors import OffsetsLost, PreflightRefused
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, driver, finished, on_topic, produce, rows
from tests.support.things import plain, thing
from tests.support.waiting import wait_for

Ran = tuple[Bench, Stream]


@pytest.fixture
def ran(bench: BenchFactory, topic: str) -> Ran:
    """A stream that has read 300 records in three batches and stopped."""
    made = bench({"stream.max_offsets_per_trigger": 100})
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(300)))
    stream = on_topic(plain, topic)
    assert made.run(stream).status.state == "stopped"
    return made, stream


def refused(ran: Ran, error: type[Exception] = PreflightRefused) -> str:
    bench, stream = ran
    with pytest.raises(error) as raised:
        bench.start(stream)
    assert raised.value.next_step, "a refusal says what to run"
    return str(raised.value)


def folder(ran: Ran) -> Path:
    bench, stream = ran
    return StreamFolder.of(bench.settings, stream.name).checkpoint(1).folder


def test_nothing_is_wrong_with_an_untouched_stream(ran: Ran) -> None:
    bench, stream = ran
    produce(bench.bootstrap, stream.sources["things"].name, map(thing, range(300, 400)))
    bench.run(stream)
    assert len(rows(bench.settings, "plain")) == 400


def test_a_deleted_checkpoint_is_refused(ran: Ran) -> None:
    shutil.rmtree(folder(ran))
    assert "the checkpoint has no batch" in refused(ran)


def test_a_truncated_offsets_file_is_refused(ran: Ran) -> None:
    (folder(ran) / "offsets" / "2").write_text("v1\n")
    assert "offsets/2 cannot be read" in refused(ran)


def test_an_old_copy_of_the_checkpoint_is_refused(ran: Ran) -> None:
    for log in ("offsets", "commits"):
        (folder(ran) / log / "2").unlink()
    assert "table plain has batch 2, the checkpoint has batch 1" in refused(ran)


def test_a_lost_stream_record_is_refused(ran: Ran) -> None:
    bench, stream = ran
    (StreamFolder.of(bench.settings, stream.name).path / "stream.json").unlink()
    assert "the stream's record is gone" in refused(ran)


def test_a_table_restored_by_hand_is_refused_although_its_txn_is_right(ran: Ran) -> None:
    table = DeltaTable(ran[0].settings.tables / "plain")
    before = table.transaction_version("recourse:plain:plain")
    table.restore(2)
    assert DeltaTable(table.table_uri).transaction_version("recourse:plain:plain") == before
    refusal = refused(ran)
    assert "RESTORE" in refusal and "recourse streams accept plain --table plain --version 4" in refusal


def test_rows_deleted_by_hand_are_refused(ran: Ran) -> None:
    DeltaTable(ran[0].settings.tables / "plain").delete("n = 5")
    assert "changed rows and was not written by stream plain" in refused(ran)


def test_a_foreign_append_is_refused_until_it_is_accepted(ran: Ran) -> None:
    bench, stream = ran
    table = DeltaTable(bench.settings.tables / "plain")
    one = pa.Table.from_pylist([rows(bench.settings, "plain")[0]])
    write_deltalake(table, one, mode="append")
    assert "not written by stream plain" in refused(ran)
    stream_record.accept(bench.settings, stream, "plain", DeltaTable(table.table_uri).version(), "a test row")
    assert bench.run(stream).status.state == "stopped"


def test_a_compaction_by_hand_is_no_reason_to_refuse(ran: Ran) -> None:
    bench, stream = ran
    table = DeltaTable(bench.settings.tables / "plain")
    assert table.transaction_version("recourse-epoch:plain") == 1, "its batches carry the epoch of their lease"
    table.optimize.compact()
    assert bench.run(stream).status.state == "stopped"


def test_a_table_that_is_gone_is_refused(ran: Ran) -> None:
    shutil.rmtree(ran[0].settings.tables / "plain_dead_letters")
    assert "table plain_dead_letters is gone" in refused(ran)


def test_a_table_somebody_else_made_is_refused(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 1)
    write_deltalake(made.settings.tables / "plain", pa.table({"k": ["a"]}))
    refusal = refused((made, on_topic(plain, topic)))
    assert "was not made by Recourse" in refusal


def test_a_topic_made_anew_with_fewer_records_is_refused(ran: Ran) -> None:
    assert_recreated(ran, 100)


def test_a_topic_made_anew_with_more_records_is_refused(ran: Ran) -> None:
    assert_recreated(ran, 500)


def assert_recreated(ran: Ran, records: int) -> None:
    bench, stream = ran
    name = stream.sources["things"].name
    bench.topics.delete(name)
    bench.topics.create(name, 1)
    produce(bench.bootstrap, name, map(thing, range(records)))
    refusal = refused(ran, OffsetsLost)
    assert "was deleted and made anew" in refusal and "0:300" in refusal


def test_a_topic_truncated_past_the_position_is_refused_with_the_lost_range(ran: Ran) -> None:
    bench, stream = ran
    name = stream.sources["things"].name
    produce(bench.bootstrap, name, map(thing, range(300, 400)))
    cut(bench, name, 350)
    assert f"offsets 300 to 349 of topic {name}, partition 0, are gone (50 records never read)" in refused(
        ran, OffsetsLost
    )


def cut(bench: Bench, topic: str, offset: int) -> None:
    """Delete every record before the offset."""
    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    deletions = admin.delete_records([TopicPartition(topic, 0, offset)])
    wait_for(lambda: bench.topics.offsets(topic).earliest[0] == offset, f"the cut at {offset}")
    assert all(future.result(timeout=60) is not None for future in deletions.values())


def test_a_short_retention_is_warned_of(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 1, retention_ms=604_800_000)
    running = made.run(on_topic(plain, topic))
    assert any("keeps records for 7 days" in warning for warning in running.status.warnings)


def test_a_refusal_ends_the_driver_with_the_exit_code_for_a_person(bench: BenchFactory) -> None:
    made = bench()
    if made.topics.describe("things"):
        made.topics.delete("things")
    code, output = finished(driver(made.settings, made.bootstrap, "--streams", "plain"), seconds=30)
    assert code == 78
    assert "topic things does not exist" in output
