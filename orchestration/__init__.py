"""Starting, watching and restarting sessions: Dagster definitions, the supervisor, the job YAML, the command line.

Open `definitions.py` first. The only package that imports Dagster, typer and rich. `build_defs` makes its definitions
for a code location of yours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestration.location import build_defs

__all__ = ["build_defs"]


def __getattr__(name: str) -> Any:
    """Import `build_defs`, and Dagster, at its first use: the command line needs neither."""
    if name != "build_defs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestration.location import build_defs

    return build_defs
