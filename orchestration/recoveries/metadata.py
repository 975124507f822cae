"""Events of a recovery as Dagster's metadata: on its run, and on the tables of its streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import dagster as dg

from orchestration.recoveries.events import Ended, OffsetSpan, PlanShown, TableChange
from orchestration.recoveries.launchpad import link

Metadata = dict[str, dg.MetadataValue]

_NEXT: dict[str, tuple[tuple[str, str], ...]] = {
    "planned": (("apply", "carry it out"),),
    "applying": (("resume", "continue it"), ("abort", "give it up")),
    "waits for confirmation": (("apply", "publish the rebuilt rows"), ("abort", "give it up")),
    "refused": (("resume", "check again"), ("abort", "give it up")),
    "published": (("undo", "take it back"),),
    "aborting": (("abort", "finish that"),),
    "aborted": (),
}
"""The actions that are possible for a plan with this outcome, and what they do."""


def next_words(plan: str, outcome: str) -> str:
    """The actions that are possible now, as the Launchpad takes them: for a line of text."""
    return "; ".join(f"{words}: do: {do}, plan: {plan}" for do, words in _NEXT.get(outcome, ()))


def next_steps(location: str, plan: str, outcome: str) -> Metadata:
    """The same as links that fill the Launchpad in; no entry if nothing can be done."""
    links = [
        f"- [{words}]({link(location, {'do': do, 'plan': plan})}) (`do: {do}`, `plan: {plan}`)"
        for do, words in _NEXT[outcome]
    ]
    text = "\n".join(["Each opens the Launchpad; nothing happens before *Launch Run*.\n", *links])
    return {"next_steps": dg.MetadataValue.md(text)} if links else {}


def of_plan(shown: PlanShown) -> Metadata:
    """The plan: its id, its text, and where its files are."""
    place = Path(shown.folder)
    metadata: Metadata = {
        "plan": dg.MetadataValue.text(shown.plan),
        "plan_text": dg.MetadataValue.md(_block(shown.text)),
        "streams": dg.MetadataValue.text(", ".join(shown.streams)),
        "target": dg.MetadataValue.text(shown.target),
        "records_to_replay": dg.MetadataValue.int(shown.records),
    }
    if shown.undoes is not None:
        metadata["undoes"] = dg.MetadataValue.text(shown.undoes)
    files = {"plan_file": "plan.json", "journal": "journal.jsonl", "report": "report.html"}
    return metadata | {
        name: dg.MetadataValue.path(str(place / file)) for name, file in files.items() if _is(place, file)
    }


def of_changes(changes: Sequence[TableChange]) -> Metadata:
    """What the audit found: the numbers for each table, and some of the rows."""
    if not changes:
        return {}
    columns = ("table", "published", "rebuilt", "corrected", "new", "gone")
    schema = dg.TableSchema([dg.TableColumn(name, "string" if name == "table" else "int") for name in columns])
    records = [dg.TableRecord({name: getattr(change, name) for name in columns}) for change in changes]
    lines = [line for change in changes for line in change.lines]
    return {
        "changed_rows": dg.MetadataValue.table(records, schema),
        "changed_rows_in_words": dg.MetadataValue.md(_block("\n".join(lines))),
    }


def of_spans(spans: Iterable[OffsetSpan], *, skips: bool) -> Metadata:
    """The offsets that were replayed or skipped, by partition."""
    columns = {
        "stream": "string",
        "topic": "string",
        "partition": "int",
        "first": "int",
        "last": "int",
        "records": "int",
    }
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    records = [
        dg.TableRecord(
            {
                "stream": span.stream,
                "topic": span.topic,
                "partition": span.partition,
                "first": span.begin,
                "last": span.end - 1,
                "records": span.end - span.begin,
            }
        )
        for span in spans
        if span.end > span.begin
    ]
    name = "skipped_offsets" if skips else "recovered_offsets"
    return {name: dg.MetadataValue.table(records, schema)} if records else {}


def under_recovery(shown: PlanShown, run_id: str) -> Metadata:
    """The mark of a table whose stream is being recovered: the plan, and the run that carries it out."""
    return {
        "recovery": dg.MetadataValue.text(
            f"under recovery by plan {shown.plan}: the stream stands still, and readers see the rows from before until "
            "the plan publishes"
        ),
        **_who(shown, run_id),
    }


def not_over(shown: PlanShown, run_id: str, stage: str, outcome: str, words: str) -> Metadata:
    """The mark of a table whose recovery has ended in a stage, and its plan is not over; `words` say why."""
    return {
        "recovery": dg.MetadataValue.text(f"plan {shown.plan} is not over, it ended in stage {stage}: {words}"),
        "next": dg.MetadataValue.text(f"in job recover: {next_words(shown.plan, outcome)}"),
        **_who(shown, run_id),
    }


def after_recovery(shown: PlanShown, ended: Ended, stream: str, run_id: str) -> Metadata:
    """The mark of a table whose recovery is over: how, with which generation, and the offsets concerned."""
    done = {"published": "skipped records" if ended.skips else "recovered", "aborted": "given up"}
    how = done.get(ended.outcome, ended.outcome)
    generation = ended.generations.get(stream)
    spans = [span for span in ended.spans if span.stream == stream]
    return {
        "recovery": dg.MetadataValue.text(
            f"{how} by plan {shown.plan}" if ended.spans else f"plan {shown.plan}: {how}"
        ),
        "generation": dg.MetadataValue.text(str(generation)),
        **of_spans(spans, skips=ended.skips),
        **_who(shown, run_id),
    }


def _who(shown: PlanShown, run_id: str) -> Metadata:
    metadata: Metadata = {
        "plan": dg.MetadataValue.text(shown.plan),
        "plan_text": dg.MetadataValue.md(_block(shown.text)),
        "run": dg.MetadataValue.dagster_run(run_id),
    }
    place = Path(shown.folder)
    return metadata | (
        {"report": dg.MetadataValue.path(str(place / "report.html"))} if _is(place, "report.html") else {}
    )


def _is(place: Path, file: str) -> bool:
    return (place / file).is_file()


def _block(text: str) -> str:
    """Text as it is, in Markdown."""
    return f"```\n{text.rstrip().replace('```', chr(39) * 3)}\n```"
