"""The way of a batch's rows: through the driver, which is quicker, or through the executors, which hold more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streaming_jobs.errors import FunctionRaised, PermanentError, TransientError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.platform.failures import classify, larger_than_the_driver_takes
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.settings import StreamSettings

Route = Literal["driver", "executor"]


@dataclass
class DriverPathAttempts:
    """The batch on the driver path, noted on disk, so that a repetition after a crash takes the executors."""

    file: Path

    def died(self, txn: Txn) -> bool:
        """True if an earlier attempt at this batch began on the driver path and did not finish."""
        try:
            return self.file.read_text() == str(txn.version)
        except FileNotFoundError:
            return False

    def begin(self, txn: Txn) -> None:
        """Note that the batch takes the driver path. The note of a batch that is done matches no later one."""
        self.file.write_text(str(txn.version))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Forget the batch if the stream's function raises: no driver has died of it, so it may take any path again."""
        try:
            yield
        except Exception as error:
            if isinstance(classify(error), FunctionRaised):
                self.file.unlink(missing_ok=True)
            raise


def choose_path(
    settings: StreamSettings, traits: PlanTraits, *, records: int, bytes_per_record: float, died_before: bool
) -> Route:
    """Choose the driver or the executors for a batch.

    The number of records is known from the offsets before the batch runs. State can emit any number of rows;
    there the session's cap on result size stops a batch that does not fit, and its repetition takes the executors.
    An unknown operator may multiply rows or keep state, so its rows come to the driver only if the setting `path`
    is driver.
    """
    if settings.path != "auto":
        return settings.path
    if died_before or traits.unknown or (traits.multiplies and records > 10_000):
        return "executor"
    fits = records * bytes_per_record <= settings.driver_path_max_mb << 20
    return "driver" if traits.stateful or fits else "executor"


@contextmanager
def fits_the_driver(settings: StreamSettings, batch: int) -> Iterator[None]:
    """Translate the refusal by the session's cap on result size: this batch's repetition takes the executors."""
    try:
        yield
    except Exception as error:
        if not larger_than_the_driver_takes(error):
            raise
        if settings.path == "driver":
            raise PermanentError(
                f"batch {batch} does not fit the driver, and the setting `path` keeps it there",
                "set path to auto, or lower max_offsets_per_trigger",
            ) from error
        raise TransientError(
            f"batch {batch} did not fit the driver; it is repeated through the executors",
            "lower max_offsets_per_trigger if this comes often",
        ) from error
