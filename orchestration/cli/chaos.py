"""`recourse chaos`: kill the streams with -9, and prove that nothing was lost or doubled."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli import FAILED
from orchestration.cli.invocation import invocation
from orchestration.cli.output import Output, OutputOption, log_to_stderr, number, print_json, print_table, say
from orchestration.cli.verify import in_words, print_verdict, verdict_as_json

if TYPE_CHECKING:
    from streaming_jobs.verification.chaos.kill_loop import Report
    from streaming_jobs.verification.chaos.rule_truth import RuleCheck

_SHOWN = 20
_RANDOM_SEEDS = 10_000


def chaos(
    context: typer.Context,
    kills: Annotated[
        int,
        typer.Option(min=1, max=1000, help="How often a driver, or a Python process of its JVM, is killed with -9."),
    ] = 30,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same faults in the same order; default: a random one.")
    ] = None,
    rate: Annotated[float, typer.Option(min=10, help="Records per second of the feeder.")] = 60.0,
    batch: Annotated[int, typer.Option(min=4, help="Most records in a batch.")] = 200,
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
    from orchestration.cli.setup import fetch_jars
    from streaming_jobs.verification.chaos.kill_loop import Plan, run

    log_to_stderr()
    base = invocation(context).settings
    plan = Plan(kills, seed if seed is not None else _by_chance(), rate, batch, scenarios)
    folder = _folder(home)
    say(f"seed {plan.seed}: recourse chaos --kills {kills} --seed {plan.seed} repeats these faults; home {folder}")
    keep_home = True
    try:
        with stop_signals_interrupt():
            fetch_jars(base, broker=True)
            report = run(plan, folder, base, say)
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


def as_json(report: Report) -> dict[str, Any]:
    """The report with stable keys."""
    tally = report.tally
    return {
        "ok": report.ok,
        "seed": report.plan.seed,
        "rate": report.plan.rate,
        "seconds": round(report.seconds, 1),
        "home": report.home,
        "kills": tally.kills,
        "points": dict(sorted(tally.points.items())),
        "random_kills": dict(sorted(tally.victims.items())),
        "process_kills": dict(sorted(tally.processes.items())),
        "process_kills_not_made": dict(sorted(tally.not_made.items())),
        "streams_restarted": tally.restarts,
        "broker_kills": tally.broker_kills,
        "sessions": tally.sessions,
        "unplanned_ends": tally.unplanned,
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
    points: dict[str, list[int]] = {}
    for name, count in tally.points.items():
        points.setdefault(name.partition(":")[2], []).append(count)
    figures = [
        ("seed", str(report.plan.seed)),
        ("kills", number(tally.kills)),
        *((f"  at {point}", f"{sum(counts)} on {len(counts)} streams") for point, counts in sorted(points.items())),
        *((f"  at random: {victim}", number(count)) for victim, count in sorted(tally.victims.items())),
        *((f"  of a {process}, the session goes on", number(n)) for process, n in sorted(tally.processes.items())),
        ("    streams restarted by their session", number(tally.restarts)),
        *((f"  not made: no {process} was there", number(n)) for process, n in sorted(tally.not_made.items())),
        ("kills of the broker", number(tally.broker_kills)),
        ("sessions started", number(tally.sessions)),
        ("sessions that ended without a kill", number(len(tally.unplanned))),
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

    if home is None:
        return Path(tempfile.mkdtemp(prefix="recourse-chaos-"))
    if home.exists() and any(home.iterdir()):
        raise UsageError(f"{home} is not empty", "name a folder that is empty or does not exist yet")
    home.mkdir(parents=True, exist_ok=True)
    return home.absolute()


def _by_chance() -> int:
    import secrets

    return secrets.randbelow(_RANDOM_SEEDS)
