"""The errors that Recourse raises on purpose, as one tree; docs/errors.md has all of them.

    RecourseError
    ├── UsageError            the request makes no sense; nothing was changed
    ├── TransientError        may pass; a retry is right
    │   ├── LeaseBusy         another driver holds the stream
    │   ├── TableAwaited      a table that the stream reads does not exist yet
    │   ├── TopicUnknown      the broker does not know a topic that it knew before
    │   ├── SchemaUnavailable the schema registry does not answer, or does not know a schema yet
    │   └── FunctionRaised    the stream's own function raised an exception, the first time
    └── PermanentError        a retry is a bug; a person has to act
        ├── PreflightRefused  state, tables and topics do not agree; nothing was started
        ├── OffsetsLost       records the stream still needs are gone from Kafka
        ├── Fenced            a newer generation owns the table; this driver is a zombie
        ├── LedgerConflict    a batch was committed before with another offset range
        ├── ForeignWrite      another writer changed rows of the stream's table
        ├── FunctionFailed    the stream's own function raised the same exception again
        ├── OutputMismatch    the rows do not fit the table
        ├── RuleBroken        rows break a row rule that stops the stream
        └── CommitImpossible  a property or feature of the table forbids the commit

Each error carries a stable code (`REC-0xx`), what was found, and what to do next. The docstring of a class is its
section in docs/errors.md: the meaning, then the remedy. `python docs/errors.py` writes the page.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class RecourseError(Exception):
    """Base of all errors raised on purpose. Its own code stands for an unexpected exception (exit code 3).

    REC-000 is a bug in Recourse. The message names the file with the traceback: please report the bug, with that file.
    """

    code: ClassVar[str] = "REC-000"
    exit_code: ClassVar[int] = 1

    def __init__(self, found: str, next_step: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.next_step = next_step

    def __str__(self) -> str:
        text = f"{self.code} {self.found}"
        return f"{text}\n  next: {self.next_step}" if self.next_step else text


class UsageError(RecourseError):
    """The request itself is wrong: an unknown name, a bad option, a declaration that cannot hold.

    Nothing was changed. Correct the command or the declaration; the message has the nearest known name.
    """

    code = "REC-001"
    exit_code = 2


class ConfigurationError(UsageError):
    """A setting has a value that cannot be used; the text names the setting and its source.

    Correct the value at its source. `recourse config show` prints every setting with its origin.
    """

    code = "REC-002"


class SetupError(RecourseError):
    """Something this machine needs is missing or damaged: Java, a jar, a free port, disk.

    `recourse doctor` checks all of them and names a fix for each.
    """

    code = "REC-003"

    def __init__(self, found: str, next_step: str = "", *, may_pass: bool = False) -> None:
        super().__init__(found, next_step)
        self.may_pass = may_pass
        """True if a long-running command retries: a full disk, a broker that did not start."""


_OF_THE_MACHINE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


def setup_error(error: BaseException, place: object = "a file") -> SetupError | None:
    """A SetupError if the machine caused the error (rights, a full or read-only disk), and None for other errors.

    `place` stands in for the path where the system names none: it names the path for an open, but not for a write.
    """
    if not isinstance(error, OSError) or error.errno not in _OF_THE_MACHINE:
        return None
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    found = f"{error.filename or place}: {error.strerror}"
    return SetupError(found, "check disk space and the folder's rights", may_pass=full)


class TransientError(RecourseError):
    """Something outside of Recourse failed and may recover; the session retries with a delay.

    Nothing, unless it persists: `recourse streams status` shows the number of attempts and the time of the next one.
    """

    code = "REC-010"


class LeaseBusy(TransientError):
    """Another driver, or the JVM of a driver that was just killed, still holds the stream.

    Wait a few seconds after a kill. If another session runs the stream, stop it: `recourse streams stop STREAM`.
    """

    code = "REC-011"
    exit_code = 75


class LeaseLost(TransientError):
    """The session's lease on a stream ran out, or another session holds it by now: this session ends.

    Nothing needs repair: no commit was made after the end of the lease, and the next session repeats the batch. If it
    happens again, check the store of the state folder, and that this machine is not paused for longer than `lease.ttl`.
    """

    code = "REC-034"


class TableAwaited(TransientError):
    """A table that the stream reads does not exist yet: the stream waits for it, at most `stream.await_table`.

    Start the stream that writes the table; the order does not matter. After that time the error is REC-021.
    """

    code = "REC-015"


class TopicUnknown(TransientError):
    """The broker does not know a topic that it knew before: the topic was deleted, or the broker has just started.

    Nothing for a minute: the stream looks again every two seconds, and REC-021 follows if the topic stays unknown.
    """

    code = "REC-016"


class PermanentError(RecourseError):
    """A retry would fail in the same way; a person has to act first.

    Do what the message says, then start the stream again.
    """

    code = "REC-020"
    exit_code = 78


class PreflightRefused(PermanentError):
    """Checkpoint, tables and topics do not agree, so the stream was not started.

    The message names the contradiction and a command. docs/exactly-once.md has the rules, docs/operate.md the messages.
    """

    code = "REC-021"


class OffsetsLost(PermanentError):
    """Records between the stream's position and the topic's first offset are gone.

    Restore the records from a copy of the topic, or continue without them with the command that the message names. Then
    give the topic a longer retention.
    """

    code = "REC-022"


class Fenced(PermanentError):
    """The table carries a newer generation, or a later epoch: this driver was replaced and must not write.

    Nothing needs repair. End this process: a recovery or another session owns the stream now.
    """

    code = "REC-023"


class LedgerConflict(PermanentError):
    """The ledger holds this batch with another offset range than the checkpoint.

    Checkpoint and table come from two copies, or two drivers with two state folders write one table. Restore both
    from one copy, or end the other driver.
    """

    code = "REC-024"


class OutputMismatch(PermanentError):
    """The rows of a batch do not fit the table: schema, keys or owner.

    Declare the new column in the table's `schema`, revert the change of the stream's function, or write the new output
    to a new table.
    """

    code = "REC-025"


class ForeignWrite(PermanentError):
    """Another writer changed the rows of a table while the stream was writing it.

    If the change is right, `recourse streams accept STREAM` records it. Otherwise undo it with the tool that made it.
    """

    code = "REC-026"


class FunctionFailed(PermanentError):
    """The stream's own function raised the same exception twice in the same place.

    Correct the function; the message has its file and line. A supervised session then starts the stream again.
    """

    code = "REC-027"


class SchemaUnavailable(TransientError):
    """A record names a schema that is not stored yet, and the schema registry does not answer or does not know it.

    The stream retries until the registry answers; after `registry.unknown_for` records of a schema that it does not
    know become dead letters. Check `registry.url`, and that the producer uses the same registry.
    """

    code = "REC-038"


class FunctionRaised(TransientError):
    """The stream's own function raised an exception; the cause may be a service that the function calls.

    The session retries the batch. A second exception in a row, of the same kind in the same place and batch, becomes
    REC-027; connection errors do not.
    """

    code = "REC-014"

    def __init__(self, found: str, next_step: str = "", origin: str = "") -> None:
        """`origin`: kind, place and batch; the text may name another record of the batch each time."""
        super().__init__(found, next_step)
        self.origin = origin


class CommitImpossible(PermanentError):
    """A property or feature of the table forbids the commit, so no retry can succeed.

    The message names the property or feature. Remove it, or give the stream another table.
    """

    code = "REC-028"


class RuleBroken(PermanentError):
    """Rows of a batch break a row rule with `on_fail="fail"`: the batch was not written, and the stream stopped.

    The message names the rule and some of the rows. Correct the function or the data, or let the rule quarantine, drop
    or warn; then start the stream again, which repeats the batch.
    """

    code = "REC-029"


class RecordRefused(PermanentError):
    """A record or row failed, and the stream's error policy stops the stream for it; nothing of its batch is visible.

    The message names the layer, the record and the remedy. Dead letters instead: `errors=ErrorPolicy(...)`.
    """

    code = "REC-039"


class ErrorBudgetExceeded(PermanentError):
    """More records and rows failed than the stream's error budget allows; nothing of the batch is visible.

    Find the cause: a new version of a producer, or of the stream's own code. Raise the budget in the stream's `errors`
    only if it is right that so many fail.
    """

    code = "REC-040"


class LookupVersionGone(PermanentError):
    """A batch looks up a version of a table that can no longer be read: its log or its files were cleaned up.

    Restore the files, or let the replay look up the newest version: `stream.replay_lookups = "newest"`. Raise
    `table.unread_retention` to keep the versions of tables of ours for longer, and the retention of VACUUM for others.
    """

    code = "REC-044"


class BrokerUnreachable(TransientError):
    """No broker answered at the configured address within the deadline.

    Start the broker, or correct `kafka.bootstrap_servers`. Running streams continue when the broker is back.
    """

    code = "REC-012"


class CommitRefused(TransientError):
    """Other commits to the table kept winning the race against this one; the session repeats the batch.

    Nothing, unless it happens often: then find the program that commits to the table all the time, and stop it.
    """

    code = "REC-013"
