"""The versions that a replay looks up are those of the batches on the path of the stream's generations."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable as Stored
from deltalake import write_deltalake

from reprocessing.plan.lookups import first_run, looked_up
from reprocessing.plan.plan import Base
from streaming_jobs import DeltaTable, Json, KafkaTopic, Lookup, Stream
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.errors import LookupVersionGone
from streaming_jobs.ledger.entry import LedgerEntry, TableVersion
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_record import Generation
from tests.conftest import SettingsFactory


def looking_up(things: Any, rates: Any) -> Any:
    return things.join(rates, "k", "left")


STREAM = Stream(
    "values",
    looking_up,
    {"things": KafkaTopic("things", value=Json({"k": "string"}))},
    {"valued": DeltaTable("valued")},
    lookups={"rates": Lookup("rates", schema=schema_of({"k": "string", "rate": "bigint"}))},
)
FIRST = Generation(1, 0.0, "first start")
SECOND = Generation(2, 1.0, "recovery", from_generation=1, from_batch=1)
FROM_THE_START = Base(None, 1, -1, {})


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    """A table with versions 0 to 4, and a ledger of ten records a batch: (generation, batch, version)."""
    made = settings()
    for rate in range(5):
        write_deltalake(str(made.tables / "rates"), pa.table({"k": ["a"], "rate": [rate]}), mode="overwrite")
    table_id = str(Stored(str(made.tables / "rates")).metadata().id)
    file = ledger_file(made, STREAM.name)
    for generation, batch, version in ((1, 0, 0), (1, 1, 0), (1, 2, 1), (1, 3, 2), (2, 2, 1), (2, 3, 3)):
        offsets = OffsetRange("things", "id", {0: 10 * batch}, {0: 10 * batch + 10})
        found = {"rates": TableVersion(version, table_id)}
        file.append(LedgerEntry("batch", STREAM.name, "valued", generation, batch, (offsets,), lookups=found), {})
    return made


def versions(home: Settings, *generations: Generation, begins: int = 0) -> list[tuple[int, int]]:
    history = first_run(home, STREAM, generations, {"things": {0: begins}})
    assert history is not None
    return [(change.ends["things"][0], change.versions["rates"].version) for change in history.changes]


def test_the_batches_on_the_path_count_from_where_the_replay_begins(home: Settings) -> None:
    assert versions(home, FIRST) == [(20, 0), (30, 1), (40, 2)]
    assert versions(home, FIRST, SECOND) == [(20, 0), (30, 1), (40, 3)]
    assert versions(home, FIRST, SECOND, begins=20) == [(30, 1), (40, 3)]


def test_a_plan_says_which_versions_it_looks_up_or_that_one_is_gone(home: Settings) -> None:
    assert looked_up(home, STREAM, [FIRST], FROM_THE_START) == [
        "the replay looks up table rates at versions 0 to 2, as the batches that it repeats did"
    ]
    newest = home.with_stream(STREAM.name, replay_lookups="newest")
    assert looked_up(newest, STREAM, [FIRST], FROM_THE_START) == ["the replay looks up the newest version of rates"]
    at_the_end = Base(None, 1, 3, {"things": {0: 40}})
    assert looked_up(home, STREAM, [FIRST], at_the_end) == [
        "the replay looks up the newest version of table rates: no batch had looked it up"
    ]
    rates = home.tables_folder / "rates"
    for file in rates.glob("*.parquet"):
        if file.name not in {path.rpartition("/")[2] for path in Stored(str(rates)).file_uris()}:
            file.unlink()
    with pytest.raises(LookupVersionGone, match=r"version 0 of table rates, and needs it again: file .* was deleted"):
        looked_up(home, STREAM, [FIRST], FROM_THE_START)
