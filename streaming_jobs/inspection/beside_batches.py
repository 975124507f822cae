"""What is beside the batches: lost files, commits of others, and what checkpoint and log no longer tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from streaming_jobs.inspection.attribution import Attribution, BatchWrite
from streaming_jobs.inspection.checkpoint_history import CheckpointHistory
from streaming_jobs.inspection.findings import InspectionFinding, numbers_words
from streaming_jobs.inspection.table_history import TableHistory
from streaming_jobs.text.spelling import counted, instant_words
from streaming_jobs.verification.offset_ranges import merged


def beside_batches(
    table: TableHistory, checkpoints: Sequence[CheckpointHistory], attribution: Attribution
) -> Iterator[InspectionFinding]:
    """All of it, about one table and the checkpoints that wrote it."""
    yield from _damage(table, checkpoints)
    yield from _unknown(table, checkpoints, attribution)
    yield from _lost_files(table, attribution)
    yield from _foreign(table, attribution)


def _damage(table: TableHistory, checkpoints: Sequence[CheckpointHistory]) -> Iterator[InspectionFinding]:
    found = partial(InspectionFinding, table=table.name)
    for words in table.trouble:
        yield found("damaged", "certain", "log", f"table {table.name}: {words}")
    for checkpoint in checkpoints:
        for words in checkpoint.trouble:
            yield found(
                "damaged",
                "certain",
                "checkpoint",
                f"checkpoint {checkpoint.name}: {words}",
                checkpoint=checkpoint.folder,
            )


def _unknown(
    table: TableHistory, checkpoints: Sequence[CheckpointHistory], attribution: Attribution
) -> Iterator[InspectionFinding]:
    found = partial(InspectionFinding, table=table.name)
    if table.cut:
        since = instant_words(table.begun)
        yield found(
            "unknown", "certain", "log_cut",
            f"the log begins at version {table.first} of {since}: of earlier versions nothing is known",
        )  # fmt: skip
    for query, commits in attribution.others.items():
        rows = sum(commit.rows or 0 for commit in commits)
        yield found(
            "unknown",
            "certain",
            "other_query",
            f"query or application {query} made {numbers_words([c.version for c in commits], 'version')} with "
            f"{counted(rows, 'row')}, and its checkpoint was not given: its offsets are not known",
            "inspect again with its checkpoint too, or with --offset-columns, if the rows have their offsets",
            versions=[commit.version for commit in commits],
        )
    for checkpoint in checkpoints:
        earlier = [write for write in attribution.earlier if write.checkpoint is checkpoint]
        if earlier:
            versions = [version for write in earlier for version in write.versions]
            yield found(
                "unknown",
                "certain",
                "earlier_life",
                f"{numbers_words(versions, 'version')} have the id of checkpoint {checkpoint.name} and are older than "
                "its batches of these numbers: an earlier checkpoint wrote them, whose offsets are not known",
                checkpoint=checkpoint.folder,
                versions=versions,
            )


def _lost_files(table: TableHistory, attribution: Attribution) -> Iterator[InspectionFinding]:
    found = partial(InspectionFinding, table=table.name)
    for missing in table.missing_files:
        writes = _writes_of(attribution, missing.versions)
        spans = merged(span for write in writes for span in write.spans or ())
        rows = f", with {counted(missing.rows, 'row')}" if missing.rows is not None else ""
        of = f" of {numbers_words([w.batch for w in writes], 'batch')}" if writes else ""
        yield found(
            "missing",
            "certain",
            "lost_file",
            f"file {missing.path}{rows}{of}, is in the table and not on disk: readers of the table fail",
            "put the file back from a copy; or take it out of the log (FSCK REPAIR TABLE, DeltaTable.repair), and "
            "read these offsets once more",
            spans=list(spans),
            within=True,
            checkpoint=writes[-1].folder if writes else "",
            batches=sorted({write.batch for write in writes}),
            versions=sorted(missing.versions),
        )


def _foreign(table: TableHistory, attribution: Attribution) -> Iterator[InspectionFinding]:
    found = partial(InspectionFinding, table=table.name)
    signatures = {c.signature for write in attribution.writes if not write.certain for c in write.commits}
    for commit in attribution.foreign:
        touched = _writes_of(attribution, commit.touches)
        if not commit.rows and not commit.touches:
            continue  # it created the table, or wrote nothing
        rows = f" with {counted(commit.rows, 'row')}" if commit.rows else ""
        of = f"; it changed files of {numbers_words(sorted({w.batch for w in touched}), 'batch')}" if touched else ""
        like = commit.signature in signatures
        yield found(
            "foreign",
            "unclear" if like else "certain",
            "like_a_batch" if like else commit.operation.lower().replace(" ", "_") or "commit",
            f"version {commit.version} ({commit.operation or 'no operation named'}) of {instant_words(commit.at)}"
            f"{rows} is of no batch{of}"
            + (": of another program, or of batches from before the checkpoint was put back" if like else ""),
            "inspect again with --offset-columns, if the rows have their offsets" if like else "",
            versions=[commit.version],
            batches=sorted({write.batch for write in touched}),
        )


def _writes_of(attribution: Attribution, versions: Iterable[int]) -> list[BatchWrite]:
    """The batches that wrote these versions, in the order of the versions."""
    by_version = attribution.by_version
    return [by_version[version] for version in sorted(versions) if version in by_version]
