"""The payments: two streams with a topic between them; parts of hot accounts, added up, equal the truth."""

from __future__ import annotations

from collections import Counter

from streaming_jobs.examples.payments import streams
from streaming_jobs.examples.payments.payments import late_payments, payments, true_totals
from streaming_jobs.verification.verification import Options, verify_streams
from tests.broker.conftest import BenchFactory
from tests.support.driver import ledger, produce, rows

STAGES = (streams.payment_parts, streams.payment_totals)
LATE = 150


def test_totals_of_parts_are_the_totals_of_the_payments_and_late_payments_are_counted(bench: BenchFactory) -> None:
    home, made = bench({"stream.max_offsets_per_trigger": 3000}), payments(20_000)
    for topic, partitions in streams.TOPICS.items():
        home.topics.create(topic, partitions)
    late = late_payments(made[:12_000], LATE)
    for begin, end, more in ((0, 12_000, []), (12_000, 20_000, late)):
        coming = [*more, *made[begin:end]]
        produce(home.bootstrap, streams.PAYMENTS.name, ((payment.key, payment.value) for payment in coming))
        for stage in STAGES:
            home.run(stage)
        shown = sorted(
            rows(home.settings, "payment_totals"), key=lambda r: (r["window_start"], r["account"], r["region"])
        )
        expected = true_totals(made[:end])
        assert [{name: row[name] for name in expected[0]} for row in shown] == expected
        hot = Counter(row["account"] in streams.HOT_ACCOUNTS for row in shown if row["parts"] > 1)
        assert hot[True] > 50 and not hot[False]
    assert sum(entry.rows.get("late", 0) for entry in ledger(home.settings, "payment_parts_batches")) == LATE
    for stage in STAGES:
        assert not rows(home.settings, f"{stage.name}_dead_letters")
    verdict, _ = verify_streams(
        home.settings, STAGES, [streams.true_totals_of_parts], home.bootstrap, Options(finished=True)
    )
    assert verdict.ok, verdict
    print([c for s in verdict.streams for c in s.comparisons])
