"""The properties of Kafka's client in a file, for the Python processes that Spark starts.

Credentials are neither in options nor in plans nor in what is pickled: those name the file only. It can be read by its
owner alone, and lies in a scratch folder of the session (`streaming_jobs/scratch.py`).
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import TransientError
from streaming_jobs.scratch import scratch
from streaming_jobs.sources.connection import LIBRDKAFKA, client_config

if TYPE_CHECKING:  # each Python process of a session imports this module, and settings take a tenth of a second
    from streaming_jobs.settings import Settings

_TIMEOUT = "recourse.timeout.seconds"


def client_file(settings: Settings, bootstrap: str) -> Path:
    """A new file for the cluster at `bootstrap`, in the folder of this process's scratch files."""
    values = {key: value for key, value in client_config(settings.kafka, bootstrap).items() if key != "logger"}
    values[_TIMEOUT] = settings.kafka.timeout.total_seconds()
    folder = scratch(settings.home, "kafka").folder
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="client-", suffix=".json")  # for its owner alone
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(values, file)
    return Path(name)


def read_client_file(path: Path) -> tuple[dict[str, Any], timedelta]:
    """The properties, and the deadline of a read; raises TransientError if the session that wrote them has ended."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TransientError(f"the Kafka client's properties are gone: {path}", "the session has ended") from error
    timeout = timedelta(seconds=float(values.pop(_TIMEOUT)))
    return {**values, "logger": LIBRDKAFKA}, timeout
