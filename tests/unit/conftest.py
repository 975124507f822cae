"""Unit tests see what is synced, and in which order; they do not wait for the disk, since no file outlives them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """`os.fsync` refuses what is no open file, and returns at once; a test may put its own in place of it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    """The settings of this test's home; a module whose tests need more in it has a fixture of its own."""
    return settings()
