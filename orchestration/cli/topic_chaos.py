"""The report of `recourse chaos --subject topics`, and the counts of kills, which every report of chaos has."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orchestration.cli.output import number, print_table, say
from orchestration.cli.verify import in_words, print_verdict, verdict_as_json

if TYPE_CHECKING:
    from streaming_jobs.verification.chaos.session_runner import Tally
    from streaming_jobs.verification.topic_chaos.checks import TopicCheck
    from streaming_jobs.verification.topic_chaos.run import Report

_SHOWN = 20
_NUMBERS = ["records in", "records out", "missing", "doubled", "altered", "out of order"]


def tally_as_json(tally: Tally) -> dict[str, Any]:
    """The counts of kills with stable keys."""
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


def as_json(report: Report) -> dict[str, Any]:
    """The report with stable keys."""
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


def print_report(report: Report) -> None:
    """Print the report for people."""
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
        [_row(check) for check in report.checks],
        right=[*_NUMBERS, "as arithmetic says"],
    )
    print()
    print_verdict(report.verdict)
    for fault in report.feed_faults[:_SHOWN]:
        say(f"not fed as it should be: {fault}")
    for topic in report.unlike:
        say(f"topic {topic} is not what the reader outside saw")
    say(in_words(report.verdict) if report.ok or not report.verdict.whole else "NOT PROVED: see above")


def _row(check: TopicCheck) -> list[str]:
    counts = (check.records_in, check.records_out, check.missing, check.doubled, check.altered, check.disordered)
    closed = f"{number(check.closed)} of {number(check.groups)}" if check.groups else "-"
    return [check.topic, *map(number, counts), closed, "ok" if check.ok else "WRONG"]
