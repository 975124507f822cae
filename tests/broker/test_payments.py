"""The payments: two streams with a topic between them; parts of hot accounts, added up, equal the truth."""

from __future__ import annotations

from collections import Counter

from streaming_jobs.examples.payments import streams
from streaming_jobs.examples.payments.feed import feed, send
from streaming_jobs.examples.payments.payments import late_payments, payments, true_totals
from streaming_jobs.verification.verification import Options, verify_streams
from tests.broker.conftest import BenchFactory
from tests.support.driver import ledger, rows

STAGES = (streams.payment_parts, streams.payment_totals)
LATE = 150


def test_totals_of_parts_are_the_totals_of_the_payments_and_late_payments_are_counted(bench: BenchFactory) -> None:
    totals = {"max_offsets_per_trigger": 900, "lateness": "1 hour"}  # so that batches end between the parts of a total
    home = bench({"stream.max_offsets_per_trigger": 1500, "streams.payment_totals": totals})
    made, half = payments(4_000, seconds=3), 2_400
    for topic, partitions in streams.TOPICS.items():
        home.topics.create(topic, partitions)
    late = late_payments(made[:half], LATE)
    for end, coming in ((half, made[:half]), (len(made), [*late, *made[half:]])):
        send(home.settings.kafka, home.bootstrap, coming)
        ended = [home.run(stage) for stage in STAGES]
        shown = sorted(
            rows(home.settings, "payment_totals"), key=lambda r: (r["window_start"], r["account"], r["region"])
        )
        expected = true_totals(made[:end])
        assert [{name: row[name] for name in expected[0]} for row in shown] == expected
        hot = Counter(row["account"] in streams.HOT_ACCOUNTS for row in shown if row["parts"] > 1)
        assert hot[True] > 50 and not hot[False]
        assert 0 < (ended[-1].status.state_rows or 0) < len(shown)
    assert sum(entry.rows.get("late", 0) for entry in ledger(home.settings, "payment_parts_batches")) == LATE
    for stage in STAGES:
        assert not rows(home.settings, f"{stage.name}_dead_letters")
    verdict, _ = verify_streams(
        home.settings, STAGES, [streams.true_totals_of_parts], home.bootstrap, Options(finished=True)
    )
    assert verdict.ok, verdict
    compared = [c for of in verdict.streams for c in of.comparisons if (c.table, c.what) == ("payment_totals", "truth")]
    assert [c.verdict for c in compared] == ["ok"]
    traced = home.recourse(streams.__name__, "trace", f"{streams.PAYMENTS.name}/0:0")
    assert "stream payment_parts" in traced and "payment_parts/" in traced and "stream payment_totals" in traced
    held = len(made) + LATE
    assert feed(home.settings, 10, 0) == held + 10 == home.topics.offsets(streams.PAYMENTS.name).total
