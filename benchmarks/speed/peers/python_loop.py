"""The stateless work in fifty lines: consume, parse with Arrow, append with deltalake, exactly once.

    python -m benchmarks.speed.peers.python_loop BOOTSTRAP TOPIC TABLE

The offsets travel in the commit of the rows, and a commit says which batch it is: what was not committed is read again,
and a second writer is refused. It may be killed at any moment, which is what the end of standard input does.
"""

import json
import os
import sys
import threading
from io import BytesIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from confluent_kafka import Consumer, TopicPartition
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

_TEXTS = [(name, pa.string()) for name in ("kind", "currency", "country")]
_PAYMENT = pa.schema(
    [("id", pa.int64()), ("account", pa.string()), ("amount", pa.int64()), ("at", pa.timestamp("us", "UTC")), *_TEXTS]
)
_ROW = pa.schema([*(_PAYMENT.field(n) for n in ("id", "account", "amount", "at", "kind")), ("net", pa.int64())])
_BATCH, _WAIT = 100_000, 0.05


def rows(values: list[bytes]) -> pa.Table:
    """Every payment but the tests, with what is left of it after a fee of one percent."""
    parsed = pa.json.read_json(
        BytesIO(b"\n".join(values)), parse_options=pa.json.ParseOptions(explicit_schema=_PAYMENT)
    )
    kept = parsed.filter(pc.not_equal(parsed["kind"], "test"))
    net = pc.subtract(kept["amount"], pc.divide(kept["amount"], 100))
    return kept.append_column("net", net).select(_ROW.names).cast(_ROW)


def main() -> None:
    """Run until standard input ends."""
    bootstrap, topic, path = sys.argv[1:]
    table = DeltaTable.create(path, _ROW, mode="ignore")
    offsets = {
        int(p): o for p, o in json.loads(table.history(1)[0].get("userMetadata", "{}")).get("offsets", {}).items()
    }
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "loop", "isolation.level": "read_committed"})
    partitions = consumer.list_topics(topic).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, offsets.get(partition, 0)) for partition in partitions])
    threading.Thread(target=lambda: os._exit(0) if not os.read(0, 1) else None, daemon=True).start()
    sys.stdout.write("READY\n")
    sys.stdout.flush()
    while True:
        messages = [m for m in consumer.consume(_BATCH, _WAIT) if m.error() is None]
        if not messages:
            continue
        offsets |= {int(m.partition() or 0): (m.offset() or 0) + 1 for m in messages}
        transaction = Transaction("loop", (table.transaction_version("loop") or 0) + 1)
        note = {"userMetadata": json.dumps({"offsets": offsets})}
        properties = CommitProperties(custom_metadata=note, max_commit_retries=0, app_transactions=[transaction])
        write_deltalake(table, rows([m.value() or b"" for m in messages]), mode="append", commit_properties=properties)
        table.update_incremental()


if __name__ == "__main__":
    main()
