"""The sections of what runs beside the streams: schema registry, database, Dagster, metrics, lineage, alerts."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from streaming_jobs.settings_sections import Duration, FolderOrUrl, Names, Section, Span, as_list
from streaming_jobs.text import commands


def _of_names(parts: list[str]) -> list[str]:
    for part in parts:
        if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", part):
            raise ValueError(f"{part!r} is not a letter, then letters, digits and _")
    return parts


KeyPrefix = Annotated[Names, AfterValidator(_of_names)]


def _checked_endpoint(url: str) -> str:
    if url and not re.match(r"https?://[^/\s@]+(/|$)", url):
        raise ValueError("is no http or https URL without a user; OTEL_EXPORTER_OTLP_HEADERS has what logs in")
    return url


def _checked_services(urls: list[SecretStr]) -> list[SecretStr]:
    for number, url in enumerate(urls, 1):
        if not re.match(r"[A-Za-z0-9_]+://\S", url.get_secret_value()):
            raise ValueError(f"item {number} is no URL of apprise, such as slack://TOKEN/#alerts")
    return urls


Secrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(as_list), AfterValidator(_checked_services)]
"""URLs of services, never shown: they hold tokens."""


def _checked_registry(urls: list[str]) -> list[str]:
    for url in urls:
        if not re.match(r"https?://[^/\s@]+(/|$)", url):
            raise ValueError("is no http or https URL without a user; registry.username and .password log in")
    return [url.rstrip("/") for url in urls]


class RegistrySettings(Section):
    """The schema registry of formats such as Avro: any that has the interface of Confluent's (docs/registry.md)."""

    url: Annotated[Names, AfterValidator(_checked_registry)] = Field(
        [], description="address of the registry, or several of the same one, asked in turn"
    )
    username: str = Field("", description="the user, or the id of an API key")
    password: SecretStr = Field(SecretStr(""), description="the user's password, or the key's secret; never shown")
    token: SecretStr = Field(SecretStr(""), description="a bearer token, in place of a user; never shown")
    ssl_ca_location: Path | None = Field(None, description="PEM file of the certificate authority")
    ssl_certificate_location: Path | None = Field(None, description="PEM file of the client certificate and its key")
    timeout: Span = Field(timedelta(seconds=10), description="time limit of one request to the registry")
    unknown_for: Duration = Field(
        timedelta(minutes=5),
        description="time for which a stream waits for a schema that the registry does not know; then its records are "
        "dead letters",
    )
    register_schemas: bool = Field(
        False, description="register the schemas of topics that streams write; false: they have to be registered"
    )
    schemas_dir: FolderOrUrl | None = Field(
        None, description="schemas that streams have used: a folder, or a URL; default <state>/_schemas"
    )

    @model_validator(mode="after")
    def _one_way_to_log_in(self) -> Self:
        if self.token.get_secret_value() and self.username:
            raise ValueError("registry.token and registry.username are both set; one of them logs in")
        return self


_LOCAL_HOSTS = ("", "localhost", "127.0.0.1", "::1")


class PostgresSettings(Section):
    """The PostgreSQL database whose tables streams write (docs/postgres_sink.md)."""

    url: str = Field("", description="postgresql://USER@HOST:PORT/DATABASE?sslmode=verify-full, without a password")
    password: SecretStr = Field(
        SecretStr(""), description="the user's password; empty: as libpq finds it, such as in ~/.pgpass; never shown"
    )
    database_schema: str = Field(
        "public",
        pattern=r"^[a-z_][a-z0-9_]{0,62}$",
        description="schema of the tables, and of the ledger of their batches",
    )
    connect_timeout: Span = Field(timedelta(seconds=10), description="time limit of a connection attempt")
    transaction_timeout: Span = Field(
        timedelta(minutes=5),
        description="time limit of one statement, and of the wait for another driver's transaction",
    )

    @model_validator(mode="after")
    def _says_how_to_connect(self) -> Self:
        if not self.url:
            return self
        parts = urlsplit(self.url)
        options = parse_qs(parts.query)
        if parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("postgres.url is no URL of a database; it begins with postgresql://")
        if parts.password is not None or "password" in options:
            raise ValueError("postgres.url has a password; postgres.password has it, which is never shown")
        host = options.get("host", [parts.hostname or ""])[-1]
        if host not in _LOCAL_HOSTS and not host.startswith("/") and "sslmode" not in options:
            raise ValueError(
                "postgres.url names another machine and does not say whether it is trusted: add sslmode=verify-full "
                "and sslrootcert=FILE, or sslmode=disable in a network of your own"
            )
        return self


class DagsterSettings(Section):
    """The Dagster processes that `recourse up` starts, and how sessions report to them."""

    host: str = Field("127.0.0.1", description="address that the UI listens on; the UI asks for no password")
    port: int = Field(3000, ge=0, le=65535, description="port of the UI; 0: a free port")
    observe_every: Duration = Field(
        timedelta(seconds=60), description="time between two reports on a table that its stream writes"
    )
    materialize_every: Duration = Field(
        timedelta(minutes=1), description="time between two materialisations of a table"
    )
    stale_after: Span = Field(
        timedelta(seconds=60), description="age of the last heartbeat at which a session counts as dead"
    )
    max_session: Span = Field(
        timedelta(hours=24), description="age at which a continuous session ends and the next begins"
    )
    keep_runs: Span = Field(timedelta(days=7), description="retention of finished runs and of tables' figures")
    own_instance: bool = Field(
        False,
        description=(
            "the Dagster instance has no other code location: Recourse deletes old events of tables from its storage; "
            f"`{commands.up()}` sets it"
        ),
    )
    keepalive: bool = Field(True, description="start continuous jobs automatically, and restart them after a failure")
    key_prefix: KeyPrefix = Field(
        [],
        description="first parts of the key of every asset, and of every name of a job, sensor or schedule in Dagster",
    )


class MetricsSettings(Section):
    """Figures of the streams for Prometheus and for OpenTelemetry (`recourse metrics`)."""

    host: str = Field("127.0.0.1", description="address that the endpoint listens on; it asks for no password")
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description=f"port of the endpoint; 0: `{commands.up()}` has none, and `{commands.metrics()}` takes 9464",
    )
    otlp_endpoint: Annotated[str, AfterValidator(_checked_endpoint)] = Field(
        "", description="http or https URL that also receives the figures by OTLP, such as http://host:4318/v1/metrics"
    )
    otlp_every: Span = Field(timedelta(seconds=30), description="time between two deliveries by OTLP")


class McpSettings(Section):
    """What an assistant may do through `recourse mcp`."""

    allow: Annotated[list[Literal["read", "plan", "apply"]], NoDecode, BeforeValidator(as_list)] = Field(
        ["read", "plan"],
        description="tools that are offered: read; plan (and preview: no table changes); apply (and undo)",
    )


class LineageSettings(Section):
    """OpenLineage events of streams, for a catalog such as Marquez or DataHub."""

    url: str = Field("", description="address of the receiver, to which Dagster's sensor posts; empty: none")
    api_key: SecretStr = Field(SecretStr(""), description="key for the receiver, sent as a bearer token")
    namespace: str = Field("recourse", description="namespace of the jobs, which are the streams")
    every: Duration = Field(timedelta(minutes=1), description="time between two looks, each of which sends new events")


class QualitySettings(Section):
    """Suites of expectations on tables, their runs and their history (`recourse quality`)."""

    suites: Names = Field([], description="packages or modules that declare suites, besides those of `flows`")
    pandas_rows: int = Field(
        500_000, ge=0, description="most rows of a slice that pandas evaluates; Spark evaluates larger slices"
    )
    docs_kept: int = Field(20, ge=1, description="Data Docs pages kept for each suite")
    history_days: int = Field(90, ge=1, description="age in days at which validations leave the history")
    every: Duration = Field(timedelta(minutes=5), description="time between two runs of a suite by Dagster's schedule")
    show_rows: bool = Field(
        True, description="show failing rows in Dagster; false: only in the history, Data Docs and the terminal"
    )
    webhook: SecretStr = Field(
        SecretStr(""), description="URL that receives alerts of checks that turn red or green; empty: none"
    )
    webhook_severity: Literal["warning", "critical"] = Field(
        "warning", description="lowest severity that is sent to the webhook: warning (yellow) or critical (red)"
    )
    services: Secrets = Field(
        [], description="URLs of apprise that receive alerts: Slack, Teams, PagerDuty, Opsgenie, ...; never shown"
    )
    services_severity: Literal["warning", "critical"] = Field(
        "warning", description="lowest severity that is sent to these services"
    )
    email_to: Names = Field([], description="addresses that receive alerts by e-mail; empty: none")
    email_severity: Literal["warning", "critical"] = Field(
        "critical", description="lowest severity that is sent by e-mail"
    )
    email_from: str = Field("recourse@localhost", description="sender of the e-mails")
    smtp_host: str = Field("127.0.0.1", description="mail server that accepts the e-mails")
    smtp_port: int = Field(25, ge=1, le=65535, description="port of the mail server")
    smtp_security: Literal["none", "starttls", "tls"] = Field(
        "none", description="encryption of the connection to the mail server"
    )
    smtp_user: str = Field("", description="user for the mail server; empty: no log-in")
    smtp_password: SecretStr = Field(SecretStr(""), description="password of that user")
    alert_after: Duration = Field(
        timedelta(minutes=1),
        description="an alert is sent if a check has been worse for this time; 0: at once",
    )
    remind_every: Duration = Field(
        timedelta(hours=4), description="time between reminders of a check that stays bad; 0: no reminders"
    )
    fresh_share: float = Field(
        0.99, ge=0, lt=1, description="share of the time in which tables are to be as fresh as their `fresh_within`"
    )
    free_disk_mb: int = Field(
        2048, ge=0, description="free space of home, state and tables, MB; less is yellow, a fourth of it red; 0: any"
    )
    ui_url: str = Field("", description="address of Dagster's UI, to which alerts link; empty: no links")
    heartbeat_url: SecretStr = Field(
        SecretStr(""),
        description="URL that Dagster's daemon calls every 30 seconds; its service reports missing calls; empty: none",
    )

    @model_validator(mode="after")
    def _log_in_is_encrypted(self) -> Self:
        if self.smtp_user and self.smtp_security == "none":
            raise ValueError("smtp_user goes with smtp_security: starttls or tls, since the password would be readable")
        return self
