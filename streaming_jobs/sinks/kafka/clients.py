"""Clients that write topics: their properties, a deadline for every call, and what a failure of one means.

A call of librdkafka may hang past its own timeout. So every piece of work runs in a thread of its own: at the deadline
the thread and its client are left behind, and a new client takes over. What the old one may still do is refused by the
broker, since the new one has fenced it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from streaming_jobs.errors import ConfigurationError, PermanentError, RecourseError
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.text.durations import milliseconds

T = TypeVar("T")

NO_LIMIT = 2**31 - 1
"""Bytes of a request, where no topic limits them; the most that librdkafka knows."""

MARKER_BYTES = 8 << 20
"""The largest marker: some 100 bytes for each partition that a batch read or wrote."""

FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
}
"""The broker's word that a newer client has the transactional id, or that it has ended the transaction itself."""
_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
}
_REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
    KafkaError.INVALID_REQUIRED_ACKS,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
}


class ClientLost(Exception):
    """A client that can no longer be used; `fenced` if the broker says that another one has its place."""

    def __init__(self, reason: str, *, fenced: bool = False) -> None:
        super().__init__(reason)
        self.fenced = fenced


def producer_config(
    client: Mapping[str, Any], settings: TopicSinkSettings, transactional_id: str = "", most_bytes: int = NO_LIMIT
) -> dict[str, Any]:
    """Properties of a producer; without a transactional id it delivers at least once. `most_bytes` is what the topics
    allow in one request for a partition. Holds secrets: never print it.

    A deleted topic is not recreated. Keys go to the partitions that Kafka's own Java client would choose. The
    back-off settings are those with which transactions follow each other in 12 ms in place of 98.
    """
    config: dict[str, Any] = {
        **client,
        "allow.auto.create.topics": False,
        "partitioner": "murmur2_random",
        "compression.type": settings.compression,
        "linger.ms": milliseconds(settings.linger),
        "batch.size": min(settings.batch_kb * 1000, most_bytes),
        "message.max.bytes": settings.max_record_kb * 1000,
        "queue.buffering.max.kbytes": settings.buffer_mb * 1024,
        "queue.buffering.max.messages": 500_000,
        "retry.backoff.ms": 1,
        "retry.backoff.max.ms": 50,
        "topic.metadata.propagation.max.ms": 2000,
    }
    if transactional_id:
        timeout = milliseconds(settings.transaction_timeout)
        socket = min(int(config.get("socket.timeout.ms", timeout)), timeout)  # librdkafka allows no longer one
        config |= {"socket.timeout.ms": socket, "transaction.timeout.ms": timeout}
        most = max(settings.max_record_kb * 1000, MARKER_BYTES)  # records were judged, and the marker has its own bound
        return config | {"transactional.id": transactional_id, "acks": "all", "message.max.bytes": most}
    config |= {"acks": settings.acks, "message.timeout.ms": milliseconds(settings.transaction_timeout)}
    # Without idempotence a repeated request may pass a later one: one at a time keeps the order.
    return config | ({"enable.idempotence": True} if settings.acks == "all" else {"max.in.flight": 1})


def in_time(doing: str, timeout: timedelta, call: Callable[[], T]) -> T:
    """The result of a call that runs in a thread; raises ClientLost if the call does not return in time.

    A KafkaException becomes ClientLost, or the error that a person has to act on.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            failure.append(error)

    thread = threading.Thread(target=run, name=f"kafka: {doing}", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if result:
        return result[0]
    if not failure:
        raise ClientLost(f"{doing}: the client did not answer within {timeout.total_seconds():.0f} s")
    (error,) = failure
    if isinstance(error, KafkaException):
        raise of_kafka(doing, error.args[0]) from error
    if isinstance(error, SystemError):
        # So Python words a fatal error, such as being fenced, that confluent-kafka raises between delivery reports.
        raise ClientLost(f"{doing}: the client has failed for good: {error}", fenced=True) from error
    raise error


def of_kafka(doing: str, error: KafkaError) -> ClientLost | RecourseError:
    """What an error of Kafka's client means for the batch."""
    code = error.code()
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return ConfigurationError(
            f"{doing}: the broker allows no transaction as long as topic_sink.transaction_timeout",
            "lower it, or raise transaction.max.timeout.ms of the broker",
        )
    if code in _DENIED:
        return ConfigurationError(
            f"{doing}: {error.str()}",
            "give the user the rights to write the topic and the topic of markers, and to use the transactional id",
        )
    if code in _REFUSED:
        return PermanentError(f"{doing}: {error.str()}", "correct the topic's settings, or the records")
    return ClientLost(f"{doing}: {error.str()}", fenced=code in FENCED)


def leave(client: object, abort_within: float | None = None) -> None:
    """Let go of a client in a thread of its own: ending one may take long, or never return.

    With `abort_within` (seconds) it also tries to abort its transaction, so that readers do not wait for it.
    """
    threading.Thread(target=_end, args=[client, abort_within], name="kafka: leave", daemon=True).start()


def _end(client: Any, abort_within: float | None) -> None:
    """Drop what it has not sent, and with this thread's reference perhaps the client itself."""
    if hasattr(client, "purge"):
        client.purge()
    if abort_within is not None:
        with suppress(
            KafkaException, SystemError
        ):  # no transaction is open, or the broker ends it after its own timeout
            client.abort_transaction(abort_within)
