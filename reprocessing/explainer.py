"""A plan in words, for people. What will happen is read off the very stages that the executor runs."""

from __future__ import annotations

from collections.abc import Iterator

from reprocessing.plan import Plan
from reprocessing.stages import STAGES
from reprocessing.targets import instant_words


def explain(plan: Plan) -> str:
    """The plan's text."""
    return "\n".join([*_head(plan), "", *_offsets(plan), "", *_steps(plan), "", *_after(plan)]) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    what = f"take back {plan.undoes}" if plan.undoes else f"rewind to {plan.target}"
    yield f"Plan {plan.id}: {what}, stream {plan.stream}"
    yield f"  made         {instant_words(plan.made_at)}, fingerprint {plan.fingerprint}"
    yield f"  stream       generation {plan.saw.generation}, batch {plan.saw.batch}; opens generation {plan.generation}"
    yield f"  code         {plan.saw.code[0]} ({plan.saw.code[1]}) runs the replay"
    if plan.base.savepoint is None:
        yield "  starts from  the stream's very start, with empty tables"
    else:
        yield f"  starts from  savepoint {plan.base.savepoint}"
    yield f"  state        {_state(plan)}"
    for table in plan.saw.tables:
        size = f"{table.files:,} files, {_mb(table.size)}"
        yield f"  table        {table.name} ({table.mode}): version {table.version}, {size}"
    yield "  downstream   no declared stream reads these tables; other readers see one commit that changes rows"
    yield from (f"  note         {note}" for note in plan.notes)


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"


def _state(plan: Plan) -> str:
    if not plan.stateful:
        return "the stream keeps none"
    if plan.base.savepoint is None:
        return "cleared; right, because every record since the stream's start is read again"
    return f"kept from savepoint {plan.base.savepoint}"


def _offsets(plan: Plan) -> Iterator[str]:
    positions = {(t.name, p): t.earliest.get(p, 0) for t in plan.saw.topics for p in t.latest}
    yield f"  {'topic':<24} {'partition':>9} {'retained from':>13} {'target':>10} {'replay from':>11} {'end':>10}"
    for topic, partition, begin, end in plan.ranges():
        wanted = plan.wanted.get(topic, {}).get(partition, begin)
        retained = positions.get((topic, partition), 0)
        yield f"  {topic:<24} {partition:>9} {retained:>13,} {wanted:>10,} {begin:>11,} {end:>10,}"
    time = "unknown" if plan.seconds is None else f"about {plan.seconds:,.0f} s"
    yield f"  {plan.records:,} records to replay, {time}; the stream stands still meanwhile, its tables stay readable"


def _steps(plan: Plan) -> Iterator[str]:
    yield "  What will happen:"
    for number, stage in enumerate(STAGES, 1):
        yield f"  {number}. {stage.name:<8} {stage.explain(plan)}"


def _after(plan: Plan) -> Iterator[str]:
    yield f"  Apply:  recourse recover apply {plan.id}"
    yield f"  Before it is published it can be given up: recourse recover abort {plan.id}"
    yield f"  After that it can be taken back, as long as its savepoint is kept: recourse recover undo {plan.id}"
    yield "  Lost for good: nothing, as long as the savepoints are kept"
    if plan.undoes:
        yield f"  What {plan.undoes} published vanishes; records that came since are replayed with the code above"
