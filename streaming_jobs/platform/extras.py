"""The extras of the distribution: packages that a part of the commands needs, and the error where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from streaming_jobs.errors import SetupError

EXTRAS = {
    "metrics": ("prometheus_client",),
    "otlp": ("opentelemetry",),
    "alerts": ("apprise",),
}
"""The packages, by their import names, that each extra of pyproject.toml brings."""


class MissingExtra(SetupError):
    """The command needs a package that is installed only with an extra of `recourse-streams`, such as apprise.

    Install the extra that the message names.
    """

    code = "REC-037"

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
    return all(find_spec(package) is not None for package in EXTRAS[extra])
