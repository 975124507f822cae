"""The connection to the database, and its errors as ours.

The classes of SQLSTATE are those of "PostgreSQL Error Codes" in the manual. Of an error only the primary message is
shown: the detail may repeat a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from streaming_jobs.errors import ConfigurationError, PermanentError, TransientError
from streaming_jobs.settings import PostgresSettings

Connection = psycopg.Connection[tuple[Any, ...]]

_TRANSIENT = ("08", "40", "53", "55", "57", "58")
"""Connections, rollbacks such as deadlocks, resources, locks, intervention of an operator, the server's system."""
_READ_ONLY = "25006"
"""A standby: after a failover, another host of the URL may be the primary."""
_REFUSED = re.compile(
    r"authentication failed|no pg_hba.conf entry|does not exist|permission denied|no password supplied|certificate"
    r"|not permitted to log in|does not support SSL|sslmode|invalid (?:URI|connection option)",
)
"""A refused connection has no SQLSTATE in psycopg, only the server's text, after the names of host and database."""
_DURABLE = """CASE current_setting('synchronous_commit') WHEN 'off'
    THEN set_config('synchronous_commit', 'on', true) END"""
_APPLICATION = 63
"""Bytes of application_name."""


class DatabaseUnavailable(TransientError):
    """The PostgreSQL database does not answer, or has ended a transaction: a restart, a deadlock, a lock or time limit.

    Nothing to do while it is short: no row is lost or written twice, and the batch is repeated. If it lasts, check the
    server, `postgres.url`, and for locks the sessions in `pg_stat_activity`.
    """

    code = "REC-041"


class DatabaseRefused(PermanentError):
    """The PostgreSQL database refuses what the stream needs: a right, a column, a constraint, a value, the user.

    Give the right or correct the table, as the message says (docs/postgres_sink.md has the statements), then start the
    stream: the batch is repeated.
    """

    code = "REC-042"


@contextmanager
def database_errors(doing: str) -> Iterator[None]:
    """Raise DatabaseUnavailable or DatabaseRefused for an error of the database while `doing` something."""
    try:
        yield
    except psycopg.Error as error:
        raise classified(error, doing) from None


def classified(error: psycopg.Error, doing: str) -> DatabaseUnavailable | DatabaseRefused:
    state = error.sqlstate or ""
    words = (error.diag.message_primary or str(error)).strip().partition("\n")[0]
    text = f"{doing}: {words}{f' (SQLSTATE {state})' if state else ''}"
    if not state and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        if _REFUSED.search(str(error).rpartition("failed: ")[2]):
            return DatabaseRefused(text, "correct postgres.url, the user, its password or the server's pg_hba.conf")
        return DatabaseUnavailable(text, "check that the database runs, and the setting postgres.url")
    if state.startswith(_TRANSIENT) or state == _READ_ONLY:
        return DatabaseUnavailable(text, "check the server; nothing is lost, the batch is repeated")
    return DatabaseRefused(text, _remedy(state, error))


def _remedy(state: str, error: psycopg.Error) -> str:
    if state == "42501":
        return "GRANT the right to the stream's user; docs/postgres_sink.md lists the rights"
    if state.startswith("23"):
        name = f" {error.diag.constraint_name}" if error.diag.constraint_name else ""
        return f"the table has a constraint{name} that the rows break: drop it, or correct the function"
    if state.startswith("22"):
        return "a value does not fit its column: widen the column, or correct the function"
    return "correct the table or the server, then start the stream"


@dataclass
class Database:
    """A connection that is opened when it is needed. Not for two threads at once.

    Settings of a transaction are LOCAL, and no statement is prepared, so that it works through a pooler too.
    """

    settings: PostgresSettings
    stream: str
    _connection: Connection | None = field(default=None, init=False, repr=False)

    def name(self, table: str) -> sql.Identifier:
        """The table, with its schema, quoted."""
        return sql.Identifier(self.settings.database_schema, table)

    @contextmanager
    def transaction(self, doing: str, *, snapshot: bool = False) -> Iterator[Connection]:
        """A transaction; a lost connection is replaced before it. Raises DatabaseUnavailable and DatabaseRefused.

        With `snapshot`, all of its statements see one state of the database, and none can change it.
        After a failed commit nobody knows whether it was made: the next transaction reads that from the ledger.
        """
        with database_errors(doing):
            connection = self._alive()
            levels = psycopg.IsolationLevel
            connection.isolation_level = levels.REPEATABLE_READ if snapshot else levels.READ_COMMITTED
            connection.read_only = snapshot
            try:
                with connection.transaction():
                    self._set_limits(connection)
                    yield connection
            except psycopg.Error:
                self.close()
                raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _alive(self) -> Connection:
        """The connection; one that the server or the network has ended meanwhile is replaced."""
        if self._connection is not None:
            try:
                self._connection.execute("SELECT 1")
            except psycopg.OperationalError:
                self.close()
        if self._connection is None:
            self._connection = self._connected()
        return self._connection

    def _connected(self) -> Connection:
        if not self.settings.url:
            raise ConfigurationError(
                f"stream {self.stream} writes a table of PostgreSQL, and the setting postgres.url is empty",
                "set it, such as postgresql://USER@HOST/DATABASE?sslmode=verify-full",
            )
        return psycopg.connect(
            self.settings.url,
            password=self.settings.password.get_secret_value() or None,
            autocommit=True,  # transactions are opened by `transaction`
            prepare_threshold=None,
            connect_timeout=max(round(self.settings.connect_timeout.total_seconds()), 2),
            application_name=f"recourse {self.stream}".encode()[:_APPLICATION].decode(errors="ignore"),
            client_encoding="UTF8",
            keepalives_idle=30,
            keepalives_interval=10,
            keepalives_count=3,
        )

    def _set_limits(self, connection: Connection) -> None:
        """Bound each wait; a transaction whose client is gone ends, so that the next driver is not held up for ever.

        DateStyle and time zone decide how values are read that COPY sends as text. A commit that the server could lose
        is no commit: Spark's checkpoint goes on after it.
        """
        limit = f"{round(self.settings.transaction_timeout.total_seconds() * 1000)}"
        values = {
            "statement_timeout": limit,
            "lock_timeout": limit,
            "idle_in_transaction_session_timeout": limit,
            "datestyle": "ISO, YMD",
            "timezone": "UTC",
        }
        calls = [sql.SQL("set_config(%s, %s, true)") for _ in values]
        calls.append(sql.SQL(_DURABLE))
        connection.execute(
            sql.SQL("SELECT {}").format(sql.SQL(", ").join(calls)), [text for pair in values.items() for text in pair]
        )


def names(columns: Sequence[str]) -> sql.Composed:
    """The columns, quoted, with commas between them."""
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def facts(settings: PostgresSettings) -> tuple[str, str, bool, bool]:
    """Version and name of the database, whether it is on a standby, and whether the user may make tables in the schema.

    Raises DatabaseRefused for a schema that does not exist, and as `Database.transaction` does.
    """
    database = Database(settings, "doctor")
    try:
        with database.transaction("asking the database") as connection:
            row = connection.execute(
                "SELECT 'PostgreSQL ' || current_setting('server_version'), current_database(), pg_is_in_recovery(), "
                "has_schema_privilege(%s, 'CREATE')",
                [settings.database_schema],
            ).fetchone()
    finally:
        database.close()
    assert row is not None
    return row[0], row[1], row[2], row[3]
