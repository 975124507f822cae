"""The code location with the fake driver in place of the session."""

from __future__ import annotations

from orchestration.location import definitions
from streaming_jobs.settings import Settings
from tests.dagster.fakes.command import fake_command, quickened

defs = quickened(definitions(Settings.load(), fake_command))
