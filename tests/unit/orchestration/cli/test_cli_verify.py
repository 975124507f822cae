"""`recourse verify` of streams that are not shipped, with a topic that is in memory: what it prints, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from orchestration.cli import preparations
from streaming_jobs.errors import UsageError
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.verification import verification
from streaming_jobs.verification.delta_log import commit_file, read_commit, versions
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic, RawRecord, blocks
from tests.support.life import PER_BATCH, PLACES, STREAM, TOPIC, TOPIC_ID, Life
from tests.support.placed import named, refusing_batch
from tests.support.proofs import ListedRecords, Spoiler
from tests.unit.orchestration.cli.conftest import Printed, Run

pytestmark = pytest.mark.slow

BATCHES = 5
TODAY = code_version(STREAM, ()).hash
REFUSED_TODAY = b'{"id": "3", "place": "50%"}'
RIGHT = 'return [{"id": r.value["id"], "place": r.value["place"]} for r in records]'


class MadeTopic:
    """A topic of one partition in memory, as a reader of a real one gives it."""

    def __init__(self, values: Iterable[bytes | None]) -> None:
        self.listed = [RawRecord(TOPIC, 0, at, 0, None, value) for at, value in enumerate(values)]
        self.name = TOPIC

    @property
    def whole(self) -> list[Span]:
        return [Span(TOPIC, 0, 0, len(self.listed))]

    def content(
        self, *, take: Callable[[Sequence[RawRecord]], None], progress: Callable[[int], None]
    ) -> CommittedTopic:
        for block in blocks(self.listed):
            take(block)
        progress(len(self.listed))
        end = len(self.listed)
        return CommittedTopic(TOPIC, TOPIC_ID, {0: CommittedPartition(0, end, np.arange(end))})

    def records(self, spans: Iterable[Span]) -> Iterator[RawRecord]:
        return ListedRecords(self.listed).records(spans)


def value(number: int) -> bytes:
    return json.dumps({"id": number, "place": PLACES[number % len(PLACES)]}).encode()


class Home:
    """A home with five batches of the stream `things`; `topic` may be changed before a command runs."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self.run = folder, run
        self.life = Life.begin(folder)
        for number in range(BATCHES):
            self.life.batch(number, code=TODAY)
        made = {"things": {"nodes": ["Project"], "position": None}}
        output_plans.write(
            StreamFolder.of(self.life.settings, "things").output_plans, dict.fromkeys((TODAY, "other"), made)
        )
        self.put({})
        self.truth("")

    def put(self, others: Mapping[int, bytes], batches: int = BATCHES) -> None:
        """The topic has the records of the batches, with others in the places of some."""
        self.topic = MadeTopic(others.get(i, value(i)) for i in range(batches * PER_BATCH))

    def by_other_code(self, batches: int) -> None:
        """The first batches were read and written by other code, with another declaration of the format."""

        def other(entry: dict[str, Any]) -> dict[str, Any]:
            return {**entry, "code": {"hash": "other", "package": "1"}}

        for version in versions(self.life.table):
            entry = read_commit(self.life.table, version).entry
            if entry is not None and entry.kind == "batch" and entry.batch < batches:
                Spoiler(self.life.table).entry(version, other)

    def letter(self, offset: int, reason: str) -> None:
        """A dead letter; no entry counts it."""
        row = {"topic": TOPIC, "partition": 0, "offset": offset, "reason": reason}
        schema = pa.schema(
            [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("reason", pa.string())]
        )
        letters = self.folder / "tables" / "things_dead_letters"
        write_deltalake(letters, pa.Table.from_pylist([row], schema=schema), mode="append", schema_mode="merge")

    def truth(self, body: str, declared: str = "STREAM") -> None:
        """The flows of this home: the stream, and with a body its truth."""
        text = "from tests.support.life import STREAM\nfrom streaming_jobs import truth\n"
        if body:
            text += f"\n@truth({declared})\ndef by_hand(records):\n    {body}\n"
        name = f"flows_{len(list(self.folder.glob('flows_*.py')))}_{self.folder.parent.name}".replace("-", "_")
        (self.folder / f"{name}.py").write_text(text)
        self.flows = name

    def verify(self, *arguments: str, code: int = 0) -> Printed:
        """Run the command, which ends with this exit code."""
        flows = json.dumps([self.flows])
        return self.run.ended(code, "--set", f"home={self.folder}", "--set", f"flows={flows}", "verify", *arguments)

    def stream(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """What the command says of the stream as JSON."""
        (stream,) = self.verify(*arguments, "-o", "json", code=code).value["streams"]
        return dict(stream)

    def told(self, what: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        """The verdict and the text of one comparison, such as `things: truth`."""
        comparisons = self.stream(*arguments, code=code)["comparisons"]
        return next((c["verdict"], c["text"]) for c in comparisons if f"{c['table']}: {c['what']}" == what)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Home:
    made = Home(tmp_path / "home", run)

    @contextmanager
    def no_broker(*_: Any) -> Iterator[str]:
        yield "nowhere"

    monkeypatch.chdir(made.folder)
    monkeypatch.syspath_prepend(str(made.folder))
    monkeypatch.setattr("orchestration.cli.preparations.broker_for_command", no_broker)
    monkeypatch.setattr("streaming_jobs.verification.verification.CommittedReader.at", lambda *_, **__: made.topic)
    return made


def test_a_stream_that_is_right_ends_with_0_and_says_what_was_not_compared(home: Home) -> None:
    printed = home.verify("things")
    assert "every offset is in its table exactly once" in printed.err
    assert "reading topic things, offsets: 50 of 50" in printed.err
    assert "comparing tables with topics, streams: 0 of 1" in printed.err
    assert "50 rows, as many as the entries say were written" in printed.out
    assert "no truth is declared for it" in printed.out and "not compared" in printed.out


def test_an_unknown_stream_is_a_usage_error(home: Home) -> None:
    assert "thing" in home.verify("thing", code=2).err


def test_a_row_that_is_gone_ends_with_1(home: Home) -> None:
    DeltaTable(home.life.table).delete("id = 3")
    stream = home.stream(code=1)
    assert stream["verdict"] == "wrong"
    assert "changed rows (DELETE) and carries no ledger entry" in stream["faults"][0]
    assert home.told("things: records", code=1)[1] == "50 records make one row each, and 49 rows are there"


def shorten(table: Path) -> None:
    """Leave only the newest commit in the log, and a checkpoint."""
    DeltaTable(table).create_checkpoint()
    for version in versions(table)[:-1]:
        commit_file(table, version).unlink()


def test_what_is_gone_is_named_and_fails_only_when_strict(home: Home) -> None:
    shorten(home.life.table)
    next((home.folder / "state" / "things" / "ledger").iterdir()).write_text("")
    said = home.verify().err
    assert "things: 40 offsets cannot be judged: the entries of 4 batches are neither in its log nor in" in said
    assert "all that could be compared is right, and not all could be" in said
    home.verify("--strict", code=1)


def test_a_truth_of_the_user_is_found_and_compared(home: Home) -> None:
    home.truth(RIGHT)
    verdict, text = home.told("things: truth")
    assert verdict == "ok" and "50 rows equal the truth in 2 columns" in text
    home.truth('return [{"id": r.value["id"]} for r in records]', '"things"')
    assert "not compared: the columns place" in home.told("things: truth")[1]


def test_a_truth_that_differs_names_the_first_differences(home: Home) -> None:
    home.truth(RIGHT.replace('r.value["id"],', 'r.value["id"] + (r.offset == 7),'))
    _, text = home.told("things: truth", code=1)
    assert "1 rows missing, first id=8 place=50%" in text.replace("place=a/b", "place=50%")
    assert "1 rows not expected, first id=7" in text


@pytest.mark.parametrize(
    ("body", "declared", "expected"),
    [
        ("return 1 / 0", "STREAM", "the truth of table things failed: by_hand: ZeroDivisionError"),
        ('return [{"di": 1}]', "STREAM", "returns the column 'di'"),
        ('return [{"id": "x"}]', "STREAM", "do not fit table things"),
        ("return []", '"thing"', "truth of table thing"),
    ],
)
def test_a_truth_that_cannot_be_is_a_usage_error(home: Home, body: str, declared: str, expected: str) -> None:
    home.truth(body, declared)
    assert expected in home.verify(code=2).err


LETTERS = "things_dead_letters: dead letters"


def test_dead_letters_are_decoded_again(home: Home) -> None:
    """Two records are refused, and one of them is a dead letter, for another reason than the format gives."""
    home.put({3: b"{", 4: b'{"id": "x"}'})
    home.letter(4, "malformed_json")
    _, text = home.told(LETTERS, code=1)
    assert "1 record is refused by the format and not among the dead letters: things-0 3..3" in text
    assert "things-0 4..4 has the reason malformed_json, not wrong_type" in text
    assert home.stream(code=1)["lost"] == ["things-0 3..3"]
    assert home.told(LETTERS, "--quick", code=1)[0] == "not compared"


def test_streams_that_were_never_started_prove_nothing(home: Home, run: Run) -> None:
    """As after the loss of a home's state and tables, or with another home than is meant."""
    other = home.folder / "other"
    verify = ("--set", f"home={other}", "--set", f'flows=["{home.flows}"]', "verify")
    printed = run.ended(1, *verify)
    assert "the stream has never been started" in printed.out
    assert f"home {other}: none of these streams has ever run here" in printed.err
    assert "exactly once" not in printed.err
    value = run.json(*verify, code=1)
    assert (value["right"], value["proved"], value["lost"]) == (True, False, 0)
    printed = run.ended(1, *verify, "--finished", "-o", "json")
    value = printed.value
    assert (value["right"], value["proved"], value["lost"]) == (False, False, BATCHES * PER_BATCH)
    assert "none of these streams has ever run here" in printed.err


def test_a_change_that_was_accepted_makes_no_comparison_wrong(home: Home) -> None:
    home.truth(RIGHT)
    DeltaTable(home.life.table).delete("id = 3")
    home.verify(code=1)
    stream_record.accept(home.life.settings, STREAM, "things", BATCHES + 1, "removed on request")
    for what in ("row counts", "records", "truth"):
        assert home.told(f"things: {what}") == ("not compared", "a change of somebody else was accepted")


def test_todays_format_does_not_judge_what_other_code_has_read(home: Home) -> None:
    """Of the older batches, record 3 is one that only today's format refuses."""
    home.put({3: REFUSED_TODAY})
    home.by_other_code(3)
    verdict, text = home.told(LETTERS)
    assert verdict == "ok" and text.endswith("not compared: batches 0 to 2 of other code")
    assert home.stream()["lost"] == []
    home.letter(5, "wrong_type")
    assert home.told(LETTERS, code=1)[0] == "ok", "it was refused then"
    home.by_other_code(BATCHES)
    assert home.told(LETTERS, code=1) == ("not compared", "all is of batches 0 to 4 of other code")


def test_a_batch_of_which_other_code_wrote_the_dead_letters_is_not_judged_by_todays(home: Home) -> None:
    """A kill between the commits of two tables, and other code at the next start."""
    home.put({3: REFUSED_TODAY})
    home.verify(code=1)
    life, note = home.life, "mixed batch: things_dead_letters was written by an earlier version of the code"
    ((version, mixed),) = (
        (version, entry)
        for version in versions(life.table)
        if (entry := read_commit(life.table, version).entry) is not None and (entry.kind, entry.batch) == ("batch", 0)
    )
    Spoiler(life.table).entry(version, lambda entry: {**entry, "note": note})
    ledger_file(life.settings, "things").append(replace(life.entry(0, code=TODAY), note=note), {})
    assert mixed.code == TODAY
    assert home.told(LETTERS)[1].endswith("not compared: batch 0 of other code")
    DeltaTable(life.table).create_checkpoint()
    for old in range(version + 1):
        commit_file(life.table, old).unlink()
    home.verify()  # the ledger's file says so too


def test_a_truth_is_given_what_other_code_has_read(home: Home) -> None:
    home.put({3: REFUSED_TODAY})
    home.by_other_code(3)
    home.truth('return [{"id": r.offset} for r in records]')
    assert home.told("things: truth")[1].startswith("50 rows equal the truth in 1 column")
    home.truth(RIGHT)
    verdict, text = home.told("things: truth")
    assert verdict == "not compared"
    assert "record things-0 3 was read by other code, and the format of today refuses it" in text
    home.letter(3, "wrong_type")
    assert "1 rows not expected, first id=3" in home.told("things: truth", code=1)[1], "a dead letter of then"


def test_late_records_that_were_dropped_make_no_truth_wrong(home: Home) -> None:
    home.truth(RIGHT.replace("for r in records", "for r in records if r.offset != 7"))
    assert home.told("things: truth", code=1)[0] == "wrong"
    home.life.batch(BATCHES, code=TODAY, late=2)
    home.put({}, BATCHES + 1)
    verdict, text = home.told("things: truth")
    dropped = "2 late records were dropped behind the watermark; the truth has them; "
    assert verdict == "unproved" and text.startswith(f"{dropped}1 row differs: 1 rows not expected")
    home.verify("--strict", code=1)


def test_what_was_found_is_printed_also_when_computing_rows_again_fails(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise UsageError("Spark gave up")

    monkeypatch.setattr("orchestration.cli.preparations.fetch_jars", lambda *_, **__: None)
    monkeypatch.setattr("streaming_jobs.platform.spark.start", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr("streaming_jobs.verification.recompute.recompute", failing)
    printed = home.verify("--recompute", code=2)
    assert "50 rows, as many as the entries say were written" in printed.out and "Spark gave up" in printed.err


UNNAMED = "1 rows missing, first id=50 place=plain; the table cannot hold 1 row, see the dead letters"


@pytest.mark.parametrize(
    ("place", "verdict", "text"),
    [(named(BATCHES * PER_BATCH), "ok", "59 rows equal the truth"), ({}, "unproved", UNNAMED)],
    ids=["named", "unnamed"],
)
def test_the_truth_of_a_table_need_not_have_the_rows_that_were_refused(
    home: Home, place: dict[str, Any], verdict: str, text: str
) -> None:
    home.truth(RIGHT)
    refusing_batch(home.life, BATCHES, place, code=TODAY)
    home.put({}, BATCHES + 1)
    told = home.told("things: truth")
    assert told[0] == verdict and text in told[1], told


def test_a_version_that_is_cleaned_up_while_the_topics_are_read_makes_nothing_wrong(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream writes on, and upkeep cuts the log past the version that was to be judged, early or late."""
    judge = verification.verify

    def judged_and_cut(*arguments: Any, **options: Any) -> Any:
        judgement = judge(*arguments, **options)
        home.life.batch(BATCHES)
        shorten(home.life.table)
        return judgement

    home.truth(RIGHT)
    with monkeypatch.context() as patch:
        patch.setattr(verification, "verify", judged_and_cut)
        assert home.told("things: truth")[0] == "unproved"
    newest = {"things": BATCHES}
    monkeypatch.setattr(verification, "newest_versions", lambda *_: newest)
    verdict, text = home.told("things: rows")
    assert verdict == "unproved" and "verify again" in text


def test_without_a_broker_it_says_what_it_needs_before_it_starts_one(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()

    def refusing(_: Any) -> None:
        raise UsageError("started")

    monkeypatch.setattr("orchestration.cli.preparations.fetch_jars", lambda *_, **__: None)
    monkeypatch.setattr("streaming_jobs.platform.broker.Broker", refusing)
    needs = "verify needs a broker"
    with pytest.raises(UsageError, match="started"), preparations.broker_for_command(home.life.settings, needs):
        pass
    assert f"{needs}; none runs, so the embedded one is started" in capsys.readouterr().err
