"""The paths of state schemas in a checkpoint that was moved or copied.

For `transformWithState`, Spark writes into `state/<operator>/_metadata/v2/<batch>` the absolute paths of the schemas of
its state, `state/<operator>/_stateSchema/...` in the same checkpoint. A savepoint, a recovery and a home that was moved
have them elsewhere, and the folder that they name may be gone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from streaming_jobs.files import sync, write_atomic

_PATH = re.compile(r'"file:[^"]*/state/(\d+)/_stateSchema/')


def point_to(checkpoint: Path) -> list[Path]:
    """Let a checkpoint's metadata name the schemas beside them; returns the files that were written anew.

    They are replaced, not written to: other checkpoints may share them as hard links.
    """
    here = json.dumps(f"file:{checkpoint.absolute()}", ensure_ascii=False)[:-1]
    fresh = checkpoint / ".state-metadata"  # not beside them, where Spark takes each name for a number
    written = []
    for file in checkpoint.glob("state/*/_metadata/v2/*"):
        if file.name.isdigit():
            text = file.read_text(encoding="utf-8")
            right = _PATH.sub(lambda found: f"{here}/state/{found[1]}/_stateSchema/", text)
            if right != text:
                file.with_name(f".{file.name}.crc").unlink(missing_ok=True)  # the checksum of what is replaced
                write_atomic(fresh, right)
                fresh.replace(file)
                sync(file.parent)
                written.append(file)
    return written
