"""The code location of `recourse up`, with quick sensors."""

from __future__ import annotations

from orchestration import definitions
from tests.dagster.fakes.command import quickened

defs = quickened(definitions.defs)
