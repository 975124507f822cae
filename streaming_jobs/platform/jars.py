"""The jars of Spark and of the embedded broker: each pinned by SHA-256, fetched once, then used without a network.

`jars.lock` names every jar; nothing is resolved when the streams run. A missing jar is copied from the local
Maven repository if the file there is the one the lock names, else fetched with jgo, and stored in our cache (one
per user). Every jar is hashed before each use, which takes a tenth of a second for all of them.

A jar that differs from the lock is refused and left where it is, so that it can be examined. To fetch it anew, delete
it or run `python -m streaming_jobs.platform.jars fetch --again`. The local Maven repository is only read: it belongs to
other programs too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from streaming_jobs.errors import SetupError
from streaming_jobs.settings import Settings
from streaming_jobs.storage import locks

JarSet = Literal["spark", "s3", "broker", "peers"]
Progress = Callable[[str, int, int], None]
"""Called as (file name, bytes done, bytes in all) each time a jar has arrived; only when something is fetched."""
Fetch = Callable[["Jar", Path], Path]
"""Brings one jar into a scratch folder and returns its path; may raise anything."""

LOCK = "jars.lock"
_AT_ONCE = 4
_ATTEMPTS = 3
_FETCHING = ".fetching-"


@dataclass(frozen=True)
class Jar:
    """One line of the lock; `size` in bytes, `sha256` as hex digits."""

    set: str
    group: str
    artifact: str
    version: str
    size: int
    sha256: str

    @property
    def coordinate(self) -> str:
        """`group:artifact:version`."""
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def file(self) -> str:
        """Name of the file, the same as in a Maven repository."""
        return f"{self.artifact}-{self.version}.jar"

    @property
    def maven_path(self) -> Path:
        """Its path in a Maven repository, relative to the root."""
        return Path(*self.group.split("."), self.artifact, self.version, self.file)

    def matches(self, path: Path) -> bool:
        """True if the file at `path` is exactly this jar; False if there is none or it cannot be read."""
        try:
            if path.stat().st_size != self.size:
                return False
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return False


def spark_jars(settings: Settings, *, progress: Progress | None = None) -> list[Path]:
    """The jars of the Spark session, verified; fetches what is missing. Raises SetupError."""
    return ensure(settings, locked("spark"), progress=progress)


def broker_jars(settings: Settings, *, progress: Progress | None = None) -> list[Path]:
    """The jars of the embedded broker, verified; fetches what is missing. Raises SetupError."""
    return ensure(settings, locked("broker"), progress=progress)


def locked(which: JarSet) -> list[Jar]:
    """The lock's jars of one set, in its order."""
    text = resources.files("streaming_jobs.platform").joinpath(LOCK).read_text(encoding="utf-8")
    return [jar for jar in parse(text) if jar.set == which]


def parse(text: str) -> Iterator[Jar]:
    """Read a lock: one line per jar, `set coordinate bytes sha256`; `#` begins a comment."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            set_, coordinate, size, sha256 = line.split()
            group, artifact, version = coordinate.split(":")
            yield Jar(set_, group, artifact, version, int(size), sha256)


def cache(settings: Settings) -> Path:
    """The folder that holds the jars: the setting `jars_dir`, else one per user."""
    if settings.jars_dir is not None:
        return settings.jars_dir.expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("recourse") / "jars"


def ensure(
    settings: Settings, jars: Iterable[Jar], *, progress: Progress | None = None, fetch: Fetch | None = None
) -> list[Path]:
    """Paths of the jars, all just verified; raises SetupError if a jar is damaged or cannot be fetched."""
    folder, wanted = cache(settings), list(jars)
    missing, damaged = examine(folder, wanted)
    if damaged:
        raise _damaged(folder, damaged)
    if missing:
        with _sole_fetcher(folder) as scratch:
            # Another process may have fetched them while this one waited.
            missing, damaged = examine(folder, missing)
            if damaged:
                raise _damaged(folder, damaged)
            _fetch_all(folder, scratch, missing, progress, fetch or _from_maven(settings))
    return [folder / jar.file for jar in wanted]


def fetch_again(settings: Settings, *, progress: Progress | None = None, fetch: Fetch | None = None) -> list[Jar]:
    """Replace the damaged jars of a session and of the broker in our cache; returns them. Raises SetupError."""
    folder = cache(settings)
    with _sole_fetcher(folder) as scratch:
        _, damaged = examine(folder, [*locked("spark"), *locked("s3"), *locked("broker")])
        _fetch_all(folder, scratch, damaged, progress, fetch or _from_maven(settings))
    return damaged


def examine(folder: Path, jars: Iterable[Jar]) -> tuple[list[Jar], list[Jar]]:
    """Hash the jars in the folder; returns (missing, damaged). Uses no network."""
    wanted = list(jars)
    # Existence is checked first: a jar that another process adds meanwhile counts as missing, never as damaged.
    missing = [jar for jar in wanted if not os.path.lexists(folder / jar.file)]
    present = [jar for jar in wanted if jar not in missing]
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # hashing lets go of the interpreter lock
        right = list(pool.map(lambda jar: jar.matches(folder / jar.file), present))
    return missing, [jar for jar, ok in zip(present, right, strict=True) if not ok]


def _damaged(folder: Path, damaged: list[Jar]) -> SetupError:
    names = ", ".join(str(folder / jar.file) for jar in damaged)
    return SetupError(
        f"not the jar that jars.lock names (another SHA-256): {names}",
        "delete the file, and the next start fetches it anew; for all of them at once run "
        "`python -m streaming_jobs.platform.jars fetch --again`",
    )


@contextmanager
def _sole_fetcher(folder: Path) -> Iterator[Path]:
    """One fetching process at a time; yields an empty scratch folder on the cache's disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()  # readable for all who share the cache
    except OSError as error:
        raise SetupError(
            f"cannot write to the jar cache {folder}: {error.strerror}", "set RECOURSE_JARS_DIR to a folder of yours"
        ) from error
    with locks.locked(folder / ".lock"):
        for left_over in folder.glob(f"{_FETCHING}*"):  # of a fetcher that was killed: we hold its lock now
            shutil.rmtree(left_over, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=_FETCHING, dir=folder))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _fetch_all(folder: Path, scratch: Path, jars: list[Jar], progress: Progress | None, fetch: Fetch) -> None:
    total = sum(jar.size for jar in jars)
    done = 0
    if progress and jars:
        progress("", 0, total)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        arriving = {pool.submit(_bring, jar, folder, scratch, fetch): jar for jar in jars}
        try:
            for arrived in as_completed(arriving):
                arrived.result()
                done += arriving[arrived].size
                if progress:
                    progress(arriving[arrived].file, done, total)
        except BaseException:
            for waiting in arriving:
                waiting.cancel()
            raise


def _bring(jar: Jar, folder: Path, scratch: Path, fetch: Fetch) -> None:
    """Fetch, verify, and only then give the file its name, so that readers never see a partial file."""
    arrived = _attempt(jar, scratch, fetch)
    if not jar.matches(arrived):
        raise SetupError(
            f"the file that was fetched for {jar.coordinate} is not the jar that jars.lock names (another SHA-256)",
            "check the mirror or proxy between this machine and the Maven repository; the file was not kept",
        )
    with arrived.open("rb") as file:
        os.fsync(file.fileno())
    arrived.replace(folder / jar.file)


def _attempt(jar: Jar, scratch: Path, fetch: Fetch) -> Path:
    reason = ""
    for attempt in range(_ATTEMPTS):
        # A new folder for each attempt: jgo would take the file of a failed one for complete.
        room = scratch / f"{jar.file}.{attempt}"
        room.mkdir()
        try:
            return fetch(jar, room)
        except Exception as error:  # noqa: BLE001  jgo and its HTTP client raise many kinds; all mean "not fetched"
            # The text may hold the mirror's address with a password in it.
            reason = type(error).__name__ if "://" in str(error) else f"{type(error).__name__}: {error}"
            time.sleep(attempt * 0.5)
    raise SetupError(
        f"could not fetch {jar.coordinate}: {reason}",
        "check the network; behind a company mirror set RECOURSE_MAVEN_REPOSITORY to its address",
    )


def _from_maven(settings: Settings) -> Fetch:
    """A fetch from the local Maven repository if the file in it is the locked one, else from a remote repository."""
    from jgo.config import GlobalSettings
    from jgo.maven import MavenContext

    known = GlobalSettings.load()  # honours M2_REPO and jgo's own configuration file
    mirror = settings.maven_repository.get_secret_value()
    remotes = {"mirror": mirror.rstrip("/")} if mirror else (known.repositories or None)

    def fetch(jar: Jar, room: Path) -> Path:
        local = known.repo_cache / jar.maven_path
        if jar.matches(local):
            return Path(shutil.copyfile(local, room / jar.file))
        context = MavenContext(repo_cache=room, remote_repos=remotes, timeout=60)
        return context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()

    return fetch


def main(arguments: list[str]) -> int:
    """`fetch` completes the cache, `fetch --again` also replaces damaged jars, `lock` rewrites jars.lock.

    `fetch s3` fetches what a session with its state on S3 needs beside, for a machine without a network.
    """
    settings = Settings.load()
    if arguments == ["lock"]:
        from streaming_jobs.platform.jars_lock import write_lock

        write_lock(Path(__file__).with_name(LOCK))
    elif arguments in (["fetch"], ["fetch", "--again"], ["fetch", "s3"]):
        try:
            if "--again" in arguments:
                fetch_again(settings, progress=_bar)
            wanted = locked("s3") if "s3" in arguments else [*locked("spark"), *locked("broker")]
            ensure(settings, wanted, progress=_bar)
        except SetupError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    else:
        print("usage: python -m streaming_jobs.platform.jars fetch [--again | s3] | lock", file=sys.stderr)
        return 2
    return 0


def _bar(name: str, done: int, total: int) -> None:
    width = 30 * done // total
    line = f"jars [{'#' * width}{'.' * (30 - width)}] {done / 1e6:5.1f} of {total / 1e6:.1f} MB {name[:40]:40}"
    if sys.stderr.isatty():
        print(f"\r{line}", end="" if done < total else "\n", file=sys.stderr, flush=True)
    elif done in (0, total):
        print(line.rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
