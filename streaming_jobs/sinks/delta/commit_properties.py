"""Properties of our Delta commits: the ledger entry, and the transaction where a commit moves the table."""

from __future__ import annotations

import time

from deltalake import CommitProperties, Transaction

from streaming_jobs.ledger.entry import LedgerEntry

STREAM_PROPERTY = "recourse.stream"
"""The property of a table that names the stream it belongs to."""


def noted(entry: LedgerEntry, *, retries: int | None = None) -> CommitProperties:
    """Properties of a commit that leaves the stream's position as it is; `retries` None: deltalake's default."""
    return CommitProperties(custom_metadata={"userMetadata": entry.encode()}, max_commit_retries=retries)


def moving(entry: LedgerEntry, app: str) -> CommitProperties:
    """Properties of a commit that moves the table to the entry's position; no retry, so no commit can intervene."""
    transaction = Transaction(app, entry.txn.version, int(time.time() * 1000))
    return CommitProperties(
        custom_metadata={"userMetadata": entry.encode()}, max_commit_retries=0, app_transactions=[transaction]
    )
