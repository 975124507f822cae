"""The embedded broker: one a home, small, back after a kill with all that was acknowledged, gone with its parent."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer

from streaming_jobs.errors import BrokerUnreachable, SetupError, UsageError
from streaming_jobs.platform import ports
from streaming_jobs.platform.broker import Broker, bootstrap_servers, running
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics, client_config
from streaming_jobs.warm_up import archives
from tests.support import ROOT
from tests.support.waiting import wait_for

START_AND_WAIT = """
import sys
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
broker = Broker(Settings.load({"home": sys.argv[1]}))
if sys.argv[2] == "in a thread that ends":
    import threading
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join()
else:
    broker.start()
print(broker.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mine(settings: Callable[..., Settings]) -> Iterator[Broker]:
    """A broker of this test alone, not started yet."""
    broker = Broker(settings())
    yield broker
    broker.kill()


def topics(settings: Settings, address: str) -> Topics:
    return Topics.of(settings.kafka, address)


def send(address: str, topic: str, count: int) -> None:
    """Send with acks=all and return when each record is acknowledged."""
    failed: list[object] = []
    producer = Producer({"bootstrap.servers": address, "acks": "all", "linger.ms": 5})
    for number in range(count):
        producer.produce(topic, str(number).encode(), on_delivery=lambda error, _: error and failed.append(error))
    assert producer.flush(30) == 0
    assert failed == []


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_answers_creates_no_topic_by_itself_and_is_small(mine: Broker) -> None:
    address = mine.start()
    settings = Settings()
    name = f"small-{uuid.uuid4().hex}"
    topics(settings, address).create(name, 4)
    send(address, name, 50_000)
    assert topics(settings, address).offsets(name).total == 50_000
    assert topics(settings, address).describe(f"never-{name}") is None
    producer = Producer({"bootstrap.servers": address, "message.timeout.ms": 3000, "log_level": 0})
    refused: list[object] = []
    producer.produce(f"never-{name}", b"x", on_delivery=lambda error, _: refused.append(error))
    producer.flush(10)
    assert refused and refused[0] is not None
    assert mine.pid is not None
    assert psutil.Process(mine.pid).memory_info().rss < 200 * 2**20


def test_it_listens_on_the_loopback_alone(broker: Broker) -> None:
    broker.start()
    assert broker.pid is not None
    listening = [c for c in psutil.Process(broker.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) == 2
    assert {str(c.laddr[0]).removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}


def test_data_address_and_cluster_are_kept_between_runs(mine: Broker, settings: Callable[..., Settings]) -> None:
    address = mine.start()
    cluster = (settings().broker_dir / "data" / "meta.properties").read_text()
    created = topics(settings(), address).create("kept", 2)
    send(address, "kept", 1000)
    mine.stop()
    assert running(settings()) is None

    with Broker(settings()) as second:
        assert second.start() == address
        assert topics(settings(), address).describe("kept") == created
        assert topics(settings(), address).offsets("kept").total == 1000
        assert (settings().broker_dir / "data" / "meta.properties").read_text() == cluster


def test_its_files_are_its_owner_s_alone_whatever_the_folder_is_called(
    settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    made = settings({"home": tmp_path / "Zoë's home"})
    with Broker(made) as broker:
        assert broker.running()
    folder = made.broker_dir
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "broker.json").stat().st_mode) == 0o600
    readable = [path for path in folder.rglob("*") if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert [path for path in readable if path.name != "lock"] == []


def test_after_kill_9_it_is_back_and_nothing_acknowledged_is_lost(
    mine: Broker, settings: Callable[..., Settings]
) -> None:
    address = mine.start()
    topics(settings(), address).create("safe", 1)
    for sent in (20_000, 40_000):
        send(address, "safe", 20_000)
        assert mine.pid is not None
        os.kill(mine.pid, signal.SIGKILL)
        wait_for(lambda: not mine.running(), "the kill is noticed")
        assert mine.restart() == address
        assert topics(settings(), address).offsets("safe").total == sent


def test_its_classes_come_from_the_archive_that_a_warm_up_made(settings: Callable[..., Settings]) -> None:
    made = settings()
    # Of this machine's user: `make setup` has done it already. A process of its own, since a process has one Spark.
    subprocess.run([sys.executable, "-m", "streaming_jobs.warm_up"], cwd=ROOT, check=True, timeout=170)
    _, archive = archives(made)
    with Broker(made) as broker:
        assert broker.pid is not None
        mapped = {Path(part.path) for part in psutil.Process(broker.pid).memory_maps()}
    assert archive in mapped


def test_the_newest_values_are_those_of_all_partitions_and_of_committed_records_alone(
    broker: Broker, settings: Callable[..., Settings], topic: str
) -> None:
    made = topics(settings(), broker.start())
    made.create(topic, 2)
    assert made.newest_values(topic, 10) == []
    producer = Producer({"bootstrap.servers": made.bootstrap, "transactional.id": topic})
    producer.init_transactions(20)
    for last, values in ((True, [b"old", *[b"new"] * 5]), (False, [b"never"])):
        producer.begin_transaction()
        for partition in (0, 1):
            for value in values:
                producer.produce(topic, value, partition=partition)
        assert producer.flush(20) == 0, "an abort would drop what waits"
        (producer.commit_transaction if last else producer.abort_transaction)(20)
    wait_for(lambda: set(made.offsets(topic).latest.values()) == {9}, "the markers of the abort")
    assert made.newest_values(topic, 8) == [b"new"] * 2, "the last four offsets of each partition have one record"
    assert sorted(map(str, made.newest_values(topic, 100))) == sorted(map(str, [b"new"] * 10 + [b"old"] * 2))
    with pytest.raises(UsageError, match="there is no topic"):
        made.newest_values(f"no-{topic}", 10)


@pytest.mark.parametrize("started", ["in the main thread", "in a thread that ends"])
def test_it_dies_with_its_parent_and_not_before(settings: Callable[..., Settings], started: str) -> None:
    home = settings().broker_dir.parent
    parent = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, str(home), started],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert parent.stdin is not None and parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        assert topics(settings(), bootstrap_servers(settings())).names() == set()  # it outlived the thread
        assert os.getpgid(pid) != os.getpgid(parent.pid)  # a Ctrl-C in the terminal does not reach it
        parent.kill()
        parent.wait()
        killed = time.monotonic()
        wait_for(lambda: gone(pid), "the broker ends after its parent was killed")
        assert time.monotonic() - killed < 30, "by the signal of its parent's death"
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
    with pytest.raises(BrokerUnreachable, match="does not run"):
        bootstrap_servers(settings())


def test_a_second_start_on_one_home_attaches_and_leaves_it_running(
    mine: Broker, settings: Callable[..., Settings]
) -> None:
    address = mine.start()
    second = Broker(settings())
    assert second.start() == address
    assert (second.pid, second.attached, mine.attached) == (mine.pid, True, False)
    second.stop()
    second.kill()
    assert mine.running()
    assert topics(settings(), address).names() == set()


def test_who_is_attached_starts_its_own_when_the_other_s_is_gone(
    mine: Broker, settings: Callable[..., Settings]
) -> None:
    address = mine.start()
    with Broker(settings()) as second:
        mine.kill()
        assert not second.running()
        assert second.restart() == address
        assert not second.attached


def test_two_starts_at_once_on_one_home_give_one_broker(settings: Callable[..., Settings]) -> None:
    both = [Broker(settings()), Broker(settings())]
    starting = [threading.Thread(target=broker.start) for broker in both]
    try:
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        assert both[0].pid == both[1].pid
        assert sorted(broker.attached for broker in both) == [False, True]
    finally:
        for broker in both:
            broker.kill()


def test_a_configured_port_that_is_taken_is_told_with_who_has_it(settings: Callable[..., Settings]) -> None:
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        broker = Broker(settings({"broker.port": port}))
        with pytest.raises(SetupError, match=f"port {port} is taken by .*{os.getpid()}") as refused:
            broker.start()
    assert "RECOURSE_BROKER__PORT" in refused.value.next_step
    assert not broker.running()


def test_a_kept_port_that_is_taken_by_now_is_replaced(mine: Broker, settings: Callable[..., Settings]) -> None:
    address = mine.start()
    mine.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((ports.HOST, int(address.rpartition(":")[2])))
        other.listen()
        assert mine.start() != address


def test_a_broker_that_cannot_start_says_what_its_log_says(mine: Broker, settings: Callable[..., Settings]) -> None:
    mine.start()
    mine.stop()
    (settings().broker_dir / "data" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    with pytest.raises(SetupError, match="node[._ ]?id|nodeId") as failed:
        mine.start()
    assert str(settings().logs / "broker.log") in failed.value.next_step
    assert not mine.running()


def test_a_pid_that_another_process_has_now_is_no_broker(mine: Broker, settings: Callable[..., Settings]) -> None:
    mine.start()
    mine.stop()
    file = settings().broker_dir / "broker.json"
    text = file.read_text()
    old = next(part for part in text.split() if part.strip(",").isdigit())
    file.write_text(text.replace(old, f"{os.getpid()},"))
    assert running(settings()) is None


def test_a_configured_cluster_goes_before_the_embedded_broker(settings: Callable[..., Settings]) -> None:
    configured = settings({"kafka.bootstrap_servers": "kafka.example:9092"})
    assert bootstrap_servers(configured) == "kafka.example:9092"


def test_without_a_broker_the_error_says_how_to_get_one(settings: Callable[..., Settings]) -> None:
    with pytest.raises(BrokerUnreachable, match="does not run") as missing:
        bootstrap_servers(settings())
    assert "recourse up" in missing.value.next_step


def test_client_settings_of_the_embedded_broker_need_no_more_than_its_address(broker: Broker) -> None:
    config = client_config(Settings().kafka, broker.start())
    assert Topics(config, timedelta(seconds=15)).names() >= set()
