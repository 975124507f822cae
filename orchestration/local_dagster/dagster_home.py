"""The folder that DAGSTER_HOME names: its configuration, rewritten at each start, and its storage."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import yaml

from orchestration.local_dagster.session_logs import SessionLogManager
from orchestration.recoveries import launchpad
from orchestration.sessions.ownership import KIND_TAG, QUALITY_KIND
from orchestration.sessions.supervisor import GRACE
from streaming_jobs.platform import ports
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import private_folder, write_atomic

LOCATION = launchpad.LOCATION
"""Name of the code location."""
CODE_SERVER_HOST = "127.0.0.1"


def prepare(settings: Settings) -> Path:
    """Write dagster.yaml and return the folder (mode 0700). Runs and events of earlier starts stay."""
    home = private_folder(settings.dagster_home)
    home.chmod(0o700)
    write_atomic(home / "dagster.yaml", yaml.safe_dump(_configuration(settings), sort_keys=False))
    # Created here once: two processes that create the same SQLite file at the same time stamp its schema twice, and
    # every later start fails on that.
    with dg.DagsterInstance.from_config(str(home)):
        pass
    return home


def write_workspace(home: Path, port: int) -> Path:
    """Write workspace.yaml, from which webserver and daemon read the address of the code server."""
    path = home / "workspace.yaml"
    server = {"host": CODE_SERVER_HOST, "port": port, "location_name": LOCATION}
    write_atomic(path, yaml.safe_dump({"load_from": [{"grpc_server": server}]}))
    return path


def code_server_port(home: Path) -> int:
    """The code server's port, the same at each start, because runs record it and are stopped through it."""
    path = home / "code_server_port"
    try:
        port = int(path.read_text())
    except (FileNotFoundError, ValueError):
        port = 0
    if not port or not ports.is_free(port, CODE_SERVER_HOST):
        port = ports.free_port(CODE_SERVER_HOST)
        write_atomic(path, str(port))
    return port


def longest_stop(settings: Settings) -> float:
    """The longest time that any session may take to stop, in seconds."""
    return max(settings.for_stream(name).stop_deadline.total_seconds() for name in ["", *settings.streams])


def _configuration(settings: Settings) -> dict[str, object]:
    return {
        "telemetry": {"enabled": False},
        "nux": {"enabled": False},
        "run_monitoring": {
            "enabled": True,
            "start_timeout_seconds": 180,
            # Longer than a session may take to stop; otherwise a run is shown as canceled while its driver still runs.
            "cancel_timeout_seconds": int(longest_stop(settings) + GRACE + 60),
            "poll_interval_seconds": 30,
        },
        "concurrency": {
            # One session of a job at a time. Granularity `run` counts runs in progress, so no slot can leak.
            "pools": {"granularity": "run", "default_limit": 1},
            # Sessions never end: the limit has to leave room for everything else.
            "runs": {
                "max_concurrent_runs": 100,
                # No pool: a session launched from a table's page has the table's checks in its plan, and would hold it.
                "tag_concurrency_limits": [{"key": KIND_TAG, "value": QUALITY_KIND, "limit": 1}],
            },
        },
        # The driver writes its own bounded log, which is shown; Dagster's copy of it would grow for ever.
        "compute_logs": {
            "module": SessionLogManager.__module__,
            "class": SessionLogManager.__name__,
            "config": {"logs": str(settings.logs)},
        },
        # A receiver or a broker that does not answer must not hold up keepalive.
        "sensors": {"use_threads": True, "num_workers": 4},
        # Keepalive ticks every ten seconds: most ticks do nothing and need not be stored.
        "retention": {
            "sensor": {"purge_after_days": {"skipped": 1, "success": 7, "failure": 14, "started": 1}},
            "schedule": {"purge_after_days": {"skipped": 7, "success": 30, "failure": 30, "started": 7}},
        },
    }
