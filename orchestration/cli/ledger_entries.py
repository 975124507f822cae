"""Ledger entries as the command line prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestration.cli.output import number

if TYPE_CHECKING:
    from streaming_jobs.ledger.entry import LedgerEntry
    from streaming_jobs.ledger.positions import OffsetRange
    from streaming_jobs.sinks.stored import Commit


def entry_json(commit: Commit, entry: LedgerEntry) -> dict[str, Any]:
    """An entry for programs."""
    return {
        "version": commit.version if commit.version >= 0 else None,
        "at": _iso(commit.at),
        "from": "ledger file" if commit.operation == "LEDGER FILE" else "table log",
        "kind": entry.kind,
        "stream": entry.stream,
        "table": entry.table,
        "generation": entry.generation,
        "batch": entry.batch,
        "offsets": {
            r.topic: {"id": r.topic_id, "start": dict(r.start), "end": dict(r.end), "records": r.records}
            for r in entry.offsets
        },
        "rows": dict(entry.rows),
        "rules": {table: dict(broken) for table, broken in entry.rules.items()},
        "txns": dict(entry.txns),
        "code": {"hash": entry.code.hash, "package": entry.code.package},
        "plan": entry.plan,
        "note": entry.note,
    }


def entry_row(commit: Commit, entry: LedgerEntry) -> list[str]:
    """An entry as a row of a table for people."""
    return [
        str(commit.version) if commit.version >= 0 else "-",
        _iso(commit.at)[:19].replace("T", " "),
        entry.kind,
        f"g{entry.generation:04d}",
        str(entry.batch) if entry.batch >= 0 else "-",
        "; ".join(_range(r) for r in entry.offsets) or "-",
        number(entry.records),
        ", ".join(f"{name} {number(count)}" for name, count in entry.rows.items()) or "-",
        entry.code.hash[:8],
    ]


def _range(offsets: OffsetRange) -> str:
    parts = [
        f"{partition}:{offsets.start.get(partition, 0)}-{end}"
        for partition, end in sorted(offsets.end.items())
        if end != offsets.start.get(partition, 0)
    ]
    return f"{offsets.topic} {' '.join(parts) or '(none)'}"


def _iso(milliseconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
