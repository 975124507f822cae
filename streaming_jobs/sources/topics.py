"""Topics through Kafka's admin API: properties, offsets, creation and deletion, each call with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import structlog
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs do not name what it re-exports
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
)

from streaming_jobs.declare.names import cluster_of, in_cluster, kafka_name, unknown_cluster
from streaming_jobs.errors import BrokerUnreachable, ConfigurationError, UsageError
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.sources.base import KEEP_FOREVER, NOT_SHOWN, TopicInfo, TopicReader
from streaming_jobs.sources.connection import Failures, client_config
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration

if TYPE_CHECKING:
    from streaming_jobs.settings import KafkaSettings


__all__ = ["KEEP_FOREVER", "NOT_SHOWN", "TopicInfo", "Topics", "client_config"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
log = structlog.get_logger()

UNKNOWN_FOR = 60.0
"""Seconds for which a topic that was there may be unknown: a broker that starts answers before it knows its topics."""

_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_POLL = 0.02
_SURE_AFTER = 0.5
_SIZES_OF, _SIZES_WITHIN = 500, 2.0
_VALUES_BYTES = 32 << 20
_UNKNOWN = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}
_NOT_YET = _UNKNOWN | {
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,
    KafkaError._DESTROY,
}
"""Errors after which the same request is made again until its deadline."""
_PASSING = {
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_CONTROLLER,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
}
"""Errors that the protocol calls retriable; librdkafka marks them as retriable only in transactions."""
_WRONG_REQUEST = {KafkaError._INVALID_ARG, KafkaError._UNSUPPORTED_FEATURE, KafkaError._NOT_IMPLEMENTED}
_DENIED = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}
_RIGHTS = {"create": "CREATE", "delete": "DELETE", "describe": "DESCRIBE", "offsets": "DESCRIBE"}
"""Kafka's name of the right that a request needs, by the first word of what it is for."""
_NEW_CLIENT_AFTER = 5.0
"""Seconds for which a client is kept at least, though it finds no broker."""


def _of_its_cluster(method: F) -> F:
    """The method about a topic, by the client of the topic's cluster."""

    @wraps(method)
    def call(topics: Topics, name: str, *args: Any, **kwargs: Any) -> Any:
        return method(topics.in_cluster(cluster_of(name)), name, *args, **kwargs)

    return cast("F", call)


class Topics:
    """Describes, creates and deletes topics, and looks up offsets.

    Every call ends within `timeout`: BrokerUnreachable if no broker answered, ConfigurationError if the broker
    refused the log-in, UsageError if the request is invalid. Safe to use from several threads.

    After a call that no broker answered, the next call makes a new client: a client of librdkafka that has dropped all
    brokers, since the metadata of a moment named none, may never find back to them.

    Topics of other clusters are those of other clients, one for each cluster, which are made by `of` when needed.
    """

    def __init__(
        self, config: Mapping[str, Any], timeout: timedelta = timedelta(seconds=15), cluster: str = ""
    ) -> None:
        """Topics of the cluster to which `config` connects, and whose name is `cluster`; empty: the default one."""
        self._timeout = timeout
        self.bootstrap = str(config["bootstrap.servers"])
        self.cluster = cluster
        self._failures = Failures(self.bootstrap, in_cluster("", cluster))
        self._kafka: KafkaSettings | None = None
        self._given: timedelta | None = None
        self._others: dict[str, Topics] = {}
        settings: dict[str, Any] = {**config, "error_cb": self._failures}
        self._settings = settings
        self._not_shown: set[str] = set()
        self._renewing, self._unanswered = threading.Lock(), False
        self._connect()

    @classmethod
    def of(cls, kafka: KafkaSettings, bootstrap: str, timeout: timedelta | None = None) -> Topics:
        """Topics of the cluster at `bootstrap` and of the others in the settings.

        The deadline of each is that of the settings, or `timeout`.
        """
        topics = cls(client_config(kafka, bootstrap), timeout or kafka.timeout)
        topics._kafka, topics._given = kafka, timeout
        return topics

    def in_cluster(self, cluster: str) -> Topics:
        """The topics of a cluster; raises ConfigurationError for one without settings."""
        if cluster == self.cluster:
            return self
        with self._renewing:
            if cluster not in self._others:
                of_cluster = in_cluster("", cluster)
                if self._kafka is None:
                    raise unknown_cluster(of_cluster, [])
                settings = self._kafka.of(of_cluster)
                config = client_config(self._kafka, "", of_cluster)
                self._others[cluster] = Topics(config, self._given or settings.timeout, cluster)
            return self._others[cluster]

    def names(self, cluster: str = "") -> set[str]:
        """Names of all topics of a cluster except Kafka's internal ones."""
        if cluster != self.cluster:
            return self.in_cluster(cluster).names(cluster)
        deadline = self._deadline()
        while True:
            self._admin.poll(0)
            try:
                listed = self._admin.list_topics(timeout=min(1.0, self._left(deadline)))
                return {in_cluster(name, cluster) for name in listed.topics if not name.startswith("__")}
            except KafkaException as error:
                self._admin.poll(0)
                self._failures.check()
                if time.monotonic() >= deadline:
                    raise self._unreachable("list topics") from error

    @_of_its_cluster
    def describe(self, name: str) -> TopicInfo | None:
        """The topic as the broker knows it now, or None when there is none of that name."""
        return self._describe(name, self._deadline())

    @_of_its_cluster
    def create(
        self, name: str, partitions: int, retention_ms: int = KEEP_FOREVER, *, replicas: int = -1, **properties: str
    ) -> TopicInfo:
        """Create a topic and wait until it can be written and read; raises UsageError if it exists.

        `replicas` -1: as many as the broker gives a topic. Further `properties` are topic settings with `_` for `.`:
        `cleanup_policy="compact"`.
        """
        deadline = self._deadline()
        config = {"retention.ms": str(retention_ms)} | {k.replace("_", "."): v for k, v in properties.items()}
        topic = NewTopic(kafka_name(name), num_partitions=partitions, replication_factor=replicas, config=config)
        started = self._admin.create_topics([topic], request_timeout=self._left(deadline))
        doing = f"create topic {name}"
        try:
            self._wait(started[kafka_name(name)], doing, deadline)
        except KafkaException as error:
            raise self._unreachable(doing) from error
        info = self._until(lambda: self._describe(name, deadline), f"topic {name} to appear", deadline)
        self._list(name, range(info.partitions), _LATEST, deadline)
        return info

    @_of_its_cluster
    def delete(self, name: str) -> None:
        """Delete a topic and wait until it is gone; raises UsageError if there is none."""
        deadline = self._deadline()
        started = self._admin.delete_topics([kafka_name(name)], request_timeout=self._left(deadline))
        doing = f"delete topic {name}"
        try:
            self._wait(started[kafka_name(name)], doing, deadline)
        except KafkaException as error:
            unknown = error.args[0].code() in _UNKNOWN
            raise (self._no_topic(name) if unknown else self._unreachable(doing)) from error
        self._until(lambda: self._describe(name, deadline) is None or None, f"topic {name} to go", deadline)

    @_of_its_cluster
    def offsets(self, name: str) -> OffsetBounds:
        """First and next offset of every partition; raises UsageError if there is no such topic."""
        deadline = self._deadline()
        partitions = self._partitions(name, deadline)
        return OffsetBounds(
            earliest=self._list(name, partitions, _EARLIEST, deadline),
            latest=self._list(name, partitions, _LATEST, deadline),
        )

    @_of_its_cluster
    def latest(self, name: str) -> dict[int, int]:
        """Next offset of every partition (the last stable one); raises UsageError if there is no such topic."""
        deadline = self._deadline()
        return self._list(name, self._partitions(name, deadline), _LATEST, deadline)

    @_of_its_cluster
    def high_watermarks(self, name: str) -> dict[int, int]:
        """Next offset of every partition, records of open transactions included; raises as `latest` does."""
        deadline = self._deadline()
        partitions = self._partitions(name, deadline)
        return self._list(name, partitions, _LATEST, deadline, IsolationLevel.READ_UNCOMMITTED)

    @_of_its_cluster
    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        """By partition the first offset whose record timestamp is at or after `ms` (Unix, milliseconds).

        A partition without such a record gives its end from before the look-up, so nothing is skipped.
        """
        deadline = self._deadline()
        partitions = self._partitions(name, deadline)
        ends = self._list(name, partitions, _LATEST, deadline)
        offsets = self._list(name, partitions, OffsetSpec.for_timestamp(max(0, ms)), deadline)
        return {partition: offset if offset >= 0 else ends[partition] for partition, offset in offsets.items()}

    @_of_its_cluster
    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        """Mean bytes of key and value of the first records at `starts`; None if no record arrived in time."""
        read = self._first_records(name, starts, _SIZES_OF, _SIZES_WITHIN)
        sizes = [len(m.key() or b"") + len(m.value() or b"") for m in read]
        return sum(sizes) / len(sizes) if sizes else None

    @_of_its_cluster
    def newest_values(self, name: str, most: int) -> list[bytes | None]:
        """Values of committed records, at most so many, from the end of each partition; fewer if they are large.

        Raises UsageError if there is no such topic, BrokerUnreachable if no broker answers. Records that do not arrive
        within the deadline are left out.
        """
        bounds = self.offsets(name)
        share = max(1, most // len(bounds.latest))
        starts = {p: max(end - share, bounds.earliest[p]) for p, end in bounds.latest.items()}
        held = {partition: start for partition, start in starts.items() if start < bounds.latest[partition]}
        values: list[bytes | None] = []
        size = 0
        with closing(self._first_records(name, held, most, self._timeout.total_seconds())) as records:
            for record in records:
                values.append(record.value())
                size += len(record.value() or b"")
                if size > _VALUES_BYTES:
                    break
        return values

    def _first_records(
        self, name: str, starts: Mapping[int, int], most: int, seconds: float
    ) -> Generator[Message, None, None]:
        """Committed records from `starts` on; fewer than `most` once there is a pause, or after `seconds`."""
        if not starts:
            return
        ends_at, found = time.monotonic() + seconds, 0
        consumer = Consumer({**self._settings, "group.id": "recourse-sizes", "enable.auto.commit": False})
        try:
            consumer.assign(
                [TopicPartition(kafka_name(name), partition, offset) for partition, offset in starts.items()]
            )
            while found < most and (left := ends_at - time.monotonic()) > 0:
                taken = consumer.consume(min(most - found, 100), timeout=min(left, 0.2))
                read = [message for message in taken if message.error() is None]
                found += len(read)
                yield from read
                if found and not read:
                    break
        except KafkaException as error:
            log.info("records could not be read", topic=name, reason=str(error)[:200])
        finally:
            consumer.close()

    def _connect(self) -> None:
        try:
            self._admin = AdminClient(self._settings)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.SASL_AUTHENTICATION_FAILED:  # of a function that gives tokens
                raise BrokerUnreachable(
                    f"{self._failures.settings}.sasl_oauthbearer_callback gave no token: {error.args[0].str()}",
                    "look in the log for what the function raised; a later attempt calls it again",
                ) from error
            step = f"check the section `{self._failures.settings}` (`{commands.settings()}`)"
            if self._settings.get("sasl.mechanism") == "GSSAPI":
                step = "install librdkafka with libsasl2, and build confluent-kafka for it: docs/secure.md"
            raise ConfigurationError(f"the Kafka client cannot be set up: {error.args[0].str()}", step) from error
        self._connected, self._unanswered = time.monotonic(), False

    def _unreachable(self, doing: str) -> BrokerUnreachable:
        self._unanswered = True
        return self._failures.unreachable(doing, self._timeout)

    def _deadline(self) -> float:
        with self._renewing:
            if self._unanswered and time.monotonic() - self._connected >= _NEW_CLIENT_AFTER:
                self._connect()
        self._failures.begin()
        return time.monotonic() + self._timeout.total_seconds()

    def _left(self, deadline: float) -> float:
        return max(0.1, deadline - time.monotonic())

    def _describe(self, name: str, deadline: float) -> TopicInfo | None:
        """The topic; None only if it is unknown, and still unknown half a second later.

        A broker that has just started does not know its topics yet; while a leader is elected the topic is known.
        """
        doing = f"describe topic {name}"
        unknown_since: float | None = None
        while True:
            try:
                return self._ask(name, doing, deadline)
            except KafkaException as error:
                now = time.monotonic()
                if error.args[0].code() not in _UNKNOWN:
                    unknown_since = None
                elif unknown_since is None:
                    unknown_since = now
                elif now - unknown_since >= _SURE_AFTER:
                    return None
                if now >= deadline:
                    raise self._unreachable(doing) from error
            self._admin.poll(_POLL)

    def _ask(self, name: str, doing: str, deadline: float) -> TopicInfo:
        plain = kafka_name(name)
        asked = self._admin.describe_topics(TopicCollection([plain]), request_timeout=self._left(deadline))
        resource = ConfigResource(ConfigResource.Type.TOPIC, plain)
        settings = self._admin.describe_configs([resource], request_timeout=self._left(deadline))
        topic = self._wait(asked[plain], doing, deadline)
        info = TopicInfo(
            name=name,
            id=str(topic.topic_id),
            partitions=len(topic.partitions),
            replicas=min((len(partition.replicas) for partition in topic.partitions), default=1),
        )
        try:
            values = self._wait(settings[resource], f"settings of topic {name}", deadline)
        except UsageError as error:
            if not _denied(error):
                raise
            if name not in self._not_shown:
                self._not_shown.add(name)
                log.warning(
                    "the topic's settings are not shown: retention and limits are taken as Kafka's defaults",
                    topic=name,
                    missing="the right DESCRIBE_CONFIGS on the topic",
                )
            return info
        return replace(
            info,
            retention_ms=int(values["retention.ms"].value),
            cleanup_policy=values["cleanup.policy"].value,
            min_insync_replicas=int(values["min.insync.replicas"].value),
            max_message_bytes=int(values["max.message.bytes"].value),
        )

    def _partitions(self, name: str, deadline: float) -> range:
        info = self._describe(name, deadline)
        if info is None:
            raise self._no_topic(name)
        return range(info.partitions)

    def _no_topic(self, name: str) -> UsageError:
        return UsageError(f"there is no topic {name} at {self._failures.bootstrap}", "create it, or check its name")

    def _list(
        self,
        name: str,
        partitions: Iterable[int],
        spec: OffsetSpec,
        deadline: float,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[int, int]:
        places = {TopicPartition(kafka_name(name), partition): spec for partition in partitions}
        doing = f"offsets of topic {name}"

        def ask() -> dict[int, int] | None:
            left = self._left(deadline)
            asked = self._admin.list_offsets(places, isolation_level=isolation, request_timeout=left)
            try:
                return {place.partition: self._wait(future, doing, deadline).offset for place, future in asked.items()}
            except KafkaException as error:
                # Leaders are being elected (the topic is new, its broker has just come back), or it was deleted.
                if self._describe(name, deadline) is None:
                    raise self._no_topic(name) from error
                return None

        return self._until(ask, doing, deadline)

    def _wait(self, future: Future[T], doing: str, deadline: float) -> T:
        """The result; raises KafkaException only for errors after which the request may be made again (`_NOT_YET`)."""
        # The admin client answers from a thread of its own; only error_cb needs this polling.
        while True:
            self._admin.poll(0)
            self._failures.check()
            try:
                answer = future.result(timeout=_POLL)
                self._failures.succeeded()
                return answer
            except (FutureTimeout, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise self._unreachable(doing) from error
            except KafkaException as error:
                self._admin.poll(0)
                self._failures.check()
                raise self._translated(error, doing) from error

    def _translated(self, error: KafkaException, doing: str) -> Exception:
        kafka = error.args[0]
        if kafka.code() in _NOT_YET:
            return error
        if kafka.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return UsageError(f"{doing}: it exists already", "delete it first, or use it as it is")
        if kafka.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            return self._unreachable(doing)
        if kafka.code() in _PASSING or (kafka.code() < 0 and kafka.code() not in _WRONG_REQUEST):
            return BrokerUnreachable(f"{doing}: {kafka.str()}", "try again in a moment")
        if kafka.code() in _DENIED:
            right = _RIGHTS.get(doing.partition(" ")[0], "DESCRIBE_CONFIGS")
            return UsageError(
                f"{doing}: {kafka.str()}",
                f"give this user Kafka's right {right} on the topic; docs/secure.md lists all rights that are needed",
            )
        return UsageError(f"{doing}: {kafka.str()}", "check the request, and the rights of this user on the cluster")

    def _until(self, ask: Callable[[], T | None], doing: str, deadline: float) -> T:
        while (answer := ask()) is None:
            if time.monotonic() >= deadline:
                raise self._unreachable(f"wait for {doing}")
            self._admin.poll(_POLL)
        return answer


def _denied(error: UsageError) -> bool:
    cause = error.__cause__
    return isinstance(cause, KafkaException) and cause.args[0].code() in _DENIED


# Figures of topics as they are now: partitions, offsets, records per second between two looks, retention, bytes.


class Sleep(Protocol):
    """Waits; `time.sleep` is one."""

    def __call__(self, seconds: float, /) -> None:
        """Wait so many seconds."""


@dataclass(frozen=True)
class TopicFigures:
    """One topic at `at` (seconds since 1970): first and next offset by partition.

    `rates` are records per second by partition; None if there was no second look. `record_bytes` is the mean size of
    key and value of some records; None if they were not measured.
    """

    at: float
    name: str
    id: str
    retention_ms: int
    cleanup_policy: str
    earliest: Mapping[int, int]
    latest: Mapping[int, int]
    rates: Mapping[int, float] | None = None
    record_bytes: float | None = None

    @property
    def partitions(self) -> int:
        return len(self.latest)

    @property
    def records(self) -> int:
        """Offsets held; transaction markers and compacted records count too."""
        return sum(end - self.earliest.get(p, 0) for p, end in self.latest.items())

    @property
    def end(self) -> int:
        """The sum of the next offsets: it grows by one with each record."""
        return sum(self.latest.values())

    @property
    def retention(self) -> str:
        """How long the topic keeps records, in words."""
        kept = timedelta(milliseconds=self.retention_ms)
        return "for ever" if self.retention_ms < 0 else format_duration(kept)

    @property
    def rate(self) -> float | None:
        """Records per second in all partitions; None if there was no second look."""
        return None if self.rates is None else sum(self.rates.values())

    @property
    def bytes(self) -> float | None:
        """Bytes of keys and values, estimated from the mean size; the client does not give those on disk."""
        return None if self.record_bytes is None else self.record_bytes * self.records

    def as_json(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "topic": self.name,
            "id": self.id,
            "partitions": self.partitions,
            "records": self.records,
            "end": self.end,
            "records_per_s": None if self.rate is None else round(self.rate, 1),
            "retention_ms": self.retention_ms,
            "cleanup_policy": self.cleanup_policy,
            "record_bytes": None if self.record_bytes is None else round(self.record_bytes, 1),
            "bytes": None if self.bytes is None else round(self.bytes),
            "offsets": [
                {
                    "partition": p,
                    "first": self.earliest.get(p, 0),
                    "end": end,
                    "records_per_s": None if self.rates is None else round(self.rates.get(p, 0.0), 1),
                }
                for p, end in sorted(self.latest.items())
            ],
        }


def look(topics: TopicReader, names: Iterable[str]) -> dict[str, TopicFigures]:
    """The figures of those topics that exist, by name; raises BrokerUnreachable."""
    figures = {}
    for name in names:
        info = topics.describe(name)
        if info is None:
            continue
        at, offsets = time.time(), topics.offsets(name)
        policy = info.cleanup_policy
        figures[name] = TopicFigures(at, name, info.id, info.retention_ms, policy, offsets.earliest, offsets.latest)
    return figures


def with_rates(
    topics: TopicReader, figures: Mapping[str, TopicFigures], seconds: float, sleep: Sleep = time.sleep
) -> dict[str, TopicFigures]:
    """The same figures some seconds later, with the records per second in between; raises BrokerUnreachable."""
    sleep(seconds)
    return {name: since(figures[name], now) for name, now in look(topics, figures).items()}


def since(before: TopicFigures, now: TopicFigures) -> TopicFigures:
    """The newer figures with the rates since the older ones; without rates if the topic was recreated."""
    span = now.at - before.at
    if now.id != before.id or span <= 0:
        return now
    rates = {p: max(end - before.latest.get(p, 0), 0) / span for p, end in now.latest.items()}
    return replace(now, rates=rates)


def with_size(topics: TopicReader, figures: TopicFigures) -> TopicFigures:
    """The same with the mean size of the newest records, at most some hundred of each partition."""
    starts = {p: max(end - 200, figures.earliest.get(p, 0)) for p, end in figures.latest.items()}
    held = {p: at for p, at in starts.items() if at < figures.latest[p]}
    return replace(figures, record_bytes=topics.mean_size(figures.name, held) if held else None)
