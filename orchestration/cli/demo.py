"""`recourse demo`: a bug, and how it is found and recovered, with real commands on a broker of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestration.cli.live import Freshness, LiveInput, Mark, legend
from orchestration.cli.options import invocation
from orchestration.cli.text import say
from streaming_jobs.errors import PermanentError, UsageError

if TYPE_CHECKING:
    from streaming_jobs.examples.stock.movements import Movement
    from streaming_jobs.settings import Settings


app = typer.Typer(no_args_is_help=True, help="Demonstrations that need no input.", rich_markup_mode=None)

Movements = Annotated[int, typer.Option(min=2_000, help="Stock movements in all.")]
BeforeLive = Annotated[int, typer.Option(min=2_000, help="Stock movements before those that arrive meanwhile.")]
Rate = Annotated[int, typer.Option(min=1, help="Stock movements per second that arrive meanwhile.")]
Plot = Annotated[Path | None, typer.Option(help="Also write the plot as a picture: FILE.svg.", show_default=False)]
Home = Annotated[
    Path | None, typer.Option(help="An empty folder for the run; default: a temporary one.", show_default=False)
]
Keep = Annotated[bool, typer.Option("--keep", help="Do not remove the folder.")]
_DEADLINE = 300.0
"""Seconds that one command of a demonstration may take."""
_LIVE_SECONDS = 300.0
"""Seconds for which movements arrive at most."""
_AT_WORK_WITHIN = 120.0
"""Seconds in which streams have read what is there, or have begun in another generation."""
_STOP_WITHIN = 30.0
"""Seconds in which a session stops."""


@app.callback()
def demo() -> None:
    """Demonstrations that need no input."""


@app.command(short_help="A bug, and its recovery while the streams run.")
def recovery(
    context: typer.Context,
    movements: BeforeLive = 40_000,
    rate: Rate = 100,
    plot: Plot = None,
    home: Home = None,
    keep: Keep = False,
) -> None:
    """A new version of a stream has a bug and writes impossible rows. Find it, plan, apply, undo, apply again.

    The streams run throughout, movements keep arriving, and a reader looks at the table every 100 ms: the plot at the
    end shows how far it was behind. Every other step is a command that you could type, after which the tables are
    compared with the truth.
    """
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot}: not a kind of picture that is written", "name a file .svg")
    most = movements + int(rate * _LIVE_SECONDS)
    _in_a_home(context, home, keep, lambda at: Story(*at, most).tell(movements, rate, plot))


@app.command(short_help="A check turns red, and leads to the recovery.")
def quality(context: typer.Context, movements: Movements = 60_000, home: Home = None, keep: Keep = False) -> None:
    """A bug makes a suite red. It names batch, code and command; the recovery passes the suite, and is published.

    Every step is a command that you could type.
    """
    from streaming_jobs.platform.extras import require

    require("quality", "the story of a check")
    _in_a_home(context, home, keep, lambda at: Story(*at, movements, STOCK_SUITES).tell_quality())


@app.command(short_help="A bug in the first of three streams, recovered through the topics between them.")
def topology(
    context: typer.Context,
    orders: Annotated[int, typer.Option(min=2_000, help="Orders and deliveries in all.")] = 30_000,
    home: Home = None,
    keep: Keep = False,
) -> None:
    """A bug in the first of three streams makes two topics and a table wrong. Plan, apply, undo, apply again.

    Every step is a command that you could type. After each step the topics and the table are compared with the truth.
    """
    _in_a_home(context, home, keep, lambda at: ShopStory(*at, orders).tell())


def _in_a_home(
    context: typer.Context, home: Path | None, keep: bool, tell: Callable[[tuple[Path, Settings, str]], None]
) -> None:
    """Tell a story in a folder of its own, with a broker of its own."""
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import fetch_jars
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.settings import Settings
    from streaming_jobs.storage.files import private_folder

    base = invocation(context).settings
    folder = Path(home or tempfile.mkdtemp(prefix="recourse-demo-")).absolute()
    private_folder(folder)
    machine = {"jars_dir": base.jars_dir, "java_home": base.java_home}
    settings = Settings.load({"home": folder, **{key: path for key, path in machine.items() if path is not None}})
    try:
        with stop_signals_interrupt():
            fetch_jars(base, broker=True)
            with Broker(settings) as broker:
                tell((folder, settings, broker.start()))
    finally:
        if keep:
            say(f"the home is kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Flows(NamedTuple):
    """The streams of a story: a copy of `source` named `module`, in which the text `right` is replaced by the bug."""

    module: str
    source: ModuleType
    right: str
    streams: Sequence[str]
    topics: Mapping[str, int]


class Demonstration:
    """A home in `folder` with the streams of a story."""

    def __init__(
        self, folder: Path, settings: Settings, bootstrap: str, flows: Flows, suites: Sequence[str] = ()
    ) -> None:
        self.folder, self.settings, self.bootstrap, self.flows, self.suites = folder, settings, bootstrap, flows, suites
        self.streams = flows.streams
        self.text = Path(str(flows.source.__file__)).read_text(encoding="utf-8")
        self.code = folder / "code" / f"{flows.module}.py"
        self.code.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()

    def begin(self) -> None:
        """Create the topics, and write the right version of the streams."""
        from streaming_jobs.sources.topics import Topics

        topics = Topics.of(self.settings.kafka, self.bootstrap)
        for topic, partitions in self.flows.topics.items():
            topics.create(topic, partitions)
        self.code.write_text(self.text, encoding="utf-8")

    def deploy(self, change: str) -> None:
        """Write another version of the function into the module from which the streams are imported."""
        text = self.text.replace(self.flows.right, change)
        if text == self.text and change != self.flows.right:
            raise PermanentError("the line to change is not in the flows")
        self.code.write_text(text, encoding="utf-8")
        self.say(f"  {self.code.name}: {change}")

    def run_streams(self, names: Sequence[str] = ()) -> None:
        self.recourse("streams", "run", *(names or self.streams), "--trigger", "available-now", quiet=True)

    @contextmanager
    def session(self) -> Iterator[Callable[[], None]]:
        """The streams run in a session of their own until the block ends; the function raises if it has ended."""
        from streaming_jobs.platform.processes.child import JVM_GONE_WITHIN, ChildCommand, ProcessTree

        command = [sys.executable, "-m", "orchestration.cli", "streams", "run", *self.streams]
        log = self.folder / "session.log"
        with log.open("wb") as output:
            child = ChildCommand(
                [*command, "--trigger", "continuous"], self.environment(), self.folder, subprocess.PIPE
            ).start_reaped(output)

        def check() -> None:
            if (code := child.exit_code) is not None:
                tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
                raise PermanentError(f"the session has ended with {code}:\n  {tail}")

        try:
            yield check
        finally:
            tree = ProcessTree.of(child)  # of the sessions too, which lead groups of their own
            code = child.end(_STOP_WITHIN)
            tree.wait(JVM_GONE_WITHIN).kill()
        if code:
            check()

    def wait(self, done: Callable[[], bool], what: str, check: Callable[[], None]) -> None:
        """Wait for a condition; raises PermanentError after a deadline, and what `check` raises meanwhile."""
        deadline = time.monotonic() + _AT_WORK_WITHIN
        while not done():
            check()
            if time.monotonic() > deadline:
                raise PermanentError(
                    f"{what} were not read within {_AT_WORK_WITHIN:g} s", "look at session.log, with --keep"
                )
            time.sleep(0.1)

    def rows(self, table: str) -> list[dict[str, Any]]:
        from streaming_jobs.platform.table_rows import rows

        return list(rows(self.settings.tables / table).to_pylist())

    def plan_of(self, *arguments: str, show: bool = True) -> str:
        """Make a plan of recovery with these arguments, show it, and return its name."""
        planned = self.recourse("recover", "plan", *arguments, "--output", "json", quiet=True)
        plan = str(json.loads(planned)["id"])
        if show:
            self.recourse("recover", "show", plan)
        return plan

    def wrong_code(self, stream: str) -> str:
        """The hash of the wrong version of the code, the second one that the stream has run."""
        from streaming_jobs.state import stream_record

        record = stream_record.load(self.settings, stream)
        assert record is not None
        return record.code[1].hash

    def expect(self, right: bool, what: str) -> None:
        if not right:
            raise PermanentError(f"{what} not what the story says", f"look at the home: --keep, {self.folder}")

    def end(self) -> None:
        self.say(f"done in {time.monotonic() - self.began:.0f} s")

    def command(
        self, folder: Path, environment: Mapping[str, str], *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `recourse` in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "orchestration.cli", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            check=False,
        )

    def recourse(self, *arguments: str, quiet: bool = False, code: int = 0) -> str:
        """Run a command as a person would, show its output unless `quiet`, and return its stdout.

        Raises PermanentError if it ends with another exit code than `code`.
        """
        self.say(f"$ recourse {' '.join(_shown(a) for a in arguments)}")
        done = self.command(self.folder, self.environment(), *arguments)
        if done.returncode != code:
            raise PermanentError(f"it ended with {done.returncode}: {done.stderr[-2000:]}{done.stdout[-500:]}")
        if not quiet:
            messages = [line for line in done.stderr.splitlines() if not line.startswith(("timestamp=", "WARNING"))]
            for line in (*messages, *done.stdout.splitlines()):
                say(f"  {line}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        source = Path(__file__).resolve().parents[2]
        paths = [str(self.code.parent), str(source), os.environ.get("PYTHONPATH", "")]
        settings = {
            "RECOURSE_HOME": str(self.folder),
            "RECOURSE_FLOWS": json.dumps([self.flows.module]),
            "RECOURSE_QUALITY__SUITES": json.dumps([*self.suites]),
            "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if self.settings.jars_dir is not None:
            settings["RECOURSE_JARS_DIR"] = str(self.settings.jars_dir)
        if self.settings.java_home is not None:
            settings["RECOURSE_JAVA_HOME"] = str(self.settings.java_home)
        return {**os.environ, **settings}

    def say(self, text: str) -> None:
        say(f"[{time.monotonic() - self.began:5.1f} s] {text}")


def _shown(argument: str) -> str:
    return f"'{argument}'" if " " in argument else argument


STREAMS = ("inventory", "low_stock")
RIGHT = 'F.when(F.col("kind") == "sold", -F.col("quantity")).otherwise(F.col("quantity"))'
WRONG = 'F.when(F.col("kind") == "received", F.col("quantity")).otherwise(-F.abs("quantity"))'
BAD = "quantity < 0"
STOCK_SUITES = ("quality.examples.stock",)
_SUITE = "inventory_rows"


class Story(Demonstration):
    """Two streams over stock movements; the wrong version takes returns and corrections for sales."""

    def __init__(
        self, folder: Path, settings: Settings, bootstrap: str, count: int, suites: Sequence[str] = ()
    ) -> None:
        from streaming_jobs.examples.stock import movements, streams

        topics = {movements.TOPIC: movements.PARTITIONS}
        super().__init__(folder, settings, bootstrap, Flows("stock_flows", streams, RIGHT, STREAMS, topics), suites)
        self.all: Sequence[Movement] = movements.movements(count)

    def tell(self, before: int, rate: int, plot: Path | None = None) -> None:
        half = before // 2
        self.say(f"{half:,} stock movements come in; the streams inventory and low_stock read them")
        self.begin()
        self.feed(self.all[:half])
        self.run_streams()
        self.compare(half, right=True)
        self.deploy_wrong_code(before)
        self.say(f"the streams run, {rate} movements/s arrive, and a reader looks at the table every 100 ms")
        plans = []
        with self.session() as check:
            self.wait(lambda: self.counted() >= before, "the movements", check)
            live = self.live(before, rate)
            with live.running():
                wrong = self.compare(right=False)
                self.say(f"the rule `not {BAD}` turns red: {wrong} products have an impossible stock. It is corrected")
                self.deploy(RIGHT)
                plans.append(self.plan())
                self.recourse("recover", "apply", plans[0], "--yes")
                self.compare(right=True)
                self.wait(lambda: self.runs_in(2), "movements by the corrected code", check)
                self.say("and back: the old rows, as they were, and those of the movements since")
                undone = self.recourse("recover", "undo", plans[0], "--yes", "--output", "json")
                plans.append(str(json.loads(undone)["plan"]))
                self.compare(right=False)
                self.wait(lambda: self.runs_in(3), "movements after the undo", check)
                self.say("and once more, for good, with low_stock, which was written by the same wrong code")
                plans.append(self.plan_of(*self.streams, "--to-earliest", show=False))
                self.recourse("recover", "apply", plans[2], "--yes")
                self.compare(right=True)
            self.wait(lambda: self.has_read(live.sent), "the rest", check)
        self.compare(live.sent, right=True, low_stock=True)
        self.recourse("recover", "list")
        self.show_freshness(Freshness(live.looks), plans, plot)
        self.end()

    def live(self, sent: int, rate: int, looked: Callable[[], object] = lambda: None) -> LiveInput:
        """Movements that arrive at a rate after the first `sent`, and a reader of the table `inventory`."""
        return LiveInput(
            lambda begin, end: self.feed(self.all[begin:end]),
            self.counted,
            sent=sent,
            most=len(self.all),
            rate=rate,
            looked=looked,
        )

    def counted(self) -> int:
        """The movements in the published table `inventory`."""
        from deltalake.exceptions import TableNotFoundError
        from pyarrow.compute import sum as total

        from streaming_jobs.platform.table_rows import rows

        try:
            counts = rows(self.settings.tables / "inventory", columns=["movements"])["movements"]
            return int(total(counts).as_py() or 0)
        except TableNotFoundError:
            return 0

    def runs_in(self, generation: int, *, streams: Sequence[str] = ("inventory",), batches: int = 3) -> bool:
        """True if each of the streams has finished so many batches in a generation."""
        from streaming_jobs.state.status import read_status

        found = [read_status(self.settings, stream) for stream in streams]
        return all(each and each.generation == generation and each.batches >= batches for each in found)

    def has_read(self, count: int) -> bool:
        """True if both streams have read all of the first `count` movements."""
        from streaming_jobs.ledger.positions import ends_of
        from streaming_jobs.preflight.snapshot import ledger_file

        newest = ledger_file(self.settings, "low_stock").newest("low_stock")
        ends = {} if newest is None else ends_of(newest[0].offsets)
        return self.counted() == count == sum(end for topic in ends.values() for end in topic.values())

    def marks(self, plans: Sequence[str]) -> list[Mark]:
        """The marks of plans in the plot."""
        from reprocessing.plan.plan_file import load

        marks = []
        for plan in plans:
            over = ("U", "undone") if load(self.settings, plan).undoes is not None else ("P", "published")
            for stage, state, sign, words in (
                ("follow", "begun", "f", "a replay follows"),
                ("take_savepoint", "begun", "s", "the stream stops"),
                ("publish", "done", *over),
            ):
                if at := self.times(plan, stage, state):
                    marks.append(Mark(at[-1] if state == "done" else at[0], sign, words))
        return marks

    def times(self, plan: str, stage: str, state: str) -> list[float]:
        """When a stage of a plan was begun, or done."""
        from reprocessing.plan.journal import journal_of

        return [
            line.at for line in journal_of(self.settings, plan).lines() if (line.stage, line.state) == (stage, state)
        ]

    def show_freshness(self, freshness: Freshness, plans: Sequence[str], plot: Path | None) -> None:
        """Print how far the reader was behind, and what each plan took and changed."""
        from reprocessing.plan.journal import journal_of
        from reprocessing.plan.plan_file import load
        from reprocessing.report.facts import facts_of
        from reprocessing.report.page import report_of
        from streaming_jobs.storage.files import write_atomic

        marks = self.marks(plans)
        title = "seconds that table inventory was behind its topic, as a reader saw it every 100 ms"
        self.say(title)
        for each in freshness.lines(marks, min(shutil.get_terminal_size((100, 24)).columns, 160)):
            say(each)
        say(f"       {legend(marks)}")
        self.say(f"the reader waited for further movements {freshness.largest_gap():.1f} s at most")
        for plan in plans:
            stop, end = (self.times(plan, *at)[0] for at in (("take_savepoint", "begun"), ("clean_up", "done")))
            followed = [f"followed for {stop - at[0]:.1f} s" for at in [self.times(plan, "follow", "begun")] if at]
            facts = facts_of(load(self.settings, plan), journal_of(self.settings, plan))
            changed = [f"{each.table}: {each.counts.words()}" for each in facts.differences if each.share]
            say(f"  {plan}: {'; '.join([*followed, f'stopped the stream for {end - stop:.1f} s', *changed])}")
            say(f"    report, while the home is kept: {report_of(self.settings, plan)}")
        if plot is not None:
            write_atomic(plot, freshness.svg(marks, title))

    def tell_quality(self) -> None:
        half = len(self.all) // 2
        self.say(f"{half:,} stock movements come in; the stream inventory reads them, its suite checks the table")
        self.begin()
        self.feed(self.all[:half])
        self.run_streams(["inventory"])
        self.recourse("quality", "run", _SUITE)
        self.deploy_wrong_code(len(self.all))
        self.run_streams(["inventory"])
        offered = re.search(r"next: (recourse recover plan .+)", self.recourse("quality", "run", _SUITE, code=1))
        if offered is None:
            raise PermanentError("the red suite names no batch", f"look at the home: --keep, {self.folder}")
        self.say(f"it is red, and offers: {offered[1]}")
        self.say("with the wrong code still deployed, a plan is refused")
        _, recover, plan, *arguments = shlex.split(offered[1])
        self.recourse(recover, plan, *arguments, code=2)
        self.say("the function is corrected")
        self.deploy(RIGHT)
        plan = self.plan_of(*arguments)
        self.say("the suite judges the rebuilt rows before they are published")
        self.recourse("recover", "apply", plan, "--yes")
        self.recourse("quality", "run", _SUITE)
        self.recourse("quality", "history", _SUITE)
        self.end()

    def deploy_wrong_code(self, count: int) -> None:
        """Deploy the bug, and send the second half of the first `count` movements."""
        self.say("a new version of the function is deployed. It takes returns and corrections for sales")
        self.deploy(WRONG)
        self.feed(self.all[count // 2 : count])

    def plan(self) -> str:
        return self.plan_of("inventory", "--before-first-bad", BAD)

    def feed(self, part: Sequence[Movement]) -> None:
        from streaming_jobs.examples.stock.movements import send

        send(self.settings.kafka, self.bootstrap, part)

    def compare(self, count: int | None = None, *, right: bool, bad: int | None = None, low_stock: bool = False) -> int:
        """Compare `inventory` with the truth and return the number of products with an impossible stock.

        The truth is that of the first `count` movements; None: of those that its rows have counted, while others
        arrive. With `low_stock`, that table has to equal the truth too. Raises PermanentError when a table is not as
        expected.
        """
        from streaming_jobs.examples.stock import movements

        rows = {r["product"]: r for r in self.rows("inventory")}
        read = self.counted_by(rows) if count is None else self.all[:count]
        truth = movements.inventory(read)
        same = {p: (r["quantity"], r["movements"], r["last_at"].astimezone(UTC)) for p, r in rows.items()} == truth
        wrong = sum(1 for row in rows.values() if row["quantity"] < 0)
        words = f"inventory: {len(rows)} products, {'every row equals' if same else 'not equal to'} the truth, "
        words += f"{wrong} below nothing"
        if count is not None:
            taken = sorted((r["product"], r["taken"], r["at"].astimezone(UTC)) for r in self.rows("low_stock"))
            same_taken = taken == movements.low_stock(read)
            words += f"; low_stock: {len(taken):,} rows, {'equal' if same_taken else 'not equal'} to the truth"
            self.expect(same_taken or not low_stock, "low_stock is")
        self.say(f"  {words}")
        self.expect(same == right and bad in (None, wrong) and (right or wrong > 0), "the tables are")
        return wrong

    def counted_by(self, rows: Mapping[str, Mapping[str, Any]]) -> list[Movement]:
        """The movements that rows have counted: the first ones of each product, since its records keep their order."""
        left, counted = {product: row["movements"] for product, row in rows.items()}, []
        for movement in self.all:
            if left.get(movement.product, 0) > 0:
                left[movement.product] -= 1
                counted.append(movement)
        return counted


ORDERS = 30_000
RIGHT_CHANGE = 'F.when(F.col("unit") == "box", F.col("quantity") * PIECES_OF_A_BOX).otherwise(F.col("quantity"))'
WRONG_CHANGE = 'F.col("quantity")'
SHOP_STREAMS = ("stock_changes", "stock", "availability")
CHANGES, LEVELS, TABLE = "shop_stock_changes", "shop_stock", "availability"


class ShopStory(Demonstration):
    """Three streams with topics between them; the wrong version of the first one takes a box for one piece."""

    def __init__(self, folder: Path, settings: Settings, bootstrap: str, count: int = ORDERS) -> None:
        from streaming_jobs.examples.shop import orders, streams

        shop = Flows("shop_flows", streams, RIGHT_CHANGE, SHOP_STREAMS, streams.TOPICS)
        super().__init__(folder, settings, bootstrap, shop)
        self.all = orders.orders(count)

    def tell(self) -> None:
        half = len(self.all) // 2
        self.say(f"{half:,} orders and deliveries; stock_changes -> stock -> availability, topics between them")
        self.begin()
        self.feed(0, half)
        self.run_in_order()
        self.compare(half, right=True)
        self.recourse("streams", "describe")
        self.say("a new version of stock_changes forgets that a box has 12 pieces")
        self.deploy(WRONG_CHANGE)
        self.feed(half, len(self.all))
        self.run_in_order()
        self.compare(len(self.all), right=False)
        self.say("the function is corrected. The plan includes the streams that read its records")
        self.deploy(RIGHT_CHANGE)
        plan = self.plan()
        self.recourse("recover", "apply", plan, "--yes")
        self.compare(len(self.all), right=True)
        self.say("and back: the old rows, and the old records count again")
        self.recourse("recover", "undo", plan, "--yes")
        self.compare(len(self.all), right=False)
        self.say("and once more, for good: it goes back behind the ranges that the first plan has declared void")
        self.recourse("recover", "apply", self.plan(), "--yes")
        self.compare(len(self.all), right=True)
        self.recourse("recover", "list")
        self.end()

    def feed(self, begin: int, end: int) -> None:
        from streaming_jobs.examples.shop.orders import send

        send(self.settings.kafka, self.bootstrap, self.all[begin:end])

    def run_in_order(self) -> None:
        """Run each stream until it has read what the one before it has written."""
        for name in self.streams:
            self.run_streams([name])

    def plan(self) -> str:
        return self.plan_of("stock_changes", "--before-code", self.wrong_code("stock_changes"))

    def compare(self, count: int, *, right: bool) -> None:
        """Compare the table and both topics with the truth; raises PermanentError if they are not as expected."""
        from streaming_jobs.examples.shop import orders

        truth = self.all[:count]
        changes = Counter((r["product"], r["pieces"]) for r in self.counting(CHANGES))
        levels = {r["product"]: (r["pieces"], r["changes"]) for r in self.counting(LEVELS)}
        rows = [{name: row[name] for name in ("product", "pieces", "available")} for row in self.rows(TABLE)]
        same = {
            CHANGES: changes == Counter((order.product, order.pieces) for order in truth),
            LEVELS: levels == orders.true_levels(truth),
            TABLE: sorted(rows, key=lambda row: str(row["product"])) == orders.true_availability(truth),
        }
        self.say("  " + "; ".join(f"{name} {'equals' if ok else 'is not'} the truth" for name, ok in same.items()))
        self.expect(set(same.values()) == {right}, "the shop is")

    def counting(self, topic: str) -> Sequence[Mapping[str, Any]]:
        """The values of a topic's records that are not void, in the order of each partition."""
        from streaming_jobs.sources.topics import Topics
        from streaming_jobs.state.topic_records import void_of
        from streaming_jobs.verification.topic import CommittedReader, RawRecord

        info = Topics.of(self.settings.kafka, self.bootstrap).describe(topic)
        assert info is not None
        void, records = void_of(self.settings, topic, info.id), list[RawRecord]()
        CommittedReader.at(self.settings.kafka, self.bootstrap, topic).content(take=records.extend)
        return [
            json.loads(record.value or b"{}")
            for record in records
            if not void.count({record.partition: (record.offset, record.offset + 1)})
        ]
