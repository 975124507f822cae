"""The last good job definitions, saved in the home and used while the job YAML is broken.

Dagster loads the code location again on a reload, or after the death of its server. Without definitions there
would be no job, no sensor and no keepalive, only because a line of YAML is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from pydantic import TypeAdapter

from orchestration.bundle import job_yaml
from orchestration.bundle.job import Bundle
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import private_folder, write_atomic

log = structlog.get_logger()

T = TypeVar("T")

CORRECT = "correct it, then reload the code location"


@dataclass(frozen=True)
class _Saved:
    """The saved definitions; `shipped`: they came with the package, wherever that was installed (None: not written)."""

    bundle: Bundle
    shipped: bool | None


def path(settings: Settings) -> Path:
    return settings.dagster_home / "jobs.json"


def read(settings: Settings, topology: Topology) -> Bundle:
    """The bundle of the present job YAML; raises ConfigurationError with file and line where it cannot be used."""
    file = job_yaml.find(settings)
    bundle = job_yaml.load(file, settings.target)
    if not job_yaml.is_shipped(file):
        return bundle
    if settings.jobs is None:
        _refuse_in_place_of_own(settings, bundle)
    return job_yaml.for_streams(bundle, list(topology.streams))


def made_of_now(settings: Settings, topology: Topology, make: Callable[[Bundle], T]) -> tuple[Bundle, T]:
    """The present bundle and what `make` builds from it; every error of the two becomes a ConfigurationError."""
    where = "the job YAML"
    try:
        bundle = read(settings, topology)
        where = str(bundle.file)
        return bundle, make(bundle)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{where}: cannot be used: {_words(error)}", CORRECT) from error


def use(settings: Settings, topology: Topology, make: Callable[[Bundle], T]) -> T:
    """Returns what `make` builds from the present job YAML or, where that cannot be used, from the last good one.

    Raises the ConfigurationError of the present one when the last good one cannot be used either.
    """
    try:
        bundle, made = made_of_now(settings, topology, make)
    except ConfigurationError as error:
        saved = _load(settings)
        if saved is None:
            raise
        log.error("job YAML refused, last good one in use", found=error.found, next=error.next_step)
        try:
            return make(saved.bundle)
        except Exception as other:  # noqa: BLE001  (streams have changed too, or Dagster has)
            log.error("last good job YAML refused too", found=_words(other))
            raise error from None  # a person can correct the present error
    _keep(settings, bundle)
    return made


def fault(settings: Settings, topology: Topology, make: Callable[[Bundle], object]) -> ConfigurationError | None:
    """What is wrong with the present job YAML; None if it can be used. Raises nothing."""
    try:
        made_of_now(settings, topology, make)
    except ConfigurationError as error:
        return ConfigurationError(error.found, error.next_step or CORRECT)
    return None


@dataclass
class PresentFault:
    """`fault` for sensors: the definitions are rebuilt only when the jobs have changed."""

    settings: Settings
    topology: Topology
    make: Callable[[Bundle], object]
    _known: tuple[Bundle, ConfigurationError | None] | None = None

    def __call__(self) -> ConfigurationError | None:
        with suppress(Exception):  # `fault` says what it is
            bundle = read(self.settings, self.topology)
            if self._known is None or self._known[0] != bundle:
                self._known = bundle, fault(self.settings, self.topology, self.make)
            return self._known[1]
        return fault(self.settings, self.topology, self.make)


def _refuse_in_place_of_own(settings: Settings, shipped: Bundle) -> None:
    """Refuse the shipped jobs, which always run, where the project's own file was moved away."""
    saved = _load(settings)
    if saved is None or saved.shipped or (saved.shipped is None and saved.bundle.name == shipped.name):
        return
    raise ConfigurationError(
        f"the jobs of this home are those of {saved.bundle.file}; it is not found from {Path.cwd()}, "
        f"and {shipped.file}, which comes with Recourse, is not taken in its place",
        f"put it back, or set `jobs` to its path; to run the jobs that come with Recourse, remove {path(settings)}",
    )


def _words(error: BaseException) -> str:
    """Class and text of an error and of its causes: Dagster puts the real reason into the cause."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text}; from {_words(error.__cause__)}" if error.__cause__ is not None else text


def _keep(settings: Settings, bundle: Bundle) -> None:
    saved = _Saved(bundle, job_yaml.is_shipped(bundle.file))
    value = TypeAdapter(_Saved).dump_python(saved, mode="json")
    text = json.dumps({**value["bundle"], "shipped": value["shipped"]}, indent=1, sort_keys=True)
    file = path(settings)
    try:
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            private_folder(file.parent)
            write_atomic(file, text)
    except OSError as error:  # a copy that cannot be written must not stop what can be loaded
        log.warning("job definitions not saved", file=str(file), reason=str(error))


def _load(settings: Settings) -> _Saved | None:
    try:
        value = json.loads(path(settings).read_text(encoding="utf-8"))
        shipped = value.pop("shipped", None)
        return TypeAdapter(_Saved).validate_python({"bundle": value, "shipped": shipped})
    except (OSError, ValueError, AttributeError) as error:
        log.info("no saved job definitions", reason=repr(error))
        return None
