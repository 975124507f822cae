"""`recourse up`: what it starts, in which order it ends, and what it does when something dies."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import structlog

from orchestration.cli import preparations, up
from orchestration.cli.children import Retried
from orchestration.cli.options import Invocation
from orchestration.cli.preparations import sole_use
from orchestration.cli.progress import CatchingUp, ObservedStream, Screen, lines
from orchestration.cli.text import log_to_stderr, say
from orchestration.cli.up import FeederState
from streaming_jobs.errors import SetupError, UsageError
from streaming_jobs.platform.ports import free_port
from streaming_jobs.platform.processes.child import ChildCommand
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import Health, Reason
from streaming_jobs.state.lease import Owner
from streaming_jobs.state.status import Status
from tests.conftest import SettingsFactory
from tests.unit.orchestration.cli.conftest import Run

pytestmark = pytest.mark.slow

Events = list[str]


class Fake:
    """A part of what `up` starts; tells what is done to it."""

    called: ClassVar[Events] = []
    name = ""

    def __init__(self, settings: Settings, **options: object) -> None:
        pass

    def stop(self) -> None:
        self.called.append(f"{self.name} stop")

    def kill(self) -> None:
        self.called.append(f"{self.name} kill")


class FakeBroker(Fake):
    """Dies when told to."""

    name, alive = "broker", True

    def start(self) -> str:
        self.called.append("broker start")
        return "127.0.0.1:9"

    def restart(self) -> None:
        self.called.append("broker restart")
        FakeBroker.alive = True

    def running(self) -> bool:
        return FakeBroker.alive


class FakeProcesses(Fake):
    """The broker dies at the second look, and Ctrl-C comes at the fourth."""

    name, looks = "dagster", 0

    def __init__(self, settings: Settings) -> None:
        self.called.append(f"dagster port {settings.dagster.port}")

    def start(self) -> str:
        self.called.append("dagster start")
        return "http://127.0.0.1:3000"

    def supervise(self) -> None:
        FakeProcesses.looks += 1
        FakeBroker.alive = FakeProcesses.looks != 2
        if FakeProcesses.looks == 4:
            raise KeyboardInterrupt


class FakeFeeder(Fake):
    name, state = "feeder", FeederState("feeding", 1, 2)

    def __init__(self, settings: Settings, **options: object) -> None:
        self.options = options

    def start(self) -> None:
        self.called.append(f"feeder start {self.options}")


PARTS = {
    "home": (preparations, "sole_use"),
    "jars": (preparations, "fetch_jars"),
    "broker": (FakeBroker, "start"),
    "topics": (up, "_topics"),
    "Dagster": (FakeProcesses, "start"),
}


@dataclass
class Up:
    """Everything that `up` starts, faked at its border, and the command."""

    run: Run
    patch: pytest.MonkeyPatch
    events: Events = field(default_factory=list)
    """What was called."""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run the command, which ends with this exit code; its messages."""
        return self.run.said(*arguments, code=code)

    def fails_first(self, part: str, error: Exception) -> Events:
        """Has one part of the start fail once; each try of it is in the list."""
        works, tries = getattr(*PARTS[part]), Events()

        def attempt(*arguments: object, **named: object) -> object:
            tries.append(part)
            if len(tries) == 1:
                raise error
            return works(*arguments, **named)

        self.patch.setattr(*PARTS[part], attempt)
        return tries


@pytest.fixture
def everything(empty_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Up:
    monkeypatch.delenv("RECOURSE_DEMO")
    monkeypatch.setattr(Invocation, "export", lambda self: None)
    made = Up(run, monkeypatch)
    called = made.events
    monkeypatch.setattr(Fake, "called", called)
    monkeypatch.setattr(FakeBroker, "alive", True)
    monkeypatch.setattr(FakeProcesses, "looks", 0)
    processes = ModuleType("orchestration.local_dagster.processes")
    processes.DagsterProcesses = FakeProcesses  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orchestration.local_dagster.processes", processes)
    monkeypatch.setattr("streaming_jobs.platform.broker.Broker", FakeBroker)
    monkeypatch.setattr(preparations, "quick_checks", lambda settings, ui: called.append("checks"))
    monkeypatch.setattr(preparations, "fetch_jars", lambda settings, broker: called.append(f"jars {broker}"))
    monkeypatch.setattr(preparations, "warm_up_once", lambda settings: called.append("warm-up"))
    monkeypatch.setattr(up, "_topics", lambda call: called.append("topics"))
    monkeypatch.setattr(up, "FeederThread", FakeFeeder)
    monkeypatch.setattr(up.time, "sleep", lambda seconds: None)
    return made


BEGIN = ["checks", "jars True", "warm-up", "broker start", "topics"]


def test_it_starts_in_order_restarts_a_dead_broker_and_ends_in_the_opposite_order(everything: Up) -> None:
    printed = everything.run.ended(0, "up")
    assert printed.out == "" and "http://127.0.0.1:3000" in printed.err
    feeder = "feeder start {'rate': 2000.0, 'share': 1.0}"
    assert everything.events == [
        *BEGIN,
        *("dagster port 3000", "dagster start", feeder, "broker restart"),
        *("feeder stop", "dagster stop", "broker stop"),
    ]


def test_a_configured_cluster_gets_no_broker_of_ours(everything: Up) -> None:
    everything("--set", "kafka.bootstrap_servers=kafka:9092", "up", "--rate", "0", "--port", "3111")
    dagster = ["dagster port 3111", "dagster start", "dagster stop"]
    assert everything.events == ["checks", "jars False", "topics", *dagster]


def test_it_serves_the_figures_if_the_settings_name_a_port(everything: Up) -> None:
    port, answers = free_port(), []

    def started(_: FakeProcesses) -> str:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            answers.append(answer.status)
        return "http://127.0.0.1:3000"

    everything.patch.setattr(FakeProcesses, "start", started)
    said = everything("--set", f"metrics.port={port}", "--set", "quality.free_disk_mb=0", "up", "--rate", "0")
    assert answers == [200] and f"http://127.0.0.1:{port}/metrics" in said and "stopping: figures" in said
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10)


def test_what_started_is_ended_when_the_rest_cannot_start(everything: Up) -> None:
    everything.fails_first("Dagster", SetupError("port 3000 is taken", "--port 0"))
    assert "REC-003 port 3000 is taken\n  next: --port 0" in everything("up", code=1)
    assert everything.events[-2:] == ["dagster stop", "broker stop"]


def test_a_second_up_on_one_home_is_refused(everything: Up) -> None:
    with sole_use(Settings.load()):
        assert f"process {os.getpid()}" in everything("up", code=2)
    assert everything.events == []
    everything("up", "--rate", "0")  # the lock goes with its holder


@pytest.mark.parametrize("code", [0, 1])
def test_once_ends_with_the_verdict_and_starts_no_dagster(code: int, everything: Up) -> None:
    everything.patch.setattr(up, "run_once", lambda call, share, output: code)
    everything("up", "--once", "--share", "0.5", code=code)
    assert everything.events == [*BEGIN, "broker stop"]


def test_a_broker_that_does_not_come_up_is_tried_again_later_each_time_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now, tries = [100.0], []

    def restart() -> None:
        tries.append(now[0])
        if len(tries) < 10:
            raise SetupError("the broker ended while it started")

    keep = Retried("broker", restart, Path("/home"), clock=lambda: now[0])
    while len(tries) < 10:
        keep()
        now[0] += 1.0
    assert [after - before for before, after in pairwise(tries)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    printed = capsys.readouterr().err
    assert printed.count("the broker ended while it started") == 1
    assert "broker: works again" in printed


def test_a_full_disk_ends_nothing_and_is_told_with_its_path(everything: Up, empty_folder: Path) -> None:
    looks = iter([FULL, KeyboardInterrupt()])

    def supervise(self: object) -> None:
        raise next(looks)

    everything.patch.setattr(FakeProcesses, "supervise", supervise)
    assert f"Dagster: REC-003 {empty_folder / '.recourse'}: No space left on device" in everything("up")
    assert not list(looks)


FULL = OSError(errno.ENOSPC, "No space left on device")
BROKER_ENDED = SetupError("the broker ended while it started", may_pass=True)


@pytest.mark.parametrize(
    ("part", "error", "words"),
    [
        *((part, FULL, "No space left on device") for part in PARTS),
        ("broker", BROKER_ENDED, "broker: REC-003 the broker ended"),
    ],
)
def test_a_first_start_waits_for_a_full_disk_and_for_a_broker_that_does_not_come_up(
    everything: Up, part: str, error: Exception, words: str
) -> None:
    tries = everything.fails_first(part, error)
    said = everything("up")
    assert len(tries) == 2 and everything.events[-1] == "broker stop"
    assert said.count(words) == 1 and "tried again in 1 s" in said and "works again" in said


def test_what_a_person_has_to_mend_ends_the_first_start_unless_the_disk_is_full(everything: Up) -> None:
    everything.fails_first("broker", SetupError("port 9092 is taken", "choose another one"))
    everything("up", code=1)
    tries = everything.fails_first("Dagster", SetupError("Dagster's webserver ended at once"))
    everything("--set", f"quality.free_disk_mb={2**40}", "up")
    assert len(tries) == 2


def test_once_waits_for_nothing(everything: Up) -> None:
    tries = everything.fails_first("broker", FULL)
    everything("up", "--once", code=1)
    assert len(tries) == 1


def test_topics_are_created_only_on_a_broker_of_ours(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: Events = []
    there = SimpleNamespace(names=lambda cluster="": {"things"}, create=lambda name, partitions: created.append(name))
    monkeypatch.setattr("streaming_jobs.sources.topics.Topics.of", lambda *_: there)
    topology = SimpleNamespace(topics={"things": None, "thigns": None})
    with pytest.raises(SetupError, match="kafka:9092 has no topic thigns"):
        preparations.create_topics(settings(), topology, "kafka:9092", ours=False)  # type: ignore[arg-type]
    assert created == []
    assert preparations.create_topics(settings(), topology, "127.0.0.1:9", ours=True) == ["thigns"]  # type: ignore[arg-type]
    assert created == ["thigns"]


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ([], True),
        (["--set", "kafka.bootstrap_servers=kafka:9092"], True),
        (["--set", "kafka.bootstrap_servers=kafka:9092", "--set", 'flows=["tests.support.tick_flows"]'], False),
        (["--set", 'flows=["tests.support.tick_flows"]'], True),
    ],
)
def test_whose_the_broker_is(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], ours: bool
) -> None:
    """The demonstration makes its own topic in any cluster."""
    asked: list[bool] = []
    monkeypatch.setattr(preparations, "create_topics", lambda *_, ours: asked.append(ours) or [])
    monkeypatch.setattr("streaming_jobs.platform.broker.bootstrap_servers", lambda _: "127.0.0.1:9")
    call = Invocation(values=dict(each.split("=", 1) for each in arguments[1::2]))
    call.demonstrate()
    up._topics(call)
    assert asked == [ours]


def test_a_line_for_people_is_dropped_when_the_disk_of_the_log_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115 - its close fails too
    monkeypatch.setattr(sys, "stderr", full)
    try:
        say("a line")
        log_to_stderr()
        structlog.get_logger().error("an event")
    finally:
        monkeypatch.undo()
        structlog.reset_defaults()
        with contextlib.suppress(OSError):
            full.close()


OK = SimpleNamespace(table="flights_clean", ok=True, expected_rows=10, found_rows=10, detail="every row is equal")
WRONG = SimpleNamespace(table="airport_hours", ok=False, expected_rows=5, found_rows=4, detail="1 rows missing")


Compared = Callable[..., Events]


@pytest.fixture
def compared(everything: Up) -> Compared:
    """Fakes the topic's content, the feeder, the session and the comparison of `--once`."""

    def fake(*checks: SimpleNamespace, records: int = 0, total: int = 100, complete: bool = False) -> Events:
        called: Events = []

        def feed(settings: Settings, **options: object) -> SimpleNamespace:
            called.append(f"feed {options}")
            return SimpleNamespace(records=total, seconds=1.0, rate=100.0, held=total, total=total, stopped=False)

        there = SimpleNamespace(records=records, total=total, complete=complete)
        patch = everything.patch.setattr
        patch("streaming_jobs.examples.flights.feeder.survey", lambda settings, share: there)
        patch("streaming_jobs.examples.flights.truth.compare", lambda settings, streams, share: list(checks))
        patch(up, "feed_with_bar", feed)
        patch(up, "process", lambda call, streams: called.append(f"process {sorted(streams)}"))
        return called

    return fake


STREAMS = "process ['airport_hours', 'carrier_totals', 'flights_clean']"


def test_once_feeds_processes_and_compares(compared: Compared, run: Run) -> None:
    called = compared(OK)
    printed = run.ended(0, "up", "--once", "--share", "0.5")
    assert called == ["feed {'rate': None, 'share': 0.5}", STREAMS]
    assert "flights_clean" in printed.out and "every table equals the truth" in printed.err


def test_once_does_not_feed_twice_and_fails_when_a_table_is_wrong(compared: Compared, run: Run) -> None:
    called = compared(OK, WRONG, records=100, complete=True)
    value = run.json("up", "--once", code=1)
    assert called == [STREAMS] and value["ok"] is False and value["tables"][1] == vars(WRONG)


def test_once_refuses_a_topic_that_holds_more_than_the_share(compared: Compared, run: Run) -> None:
    called = compared(OK, records=16838, complete=True)
    assert "--share 0.05," in run.said("up", "--once", "--share", "0.01") and called == []


def test_without_an_extra_up_says_which_before_anything_is_started(
    everything: Up, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"dagster"}
    monkeypatch.setattr("streaming_jobs.platform.extras.installed", lambda extra: extra not in missing)
    assert "recourse-streams[dagster]" in run.said("up", code=1)
    missing.clear()
    missing.add("demo")
    for arguments in (["up"], ["up", "--once"]):
        assert "recourse-streams[demo]" in run.said(*arguments, code=1)
    assert everything.events == []


def test_the_port_of_the_command_is_taken_also_with_streams_of_ones_own(everything: Up) -> None:
    everything("--set", 'flows=["tests.support.tick_flows"]', "up", "--rate", "0", "--port", "3111")
    assert "dagster port 3111" in everything.events


def test_once_processes_other_streams_without_feed_and_comparison(compared: Compared, run: Run) -> None:
    called = compared(WRONG)
    value = run.json("--set", 'flows=["tests.support.tick_flows"]', "up", "--once")
    assert called == [f"process {value['streams']}"] and value["ok"] is True


@pytest.mark.parametrize("records", [1, 100, 16838, 336775, 336776])
def test_the_share_that_is_named_stands_for_just_so_many_records(records: int) -> None:
    from streaming_jobs.examples.flights.dataset import TOTAL, flights_in

    assert flights_in(float(up.share_of(records, TOTAL))) == records


def nowhere(_: str) -> tuple[dict[str, dict[int, int]], None]:
    return {}, None


def test_a_session_that_fails_is_told_with_its_log(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(streams: object, environment: dict[str, str], **_: object) -> ChildCommand:
        return ChildCommand([sys.executable, "-c", "raise SystemExit(78)"], environment)

    monkeypatch.setattr("orchestration.cli.children.session_driver", failing)
    monkeypatch.setattr("orchestration.cli.progress.catching_up", lambda *_: CatchingUp([], nowhere, {}, {}))
    with pytest.raises(up.SessionFailed, match="exit code 78") as failed:
        up.process(Invocation(), ["flights_clean"])
    assert "session-once.log" in failed.value.next_step


def test_the_screen_without_a_terminal_is_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    status = Status("count", "running", 1, generation=1, batch=7, lag_records=1200, processed_rows_per_s=50.0)
    owner = Owner(1, 0.0, None, None, 0.0, "session")
    seen = [ObservedStream("count", "running", 0.0, status, owner, Health("count", 0.0, "running"))]
    with Screen(["open this"], every=60.0) as screen:
        screen.show(seen, FeederState("feeding", 500, 1000, 100.0))
        screen.show(seen, FeederState("feeding", 600, 1000, 100.0))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "open this",
        "count: running, g0001 batch 7, 50 rows/s, lag 1,200, watermark -, 0 dead letters",
        "feeder: feeding 500 of 1,000 (50 %), 100 records/s",
    ]


def test_the_screen_shows_no_figures_of_a_dead_session() -> None:
    status = Status("count", "running", 1, generation=1, batch=7, lag_records=1200)
    gone = Health("count", 0.0, "dead", (Reason("dead", "its session ended"),))
    assert lines([ObservedStream("count", "dead", 0.0, status, None, gone)], None) == ["count: dead"]


def test_a_command_without_a_broker_starts_one_for_itself(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: Events = []

    @contextlib.contextmanager
    def broker(settings: Settings) -> Iterator[SimpleNamespace]:
        called.append("start")
        yield SimpleNamespace(start=lambda: "127.0.0.1:9")
        called.append("stop")

    monkeypatch.setattr("streaming_jobs.platform.broker.Broker", broker)
    monkeypatch.setattr(preparations, "fetch_jars", lambda settings, broker, spark: called.append("jars"))
    with preparations.broker_for_command(Settings.load()) as address:
        assert address == "127.0.0.1:9"
    assert called == ["jars", "start", "stop"]
    configured = Settings.load({"kafka.bootstrap_servers": "kafka:9092"})
    with preparations.broker_for_command(configured) as address:
        assert address == "kafka:9092"
    assert called == ["jars", "start", "stop"]
    with pytest.raises(UsageError), preparations.broker_for_command(configured):
        raise UsageError("what the block raises comes through")
    assert "embedded broker" in capsys.readouterr().err


def test_the_feeder_gives_its_memory_back_when_it_has_ended(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestration.cli.up import FeederThread

    done = threading.Event()
    monkeypatch.setattr("streaming_jobs.examples.flights.dataset.release", done.set)
    there = SimpleNamespace(complete=True, total=5)
    monkeypatch.setattr("streaming_jobs.examples.flights.feeder.survey", lambda settings, share: there)
    feeder = FeederThread(settings(), rate=1.0, share=1.0)
    feeder.start()
    assert done.wait(10) and feeder.state.state == "done"
