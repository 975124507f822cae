"""`recourse chaos`: kill the streams with -9, and prove that nothing was lost or doubled."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
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
    from streaming_jobs.settings import Settings
    from streaming_jobs.verification.chaos.kill_loop import Report
    from streaming_jobs.verification.chaos.rule_truth import RuleCheck
    from streaming_jobs.verification.chaos.session_runner import Tally
    from streaming_jobs.verification.topic_chaos.checks import TopicCheck
    from streaming_jobs.verification.topic_chaos.run import Report as TopicReport


_SHOWN = 20
_RANDOM_SEEDS = 10_000
_RATES = {"tables": 60.0, "topics": 150.0}
_BATCHES = {"tables": 200, "topics": 1000}


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
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the folder even if all is well.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Run the streams on a broker of their own, kill them with -9, and verify that every offset came exactly once."""
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import fetch_jars
    from streaming_jobs.errors import UsageError

    if scenarios and subject is ChaosSubject.topics:
        raise UsageError("--scenarios damages streams that write tables", "leave out --subject topics, or --scenarios")
    base = invocation(context).settings
    rate, batch = rate or _RATES[subject], batch or _BATCHES[subject]
    seed = seed if seed is not None else _by_chance()
    run = (
        _of_tables(kills, seed, rate, batch, scenarios) if subject == "tables" else _of_topics(kills, seed, rate, batch)
    )
    folder = _folder(home)
    again = commands.chaos(kills=kills, seed=seed) + (" --subject topics" if subject == "topics" else "")
    say(f"seed {seed}: {again} repeats these faults; home {folder}")
    keep_home = True
    try:
        with stop_signals_interrupt():
            fetch_jars(base, broker=True)
            ok, as_data, show = run(folder, base)
        keep_home = keep or not ok
    finally:
        if keep_home:
            say(f"the home is kept: {folder}")
        else:
            shutil.rmtree(folder)
    if output is Output.json:
        print_json(as_data())
    else:
        show()
    if not ok:
        raise typer.Exit(FAILED)


Outcome = tuple[bool, "Callable[[], dict[str, Any]]", "Callable[[], None]"]
"""True if all was proved, the report with stable keys, and the report for people."""
Run = Callable[[Path, "Settings"], Outcome]


def _of_tables(kills: int, seed: int, rate: float, batch: int, scenarios: bool) -> Run:
    from streaming_jobs.verification.chaos.kill_loop import Plan, run

    def made(folder: Path, base: Settings) -> Outcome:
        report = run(Plan(kills, seed, rate, batch, scenarios), folder, base, say)
        return report.ok, lambda: as_json(report), lambda: _print_report(report)

    return made


def _of_topics(kills: int, seed: int, rate: float, batch: int) -> Run:
    from streaming_jobs.verification.topic_chaos.run import Plan, run

    def made(folder: Path, base: Settings) -> Outcome:
        report = run(Plan(kills, seed, rate, batch), folder, base, say)
        return report.ok, lambda: topics_as_json(report), lambda: print_topics_report(report)

    return made


def as_json(report: Report) -> dict[str, Any]:
    tally = report.tally
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
        "batches_half_committed": len(tally.half),
        "versions_read": report.versions_read,
        "versions_unseen": report.versions_unseen,
        "version_faults": [str(fault) for fault in report.faults],
        **verdict_as_json(report.verdict),
        "truth": [asdict(check) for check in report.truth],
        "rules": [{**asdict(check), "ok": check.ok} for check in report.rules],
        "refusals": [asdict(outcome) for outcome in report.scenarios],
    }


def _print_report(report: Report) -> None:
    tally = report.tally
    figures = [
        ("seed", str(report.plan.seed)),
        *kills(tally),
        ("batches", number(report.batches)),
        ("  replayed after a kill", number(len(tally.replayed))),
        ("    half committed: in one table of two", number(len(tally.half))),
        ("  skipped: in the table already", number(len(tally.skipped))),
        ("versions read while it ran", number(report.versions_read)),
        ("  not whole", number(len(report.faults))),
        ("  cleaned up unread", number(report.versions_unseen)),
        ("records in the topic", number(report.verdict.records)),
        ("offsets verified, all streams", number(report.verdict.verified)),
        ("  lost", number(report.verdict.lost)),
        ("  doubled", number(report.verdict.doubled)),
        ("tables equal to the truth", f"{sum(c.ok for c in report.truth)} of {len(report.truth)}"),
        *((f"refused: {o.name}", "yes" if o.ok else f"NO: {o.said}") for o in report.scenarios),
        ("seconds", number(round(report.seconds))),
    ]
    print_table(["what", "figure"], figures, right=["figure"])
    print_verdict(report.verdict)
    if report.rules:
        print()
        print_table(["stream", "expected by the flights alone", "found"], [_equation(c) for c in report.rules])
    for fault in report.faults[:_SHOWN]:
        say(f"not whole: {fault}")
    for check in report.truth:
        if not check.ok:
            say(f"not equal to the truth: {check.table}: {check.detail}")
    for text in [text for rules in report.rules for text in rules.differences][:_SHOWN]:
        say(f"not as the rules say: {text}")
    say(in_words(report.verdict) if report.ok or not report.verdict.whole else "NOT PROVED: see above")


def _equation(check: RuleCheck) -> list[str]:
    return [check.stream, str(check), "the same" if check.ok else "other rows or numbers: see below"]


def _folder(home: Path | None) -> Path:
    from streaming_jobs.errors import UsageError
    from streaming_jobs.platform.files import private_folder

    if home is None:
        return Path(tempfile.mkdtemp(prefix="recourse-chaos-"))
    if home.exists() and any(home.iterdir()):
        raise UsageError(f"{home} is not empty", "name a folder that is empty or does not exist yet")
    return private_folder(home.absolute())


def _by_chance() -> int:
    import secrets

    return secrets.randbelow(_RANDOM_SEEDS)


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
        *((f"  of a {process}, the session goes on", number(n)) for process, n in sorted(tally.processes.items())),
        ("    streams restarted by their session", number(tally.restarts)),
        *((f"  not made: no {process} was there", number(n)) for process, n in sorted(tally.not_made.items())),
        ("kills of the broker", number(tally.broker_kills)),
        *([("  in an open transaction", number(tally.transactions_cut))] if tally.transactions_cut else []),
        *([("zombies, each refused", number(tally.zombies))] if tally.zombies else []),
        ("sessions started", number(tally.sessions)),
        ("sessions that ended without a kill", number(len(tally.unplanned))),
    ]


def topics_as_json(report: TopicReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "seed": report.plan.seed,
        "rate": report.plan.rate,
        "seconds": round(report.seconds, 1),
        "home": report.home,
        **tally_as_json(report.tally),
        "batches": report.batches,
        "batches_replayed": len(report.tally.replayed),
        "batches_skipped": len(report.tally.skipped),
        "records_fed": report.fed,
        "keys": report.keys,
        "feed_faults": list(report.feed_faults),
        "topics": [{**asdict(check), "ok": check.ok} for check in report.checks],
        "records_read_while_it_ran": report.seen,
        "topics_read_unlike": list(report.unlike),
        **verdict_as_json(report.verdict),
    }


def print_topics_report(report: TopicReport) -> None:
    tally = report.tally
    figures = [
        ("seed", str(report.plan.seed)),
        *kills(tally),
        ("batches", number(report.batches)),
        ("  replayed after a kill", number(len(tally.replayed))),
        ("  skipped: in topic and table already", number(len(tally.skipped))),
        ("records fed", number(report.fed)),
        ("keys", number(report.keys)),
        ("records that the reader outside saw", number(report.seen)),
        ("  topics that it saw otherwise than they are", number(len(report.unlike))),
        ("offsets verified, all streams", number(report.verdict.verified)),
        ("  lost", number(report.verdict.lost)),
        ("  doubled", number(report.verdict.doubled)),
        ("seconds", number(round(report.seconds))),
    ]
    print_table(["what", "figure"], figures, right=["figure"])
    print()
    print_table(
        ["topic", *_NUMBERS, "as arithmetic says", "verdict"],
        [_topic_row(check) for check in report.checks],
        right=[*_NUMBERS, "as arithmetic says"],
    )
    print()
    print_verdict(report.verdict)
    for fault in report.feed_faults[:_SHOWN]:
        say(f"not fed as it should be: {fault}")
    for topic in report.unlike:
        say(f"topic {topic} is not what the reader outside saw")
    say(in_words(report.verdict) if report.ok or not report.verdict.whole else "NOT PROVED: see above")


def _topic_row(check: TopicCheck) -> list[str]:
    counts = (check.records_in, check.records_out, check.missing, check.doubled, check.altered, check.disordered)
    closed = f"{number(check.closed)} of {number(check.groups)}" if check.groups else "-"
    return [check.topic, *map(number, counts), closed, "ok" if check.ok else "WRONG"]
