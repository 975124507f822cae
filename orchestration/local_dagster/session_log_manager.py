"""Shows the log of a session as the stderr of its run in Dagster's pages.

Dagster's own manager would copy a driver's output to a file without a bound. This one stores nothing: it reads the
session's bounded log (`sessions/run_logs.py`) when somebody looks. Runs that are no session have no output, as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dagster._core.storage.cloud_storage_compute_log_manager import PollingComputeLogSubscriptionManager
from dagster._core.storage.compute_log_manager import CapturedLogMetadata, CapturedLogSubscription, ComputeIOType
from dagster._core.storage.noop_compute_log_manager import NoOpComputeLogManager
from dagster._serdes import ConfigurableClassData

from orchestration.sessions.run_logs import RunLogs


class SessionLogManager(NoOpComputeLogManager):
    """A compute log manager over the logs of sessions in the folder `logs`."""

    def __init__(self, logs: str, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__(inst_data)
        self._logs = RunLogs(Path(logs))
        self._subscriptions = PollingComputeLogSubscriptionManager(self)  # type: ignore[no-untyped-call]

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """The folder of the logs."""
        return {"logs": str}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        """The manager that dagster.yaml describes."""
        return cls(inst_data=inst_data, **config_value)

    def is_capture_complete(self, log_key: Sequence[str]) -> bool:
        """True once the run is over, or unknown."""
        run = self._instance.get_run_by_id(log_key[0]) if self.has_instance else None
        return run is None or run.is_finished

    def get_log_data_for_type(
        self, log_key: Sequence[str], io_type: ComputeIOType, offset: int, max_bytes: int | None
    ) -> tuple[bytes | None, int]:
        """A part of the run's log as its stderr, and the offset after it."""
        if io_type is not ComputeIOType.STDERR:
            return None, 0
        return self._logs.read(log_key[0], offset, max_bytes)

    def get_log_metadata(self, log_key: Sequence[str]) -> CapturedLogMetadata:
        """The path of the log."""
        path = self._logs.path(log_key[0])
        return CapturedLogMetadata(stderr_location=str(path) if path else None)

    def subscribe(self, log_key: Sequence[str], cursor: str | None = None) -> CapturedLogSubscription:
        """The log as it grows, read again and again while somebody looks."""
        subscription = CapturedLogSubscription(self, log_key, cursor)
        self._subscriptions.add_subscription(subscription)
        return subscription

    def unsubscribe(self, subscription: CapturedLogSubscription) -> None:
        """End a subscription."""
        self._subscriptions.remove_subscription(subscription)

    def dispose(self) -> None:
        """End the thread of the subscriptions."""
        self._subscriptions.dispose()
