"""`stream.require_deploy`: which code may start without the record of a deploy, and which may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.preflight.findings import not_deployed
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.state.stream_history import Deploy
from streaming_jobs.state.stream_record import CodeSince
from tests.support.worlds import CODE, PRIMARY, entry, fresh, record, settled, with_table

NEW = CodeVersion("2-0a1b2c3d4e5f", "0.1.0", "0a1b2c3d4e5f")
RAN = replace(settled(7), record=record(code=(CodeSince(CODE.hash, CODE.package, 1, 0, 1.7e9),)))
PUBLISHED = with_table(RAN, PRIMARY, entry=replace(entry(7), kind="publish", code=NEW))


def deployed(after: str) -> Deploy:
    return Deploy(1.7e9, CODE.hash, after, "anna")


@pytest.mark.parametrize(
    ("snapshot", "code", "last", "starts"),
    [
        (fresh(), NEW, None, True),
        (RAN, CODE, None, True),
        (RAN, CODE._replace(package="0.2.0"), None, True),
        (RAN, CODE, deployed("2-ffffffffffff"), True),
        (RAN, NEW, deployed(NEW.hash), True),
        (RAN, NEW, deployed(NEW.formerly), True),
        (PUBLISHED, NEW, None, True),
        (RAN, NEW, None, False),
        (RAN, NEW, deployed("2-ffffffffffff"), False),
        (with_table(RAN, PRIMARY, entry=replace(entry(7), kind="slice", code=NEW)), NEW, None, False),
    ],
)
def test_other_code_starts_only_after_a_deploy_or_a_recovery(
    snapshot: StreamSnapshot, code: CodeVersion, last: Deploy | None, starts: bool
) -> None:
    assert bool(list(not_deployed(snapshot, code, last))) is not starts
