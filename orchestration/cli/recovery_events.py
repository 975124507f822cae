"""A recovery as the command line shows it while it is carried out: stages, progress, differences, and the question."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from orchestration.cli.output import say
from streaming_jobs.spelling import counted

if TYPE_CHECKING:
    from reprocessing.rebuild.context import Recovery, RecoveryEvents

_DOING = {"rewind": "publish the rebuilt rows", "skip": "skip these records"}


def recovery_events(yes: bool) -> RecoveryEvents:
    """Everything is said on stderr; with `yes` nobody is asked."""
    from reprocessing.rebuild.audit import paired
    from reprocessing.rebuild.context import RecoveryEvents

    def confirm(recovery: Recovery) -> bool:
        for difference in recovery.differences:
            say(_words(difference))
            for since, *counts in difference.by_time:
                words = _counts(*paired(*counts, keyed=difference.keyed))
                say(f"    {difference.time_column} from {since}: {words}")
            for row in difference.sample:
                say(f"    {_row_words(row)}")
        if yes:
            return True
        kinds = {each.kind for each in recovery.plan.streams}
        doing = [words for kind, words in _DOING.items() if kind in kinds]
        return typer.confirm(f"{' and '.join(doing)} (plan {recovery.plan.id})?", err=True)

    began: list[tuple[float, int]] = []

    def progress(done: int, total: int) -> None:
        began.append((time.monotonic(), done))
        (since, first), (now, _) = began[0], began[-1]
        rate = (done - first) / max(now - since, 0.001)
        pace = f", {rate:,.0f} a second" if rate else ""
        left = f", about {(total - done) / rate:,.0f} s left" if rate and done < total else ""
        say(f"  replay: {done:,} of {total:,} records{pace}{left}")

    return RecoveryEvents(tell=say, progress=progress, confirm=confirm)


def _words(difference: Any) -> str:
    d = difference
    totals = "".join(f"; sum of {c}: {o} -> {n}" for c, (o, n) in d.totals.items() if o != n)
    words = _counts(d.corrected, d.new, d.gone)
    return f"  {d.table}: {counted(d.old_rows, 'row')} published, {d.new_rows:,} rebuilt; {words}{totals}"


def _counts(corrected: int, new: int, gone: int) -> str:
    counts = [(corrected, "corrected"), (new, "new"), (gone, "gone")]
    return ", ".join(f"{count:,} {what}" for count, what in counts if count) or "no difference"


def _row_words(row: Mapping[str, Any]) -> str:
    """A row that differs: its keys and what changes, or which side has it."""
    for side in ("published", "rebuilt"):
        if row.keys() == {side}:
            return f"only {side}: " + ", ".join(f"{name} {value}" for name, value in row[side].items())
    names = [name.removesuffix(" published") for name in row if name.endswith(" published")]
    keys = [f"{name} {value}" for name, value in row.items() if not name.endswith((" published", " rebuilt"))]
    pairs = [(name, row[f"{name} published"], row[f"{name} rebuilt"]) for name in names]
    return f"{', '.join(keys)}: " + ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
