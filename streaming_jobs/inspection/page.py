"""An inspection as a page: the verdict, the findings, a picture of each table's offsets, and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from streaming_jobs.inspection.attribution import BatchWrite
from streaming_jobs.inspection.findings import MEANINGS, InspectionFinding
from streaming_jobs.inspection.inspection import Inspection
from streaming_jobs.inspection.judgement import JudgedTable
from streaming_jobs.page import macros, render_page
from streaming_jobs.text import svg
from streaming_jobs.text.spelling import counted, instant_words
from streaming_jobs.verification.offset_ranges import Span, merged, shown

_FINDINGS, _BATCHES, _PARTITIONS = 300, 500, 64
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 960, 190, 90, 34, 14
_COLOURS = (("now", "in the table once"), ("gone", "missing"), ("replay", "doubled"), ("before", "some of these"))


def page(inspection: Inspection) -> str:
    """The page as HTML; of long lists it has the beginning, and says so."""
    return render_page(f"Inspection: {inspection.verdict}", _sections(inspection))


def _sections(inspection: Inspection) -> Iterator[str]:
    parts = macros()
    yield parts.note("Checkpoints and tables were read, and nothing was written.")
    found = inspection.findings
    if found:
        yield parts.heading("Findings")
        head = ["finding", "certainty", "table", "offsets", "what and why"]
        yield parts.table(head, [_finding_row(each) for each in found[:_FINDINGS]])
        kinds = dict.fromkeys(each.kind for each in found)
        yield parts.note("; ".join(f"{kind}: {MEANINGS[kind]}" for kind in kinds))
        if len(found) > _FINDINGS:
            yield parts.note(f"{counted(len(found) - _FINDINGS, 'more finding')} left out.")
    for table in inspection.tables:
        yield from _table(table)
    if inspection.topics:
        yield parts.heading("The topics now")
        rows = [
            [each.topic, str(each.partition), f"{each.position:,}", _number(each.earliest), _number(each.latest),
             _number(each.unread)]
            for each in inspection.topics
        ]  # fmt: skip
        yield parts.table(["topic", "partition", "position of the job", "earliest", "latest", "unread"], rows, True)


def _finding_row(each: InspectionFinding) -> list[str]:
    offsets = shown(each.spans) + (" (some of these)" if each.within else "")
    return [
        each.kind.replace("_", " "),
        each.certainty,
        each.table,
        offsets if each.spans else "",
        each.words + (f". Next: {each.next_step}" if each.next_step else ""),
    ]


def _table(judged: JudgedTable) -> Iterator[str]:
    parts, table = macros(), judged.history
    yield parts.heading(f"Table {table.name}")
    yield parts.note(table_words(judged))
    bars = partition_bars(judged)
    if bars:
        yield parts.legend(_COLOURS)
        yield parts.plot(_picture(bars))
        head = ["topic", "partition", *(words for _, words in _COLOURS)]
        rows = [[topic, str(p), *(shown(spans[kind]) for kind, _ in _COLOURS)] for (topic, p), spans in bars.items()]
        yield parts.as_numbers(head, rows)
    writes = judged.attribution.writes
    if writes:
        rows = [_batch_row(judged, write) for write in writes[-_BATCHES:]]
        yield parts.table(["checkpoint", "batch", "committed", "versions", "known by", "offsets", ""], rows, True)
    if len(writes) > _BATCHES:
        yield parts.note(f"The newest {_BATCHES} of {len(writes):,} batches.")


def _batch_row(judged: JudgedTable, write: BatchWrite) -> list[str]:
    alive = all(judged.history.alive(version) for version in write.versions)
    return [
        write.checkpoint.name if write.checkpoint is not None else "",
        str(write.batch),
        instant_words(write.commits[0].at),
        ", ".join(map(str, write.versions)),
        write.how,
        "not known" if write.spans is None else shown(write.spans) or "none",
        "" if alive else "no longer in the table",
    ]


def table_words(judged: JudgedTable) -> str:
    """What the table is, and by which checkpoints it was written."""
    table = judged.history
    words = f"{table.location}: {counted(len(table.commits), 'version')} since {instant_words(table.begun)}"
    for checkpoint in judged.checkpoints:
        how = judged.attribution.how(checkpoint)
        ways = {None: "no commit of it", "time": "known by the times of their commits"}
        words += (
            f"; checkpoint {checkpoint.name} (query {checkpoint.query_id or 'unknown'}), batches {checkpoint.first} to "
            f"{checkpoint.last_planned}, {ways.get(how, f'known by {how}')}"
        )
    return words


def partition_bars(judged: JudgedTable) -> dict[tuple[str, int], Mapping[str, Sequence[Span]]]:
    """By partition the offsets of each colour."""
    by_kind: dict[str, list[Span]] = {"now": list(judged.covered), "gone": [], "replay": [], "before": []}
    for finding in judged.findings:
        kind = {"missing": "gone", "doubled": "replay"}.get(finding.kind)
        if kind is not None:
            by_kind["before" if finding.within else kind] += finding.spans
    places = sorted({(span.topic, span.partition) for spans in by_kind.values() for span in spans})
    return {
        place: {
            kind: list(merged(span for span in spans if (span.topic, span.partition) == place))
            for kind, spans in by_kind.items()
        }
        for place in places[:_PARTITIONS]
    }


def _picture(bars: Mapping[tuple[str, int], Mapping[str, Sequence[Span]]]) -> str:
    every = [span for kinds in bars.values() for spans in kinds.values() for span in spans]
    begin, end = min(span.start for span in every), max(span.end for span in every)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end - begin, 1)
    parts: list[str] = []
    for row, ((topic, partition), kinds) in enumerate(bars.items()):
        top = 10 + row * _ROW
        parts.append(
            svg.text(0, top + 12, f"{topic} {partition}" if len(topic) < 26 else f"{topic[:22]}... {partition}")
        )
        for kind, words in _COLOURS:
            high = _BAR if kind in ("now", "gone") else _BAR // 2
            for span in kinds[kind]:
                x, wide = _LEFT + (span.start - begin) * scale, max(span.offsets * scale, 1.5)
                hover = f"{words}: offsets {span.start:,} to {span.end - 1:,}"
                parts.append(svg.rect(x, top, wide, high, hover=hover, class_=kind))
        last = max(span.end for spans in kinds.values() for span in spans)
        parts.append(svg.text(_LEFT + (last - begin) * scale + 6, top + 12, f"{last:,}", class_="note"))
    return svg.picture(_WIDTH, 14 + len(bars) * _ROW, parts, label=f"Offsets of {counted(len(bars), 'partition')}")


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
