"""A second S3 server for tests, of other people's making: VersityGW over a folder.

The server of moto holds a race's conditions only because our recorder lets one write through at a time. VersityGW
keeps them itself, so that a proof of races says something about stores, too. `versitygw/go.mod` names its version, and
`go.sum` beside it the checksums of all that Go compiles: a minute and a half of a core the first time, then seconds.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from streaming_jobs.platform.ports import free_port
from tests.support.store_server import BUCKET, StoreServer, server_at, without_credentials

_MODULE = Path(__file__).with_name("versitygw")
_PROGRAM = "github.com/versity/versitygw/cmd/versitygw"
_START = 30.0


@contextmanager
def versity_server(folder: Path) -> Iterator[StoreServer]:
    """Start the server at a free port of 127.0.0.1, with its objects in `folder`; it ends with the block.

    It records no requests and makes none fail.
    """
    program = _built(folder / "versitygw")
    (bucket := folder / "objects" / BUCKET).mkdir(parents=True)
    port = free_port()
    server = replace(server_at(f"http://127.0.0.1:{port}"), recorded=False)
    log = folder / "versitygw.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(program), "--port", f"127.0.0.1:{port}", "--region", server.options["aws_region"], "--quiet"),
                *("--access", server.options["aws_access_key_id"]),
                *("--secret", server.options["aws_secret_access_key"]),
                *("posix", str(bucket.parent)),
            ],
            env=without_credentials(),
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + _START
        while not _answers(server.endpoint):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


def _built(program: Path) -> Path:
    """Compile the server; a missing Go fails the test, which would prove nothing if it were skipped."""
    go = shutil.which("go")
    assert go, f"{_PROGRAM} is compiled by Go, of the version in {_MODULE / 'go.mod'}: install it (https://go.dev/dl)"
    command = [go, "build", "-mod=readonly", "-ldflags=-s -w", "-o", str(program), _PROGRAM]
    built = subprocess.run(command, cwd=_MODULE, check=False, capture_output=True, text=True)
    assert built.returncode == 0, f"{' '.join(command)}: {built.stderr}"
    return program


def _answers(endpoint: str) -> bool:
    try:
        urlopen(endpoint, timeout=5).close()
    except HTTPError:  # it refuses who signs nothing
        return True
    except OSError:
        return False
    return True
