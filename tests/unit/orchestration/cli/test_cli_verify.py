"""`recourse verify` of streams that are not shipped, with a topic that is in memory: what it prints, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from orchestration import cli
from streaming_jobs.errors import UsageError
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.verification.delta_log import commit_file, read_commit, versions
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic, RawRecord
from tests.support.life import PER_BATCH, PLACES, STREAM, TOPIC, TOPIC_ID, Life
from tests.support.placed import named, refusing_batch
from tests.support.proofs import ListedRecords, Spoiler

pytestmark = pytest.mark.slow

BATCHES = 5
TODAY = code_version(STREAM, ()).hash
RIGHT = 'return [{"id": r.value["id"], "place": r.value["place"]} for r in records]'


class MadeTopic:
    """A topic of one partition in memory, as a reader of a real one gives it."""

    def __init__(self, values: Iterable[bytes | None]) -> None:
        self.listed = [RawRecord(TOPIC, 0, at, 0, None, value) for at, value in enumerate(values)]
        self.name = TOPIC

    @property
    def whole(self) -> list[Span]:
        return [Span(TOPIC, 0, 0, len(self.listed))]

    def content(self, *, each: Callable[[RawRecord], None] | None, progress: Callable[[int], None]) -> CommittedTopic:
        for record in self.listed:
            if each is not None:
                each(record)
        progress(len(self.listed))
        end = len(self.listed)
        return CommittedTopic(TOPIC, TOPIC_ID, {0: CommittedPartition(0, end, np.arange(end))})

    def records(self, spans: Iterable[Span]) -> Iterator[RawRecord]:
        return ListedRecords(self.listed).records(spans)


def value(number: int) -> bytes:
    return json.dumps({"id": number, "place": PLACES[number % len(PLACES)]}).encode()


class Home:
    """A home with five batches of the stream `things`; `topic` may be changed before a command runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.life = Life.begin(folder)
        for number in range(BATCHES):
            self.life.batch(number, code=TODAY)
        made = {"things": {"nodes": ["Project"], "position": None}}
        output_plans.write(folder / "state" / "things" / "outputs.json", dict.fromkeys((TODAY, "other"), made))
        self.topic = MadeTopic(value(i) for i in range(BATCHES * PER_BATCH))
        self.truth("")

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

    def verify(self, *arguments: str) -> int:
        """Run the command."""
        flows = json.dumps([self.flows])
        return cli.main(["--set", f"home={self.folder}", "--set", f"flows={flows}", "verify", *arguments])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home(tmp_path / "home")

    @contextmanager
    def no_broker(*_: Any) -> Iterator[str]:
        yield "nowhere"

    monkeypatch.chdir(made.folder)
    monkeypatch.syspath_prepend(str(made.folder))
    monkeypatch.setattr("orchestration.cli.preparations.broker_for_command", no_broker)
    monkeypatch.setattr("streaming_jobs.verification.verification.CommittedReader.at", lambda *_, **__: made.topic)
    return made


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (stream,) = json.loads(capsys.readouterr().out)["streams"]
    return {**stream, "told": {f"{c['table']}: {c['what']}": c for c in stream["comparisons"]}}


def test_a_stream_that_is_right_ends_with_0_and_says_what_was_not_compared(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert home.verify("things") == 0
    printed = capsys.readouterr()
    assert "every offset is in its table exactly once" in printed.err
    assert "reading topic things, offsets: 50 of 50" in printed.err
    assert "comparing tables with topics, streams: 0 of 1" in printed.err
    assert "50 rows, as many as the entries say were written" in printed.out
    assert "no truth is declared for it" in printed.out and "not compared" in printed.out


def test_an_unknown_stream_is_a_usage_error(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert home.verify("thing") == 2
    assert "thing" in capsys.readouterr().err


def test_a_row_that_is_gone_ends_with_1(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    DeltaTable(home.life.table).delete("id = 3")
    assert home.verify("-o", "json") == 1
    outcomes = told(capsys)
    assert (
        outcomes["verdict"] == "wrong" and "changed rows (DELETE) and carries no ledger entry" in outcomes["faults"][0]
    )
    assert outcomes["told"]["things: records"]["text"] == "50 records make one row each, and 49 rows are there"


def test_what_is_gone_is_named_and_fails_only_when_strict(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    DeltaTable(home.life.table).create_checkpoint()
    for version in versions(home.life.table)[:-1]:
        commit_file(home.life.table, version).unlink()
    next((home.folder / "state" / "things" / "ledger").iterdir()).write_text("")
    assert home.verify() == 0
    output = capsys.readouterr().err
    assert "things: 40 offsets cannot be judged: the entries of 4 batches are neither in its log nor in" in output
    assert "all that could be compared is right, and not all could be" in output
    assert home.verify("--strict") == 1


def test_a_truth_of_the_user_is_found_and_compared(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.truth(RIGHT)
    assert home.verify("-o", "json") == 0
    outcome = told(capsys)["told"]["things: truth"]
    assert outcome["verdict"] == "ok" and "50 rows equal the truth in 2 columns" in outcome["text"]
    home.truth('return [{"id": r.value["id"]} for r in records]', '"things"')
    assert home.verify("-o", "json") == 0
    assert "not compared: the columns place" in told(capsys)["told"]["things: truth"]["text"]


def test_a_truth_that_differs_names_the_first_differences(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.truth(RIGHT.replace('r.value["id"],', 'r.value["id"] + (r.offset == 7),'))
    assert home.verify("-o", "json") == 1
    text = told(capsys)["told"]["things: truth"]["text"]
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
def test_a_truth_that_cannot_be_is_a_usage_error(
    home: Home, capsys: pytest.CaptureFixture[str], body: str, declared: str, expected: str
) -> None:
    home.truth(body, declared)
    assert home.verify() == 2
    assert expected in capsys.readouterr().err


def test_dead_letters_are_decoded_again(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Two records are refused, and one of them is a dead letter, for another reason than the format gives."""
    values: list[bytes | None] = [value(i) for i in range(BATCHES * PER_BATCH)]
    values[3], values[4] = b"{", b'{"id": "x"}'
    home.topic = MadeTopic(values)
    home.letter(4, "malformed_json")
    assert home.verify("-o", "json") == 1
    outcomes = told(capsys)
    text = outcomes["told"]["things_dead_letters: dead letters"]["text"]
    assert "1 record is refused by the format and not among the dead letters: things-0 3..3" in text
    assert "things-0 4..4 has the reason malformed_json, not wrong_type" in text
    assert outcomes["lost"] == ["things-0 3..3"]
    assert home.verify("--quick", "-o", "json") == 1
    assert told(capsys)["told"]["things_dead_letters: dead letters"]["verdict"] == "not compared"


def test_streams_that_were_never_started_prove_nothing(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """As after the loss of a home's state and tables, or with another home than is meant."""
    other = home.folder / "other"
    arguments = ["--set", f"home={other}", "--set", f'flows=["{home.flows}"]', "verify"]
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert "the stream has never been started" in printed.out
    assert f"home {other}: none of these streams has ever run here" in printed.err
    assert "exactly once" not in printed.err
    assert cli.main([*arguments, "-o", "json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["right"], value["proved"], value["lost"]) == (True, False, 0)
    assert cli.main([*arguments, "--finished", "-o", "json"]) == 1
    printed = capsys.readouterr()
    value = json.loads(printed.out)
    assert (value["right"], value["proved"], value["lost"]) == (False, False, BATCHES * PER_BATCH)
    assert "none of these streams has ever run here" in printed.err


def test_a_change_that_was_accepted_makes_no_comparison_wrong(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    from streaming_jobs.state import stream_record

    home.truth(RIGHT)
    DeltaTable(home.life.table).delete("id = 3")
    assert home.verify() == 1
    stream_record.accept(home.life.settings, STREAM, "things", BATCHES + 1, "removed on request")
    capsys.readouterr()
    assert home.verify("-o", "json") == 0
    outcomes = told(capsys)["told"]
    for what in ("row counts", "records", "truth"):
        outcome = outcomes[f"things: {what}"]
        assert (outcome["verdict"], outcome["text"]) == ("not compared", "a change of somebody else was accepted")


def test_todays_format_does_not_judge_what_other_code_has_read(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the older batches, record 3 is one that only today's format refuses."""
    values: list[bytes | None] = [value(i) for i in range(BATCHES * PER_BATCH)]
    values[3] = b'{"id": "3", "place": "50%"}'
    home.topic = MadeTopic(values)
    home.by_other_code(3)
    assert home.verify("-o", "json") == 0
    outcomes = told(capsys)
    letters = outcomes["told"]["things_dead_letters: dead letters"]
    assert letters["verdict"] == "ok" and letters["text"].endswith("not compared: batches 0 to 2 of other code")
    assert outcomes["lost"] == []
    home.letter(5, "wrong_type")
    home.verify("-o", "json")
    assert told(capsys)["told"]["things_dead_letters: dead letters"]["verdict"] == "ok", "it was refused then"
    home.by_other_code(BATCHES)
    home.verify("-o", "json")
    letters = told(capsys)["told"]["things_dead_letters: dead letters"]
    assert letters["verdict"] == "not compared" and letters["text"] == "all is of batches 0 to 4 of other code"


def test_a_batch_of_which_other_code_wrote_the_dead_letters_is_not_judged_by_todays(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill between the commits of two tables, and other code at the next start."""
    values: list[bytes | None] = [value(i) for i in range(BATCHES * PER_BATCH)]
    values[3] = b'{"id": "3", "place": "50%"}'
    home.topic = MadeTopic(values)
    assert home.verify("-o", "json") == 1
    capsys.readouterr()
    life, note = home.life, "mixed batch: things_dead_letters was written by an earlier version of the code"
    ((version, mixed),) = (
        (version, entry)
        for version in versions(life.table)
        if (entry := read_commit(life.table, version).entry) is not None and (entry.kind, entry.batch) == ("batch", 0)
    )
    Spoiler(life.table).entry(version, lambda entry: {**entry, "note": note})
    ledger_file(life.settings, "things").append(replace(life.entry(0, code=TODAY), note=note), {})
    assert mixed.code == TODAY
    assert home.verify("-o", "json") == 0
    letters = told(capsys)["told"]["things_dead_letters: dead letters"]
    assert letters["text"].endswith("not compared: batch 0 of other code")
    DeltaTable(life.table).create_checkpoint()
    for old in range(version + 1):
        commit_file(life.table, old).unlink()
    assert home.verify("-o", "json") == 0, "the ledger's file says so too"


def test_a_truth_is_given_what_other_code_has_read(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    values: list[bytes | None] = [value(i) for i in range(BATCHES * PER_BATCH)]
    values[3] = b'{"id": "3", "place": "50%"}'
    home.topic = MadeTopic(values)
    home.by_other_code(3)
    home.truth('return [{"id": r.offset} for r in records]')
    assert home.verify("-o", "json") == 0
    assert told(capsys)["told"]["things: truth"]["text"].startswith("50 rows equal the truth in 1 column")
    home.truth(RIGHT)
    assert home.verify("-o", "json") == 0
    outcome = told(capsys)["told"]["things: truth"]
    assert outcome["verdict"] == "not compared"
    assert "record things-0 3 was read by other code, and the format of today refuses it" in outcome["text"]
    home.letter(3, "wrong_type")
    home.verify("-o", "json")
    assert "1 rows not expected, first id=3" in told(capsys)["told"]["things: truth"]["text"], "a dead letter of then"


def test_late_records_that_were_dropped_make_no_truth_wrong(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.truth(RIGHT.replace("for r in records", "for r in records if r.offset != 7"))
    assert home.verify("-o", "json") == 1
    assert told(capsys)["told"]["things: truth"]["verdict"] == "wrong"
    home.life.batch(BATCHES, code=TODAY, late=2)
    home.topic = MadeTopic(value(i) for i in range((BATCHES + 1) * PER_BATCH))
    assert home.verify("-o", "json") == 0
    outcome = told(capsys)["told"]["things: truth"]
    assert outcome["verdict"] == "unproved"
    expected = (
        "2 late records were dropped behind the watermark; the truth has them; 1 row differs: 1 rows not expected"
    )
    assert outcome["text"].startswith(expected)
    assert home.verify("--strict") == 1


def test_what_was_found_is_printed_also_when_computing_rows_again_fails(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Spark:
        def stop(self) -> None: ...

    def failing(*_: Any) -> Any:
        raise UsageError("Spark gave up")

    monkeypatch.setattr("orchestration.cli.preparations.fetch_jars", lambda *_, **__: None)
    monkeypatch.setattr("streaming_jobs.platform.spark.start", lambda *_, **__: Spark())
    monkeypatch.setattr("streaming_jobs.verification.recompute.recompute", failing)
    assert home.verify("--recompute") == 2
    printed = capsys.readouterr()
    assert "50 rows, as many as the entries say were written" in printed.out and "Spark gave up" in printed.err


@pytest.mark.parametrize(
    ("place", "verdict", "text"),
    [
        (named(BATCHES * PER_BATCH), "ok", "59 rows equal the truth"),
        (
            {},
            "unproved",
            "1 rows missing, first id=50 place=plain; the table cannot hold 1 row, see the dead letters",
        ),
    ],
    ids=["named", "unnamed"],
)
def test_the_truth_of_a_table_need_not_have_the_rows_that_were_refused(
    home: Home, capsys: pytest.CaptureFixture[str], place: dict[str, Any], verdict: str, text: str
) -> None:
    home.truth(RIGHT)
    refusing_batch(home.life, BATCHES, place, code=TODAY)
    home.topic = MadeTopic(value(i) for i in range((BATCHES + 1) * PER_BATCH))
    assert home.verify("-o", "json") == 0
    outcome = told(capsys)["told"]["things: truth"]
    assert outcome["verdict"] == verdict and text in outcome["text"], outcome


def test_a_version_that_is_cleaned_up_while_the_topics_are_read_makes_nothing_wrong(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream writes on, and upkeep cuts the log past the version that was to be judged, early or late."""
    from streaming_jobs.verification import verification

    def cut() -> None:
        home.life.batch(BATCHES)
        DeltaTable(home.life.table).create_checkpoint()
        for version in versions(home.life.table)[:-1]:
            commit_file(home.life.table, version).unlink()

    judge = verification.verify

    def judged_and_cut(*arguments: Any, **options: Any) -> Any:
        judgement = judge(*arguments, **options)
        cut()
        return judgement

    home.truth(RIGHT)
    with monkeypatch.context() as patch:
        patch.setattr(verification, "verify", judged_and_cut)
        assert home.verify("-o", "json") == 0
    assert told(capsys)["told"]["things: truth"]["verdict"] == "unproved"
    newest = {"things": BATCHES}
    monkeypatch.setattr(verification, "newest_versions", lambda *_: newest)
    assert home.verify("-o", "json") == 0
    outcome = told(capsys)["told"]["things: rows"]
    assert outcome["verdict"] == "unproved" and "verify again" in outcome["text"]


def test_without_a_broker_it_says_what_it_needs_before_it_starts_one(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    from orchestration.cli.preparations import broker_for_command

    class Refusing:
        def __init__(self, _: Any) -> None:
            raise UsageError("started")

    monkeypatch.setattr("orchestration.cli.preparations.fetch_jars", lambda *_, **__: None)
    monkeypatch.setattr("streaming_jobs.platform.broker.Broker", Refusing)
    with pytest.raises(UsageError, match="started"), broker_for_command(home.life.settings, "verify needs a broker"):
        pass
    assert "verify needs a broker; none runs, so the embedded one is started" in capsys.readouterr().err
