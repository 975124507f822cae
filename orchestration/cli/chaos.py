"""`recourse chaos`: kill the streams with -9, and prove that nothing was lost or doubled."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import FAILED, Output, OutputOption, number, print_json, print_table, say
from orchestration.cli.verify import in_words, print_verdict, verdict_as_json
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.verification.chaos.flight_subject import RuleCheck, TableFindings
    from streaming_jobs.verification.chaos.kill_loop import Findings, LoopReport, LoopSubject
    from streaming_jobs.verification.chaos.number_subject import TopicFindings
    from streaming_jobs.verification.chaos.numbers import WrittenTopicCheck
    from streaming_jobs.verification.chaos.sessions import Tally


_SHOWN = 20
_RANDOM_SEEDS = 10_000


class ChaosSubject(StrEnum):
    tables = "tables"
    topics = "topics"


def chaos(
    context: typer.Context,
    kills: Annotated[
        int,
        typer.Option(min=1, max=1000, help="How often a driver, or a Python process of its JVM, is killed with -9."),
    ] = 30,
    subject: Annotated[
        ChaosSubject,
        typer.Option(help="Streams that write tables, or streams that read and write topics, in two stages."),
    ] = ChaosSubject.tables,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same faults in the same order; default: a random one.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=10, help="Records per second of the feeder; default: 60, of topics 150.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=4, help="Most records in a batch; default: 200, of topics 1000.")
    ] = None,
    scenarios: Annotated[
        bool, typer.Option("--scenarios", help="Afterwards damage checkpoint, table and topic: each has to be refused.")
    ] = False,
    home: Annotated[
        Path | None, typer.Option(help="An empty folder for the run; default: a temporary one.", show_default=False)
    ] = None,
    master: Annotated[
        str,
        typer.Option(help="A Spark cluster whose workers run on this machine: spark://host:port.", show_default=False),
    ] = "",
    store: Annotated[
        str, typer.Option(help="A URL such as s3://bucket/chaos, below which the tables are.", show_default=False)
    ] = "",
    state: Annotated[bool, typer.Option("--state", help="With --store: state is there too.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the folder even if all is well.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Run the streams on a broker of their own, kill them with -9, and verify that every offset came exactly once."""
    import secrets

    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import fetch_jars
    from streaming_jobs.errors import UsageError
    from streaming_jobs.platform.extras import require
    from streaming_jobs.verification.chaos import kill_loop

    if scenarios and subject is ChaosSubject.topics:
        raise UsageError("--scenarios damages streams that write tables", "leave out --subject topics, or --scenarios")
    if master and (subject is ChaosSubject.topics or not master.startswith("spark://")):
        raise UsageError(
            "--master takes streams that write tables to a standalone cluster", "leave out --subject, and name spark://"
        )
    if state and not store:
        raise UsageError("--state puts state where --store puts tables", "name a URL by --store")
    if scenarios and store:
        raise UsageError("--scenarios damages tables in folders", "leave out --store, or --scenarios")
    if subject is ChaosSubject.tables:
        require("demo", "a loop over the flights")
    base = invocation(context).settings
    seed = seed if seed is not None else secrets.randbelow(_RANDOM_SEEDS)
    chosen = _subject(subject)
    plan = kill_loop.plan_of(
        chosen, kills, seed, rate=rate, max_offsets=batch, scenarios=scenarios, master=master, store=store, state=state
    )
    folder = _folder(home)
    again = commands.chaos(kills=kills, seed=seed) + (" --subject topics" if subject == "topics" else "")
    again += (
        (f" --master {master}" if master else "")
        + (f" --store {store}" if store else "")
        + (" --state" if state else "")
    )
    say(f"seed {seed}: {again} repeats these faults; home {folder}")
    keep_home = True
    try:
        with stop_signals_interrupt():
            fetch_jars(base, broker=True)
            report = kill_loop.run(chosen, plan, folder, base, say)
        keep_home = keep or not report.ok
    finally:
        if keep_home:
            say(f"the home is kept: {folder}")
        else:
            shutil.rmtree(folder)
    if output is Output.json:
        print_json(as_json(report))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _subject(name: ChaosSubject) -> LoopSubject[TableFindings | TopicFindings]:
    if name is ChaosSubject.tables:
        from streaming_jobs.verification.chaos.flight_subject import FLIGHTS

        return FLIGHTS
    from streaming_jobs.verification.chaos.number_subject import NUMBERS

    return NUMBERS


def as_json(report: LoopReport[Any]) -> dict[str, Any]:
    tally, found = report.tally, report.findings
    checks: dict[str, Any] = {}
    if _about_topics(found):
        figures = _topic_data(found)
    else:
        figures, checks = _table_data(tally, found)
    return {
        "ok": report.ok,
        "seed": report.plan.seed,
        "rate": report.plan.rate,
        "seconds": round(report.seconds, 1),
        "home": report.home,
        **tally_as_json(tally),
        "batches": report.batches,
        "batches_replayed": len(tally.replayed),
        "batches_skipped": len(tally.skipped),
        **figures,
        **verdict_as_json(report.verdict),
        **checks,
    }


def _about_topics(found: Findings) -> bool:
    from streaming_jobs.verification.chaos.number_subject import TopicFindings

    return isinstance(found, TopicFindings)


def _table_data(tally: Tally, found: TableFindings) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures before the verdict, and the checks after it."""
    figures = {
        "batches_half_committed": len(tally.half),
        "versions_read": found.versions_read,
        "versions_unseen": found.versions_unseen,
        "version_faults": [str(fault) for fault in found.faults],
    }
    return figures, {
        "truth": [asdict(check) for check in found.truth],
        "rules": [{**asdict(check), "ok": check.ok} for check in found.rules],
        "refusals": [asdict(outcome) for outcome in found.scenarios],
    }


def _topic_data(found: TopicFindings) -> dict[str, Any]:
    return {
        "records_fed": found.fed,
        "keys": found.keys,
        "feed_faults": list(found.feed_faults),
        "topics": [{**asdict(check), "ok": check.ok} for check in found.checks],
        "records_read_while_it_ran": found.seen,
        "topics_read_unlike": list(found.unlike),
    }


def _print_report(report: LoopReport[Any]) -> None:
    tally, verdict, found = report.tally, report.verdict, report.findings
    topics = _about_topics(found)
    begin, end = _topic_figures(report) if topics else _table_figures(report)
    figures = [
        ("seed", str(report.plan.seed)),
        *kills(tally),
        ("batches", number(report.batches)),
        ("  replayed after a kill", number(len(tally.replayed))),
        *begin,
        ("offsets verified, all streams", number(verdict.verified)),
        ("  lost", number(verdict.lost)),
        ("  doubled", number(verdict.doubled)),
        *end,
        ("seconds", number(round(report.seconds))),
    ]
    print_table(["what", "figure"], figures, right=["figure"])
    if topics:
        _print_topics(found)
    print_verdict(verdict)
    if topics:
        _say_topics(found)
    else:
        _print_rules(found)
    say(in_words(verdict) if report.ok or not verdict.whole else "NOT PROVED: see above")


Figures = list[tuple[str, str]]
"""Lines of the table of figures."""


def _table_figures(report: LoopReport[TableFindings]) -> tuple[Figures, Figures]:
    """The figures before and after the figures of the verdict."""
    tally, found = report.tally, report.findings
    begin = [
        ("    half committed: in one table of two", number(len(tally.half))),
        ("  skipped: in the table already", number(len(tally.skipped))),
        ("versions read while it ran", number(found.versions_read)),
        ("  not whole", number(len(found.faults))),
        ("  cleaned up unread", number(found.versions_unseen)),
        ("records in the topic", number(report.verdict.records)),
    ]
    return begin, [
        ("tables equal to the truth", f"{sum(c.ok for c in found.truth)} of {len(found.truth)}"),
        *((f"refused: {o.name}", "yes" if o.ok else f"NO: {o.said}") for o in found.scenarios),
    ]


def _topic_figures(report: LoopReport[TopicFindings]) -> tuple[Figures, Figures]:
    found = report.findings
    return [
        ("  skipped: in topic and table already", number(len(report.tally.skipped))),
        ("records fed", number(found.fed)),
        ("keys", number(found.keys)),
        ("records that the reader outside saw", number(found.seen)),
        ("  topics that it saw otherwise than they are", number(len(found.unlike))),
    ], []


def _print_rules(found: TableFindings) -> None:
    if found.rules:
        print()
        print_table(["stream", "expected by the flights alone", "found"], [_equation(c) for c in found.rules])
    for fault in found.faults[:_SHOWN]:
        say(f"not whole: {fault}")
    for check in found.truth:
        if not check.ok:
            say(f"not equal to the truth: {check.table}: {check.detail}")
    for text in [text for rules in found.rules for text in rules.differences][:_SHOWN]:
        say(f"not as the rules say: {text}")


def _print_topics(found: TopicFindings) -> None:
    print()
    print_table(
        ["topic", *_NUMBERS, "as arithmetic says", "verdict"],
        [_topic_row(check) for check in found.checks],
        right=[*_NUMBERS, "as arithmetic says"],
    )
    print()


def _say_topics(found: TopicFindings) -> None:
    for fault in found.feed_faults[:_SHOWN]:
        say(f"not fed as it should be: {fault}")
    for topic in found.unlike:
        say(f"topic {topic} is not what the reader outside saw")


def _equation(check: RuleCheck) -> list[str]:
    return [check.stream, str(check), "the same" if check.ok else "other rows or numbers: see below"]


def _folder(home: Path | None) -> Path:
    from streaming_jobs.errors import UsageError
    from streaming_jobs.storage.files import private_folder

    if home is None:
        return Path(tempfile.mkdtemp(prefix="recourse-chaos-"))
    if home.exists() and any(home.iterdir()):
        raise UsageError(f"{home} is not empty", "name a folder that is empty or does not exist yet")
    return private_folder(home.absolute())


_NUMBERS = ["records in", "records out", "missing", "doubled", "altered", "out of order"]


def tally_as_json(tally: Tally) -> dict[str, Any]:
    return {
        "kills": tally.kills,
        "points": dict(sorted(tally.points.items())),
        "random_kills": dict(sorted(tally.victims.items())),
        "process_kills": dict(sorted(tally.processes.items())),
        "process_kills_not_made": dict(sorted(tally.not_made.items())),
        "streams_restarted": tally.restarts,
        "broker_kills": tally.broker_kills,
        "broker_kills_in_transactions": tally.transactions_cut,
        "zombies": tally.zombies,
        "sessions": tally.sessions,
        "unplanned_ends": tally.unplanned,
    }


def kills(tally: Tally) -> list[tuple[str, str]]:
    """The counts of kills as lines of a table."""
    points: dict[str, list[int]] = {}
    for name, count in tally.points.items():
        points.setdefault(name.partition(":")[2], []).append(count)
    return [
        ("kills", number(tally.kills)),
        *((f"  at {point}", f"{sum(counts)} on {len(counts)} streams") for point, counts in sorted(points.items())),
        *((f"  at random: {victim}", number(count)) for victim, count in sorted(tally.victims.items())),
        *((f"  of a {process}, the session continues", number(n)) for process, n in sorted(tally.processes.items())),
        ("    streams restarted by their session", number(tally.restarts)),
        *((f"  not made: no {process} was there", number(n)) for process, n in sorted(tally.not_made.items())),
        ("kills of the broker", number(tally.broker_kills)),
        *([("  in an open transaction", number(tally.transactions_cut))] if tally.transactions_cut else []),
        *([("zombies, each refused", number(tally.zombies))] if tally.zombies else []),
        ("sessions started", number(tally.sessions)),
        ("sessions that ended without a kill", number(len(tally.unplanned))),
    ]


def _topic_row(check: WrittenTopicCheck) -> list[str]:
    counts = (check.records_in, check.records_out, check.missing, check.doubled, check.altered, check.disordered)
    closed = f"{number(check.closed)} of {number(check.groups)}" if check.groups else "-"
    return [check.topic, *map(number, counts), closed, "ok" if check.ok else "WRONG"]
