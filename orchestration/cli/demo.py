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
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import say
from streaming_jobs.errors import PermanentError

if TYPE_CHECKING:
    from streaming_jobs.examples.stock.movements import Movement
    from streaming_jobs.settings import Settings


app = typer.Typer(no_args_is_help=True, help="Demonstrations that need no input.", rich_markup_mode=None)

Movements = Annotated[int, typer.Option(min=2_000, help="Stock movements in all.")]
Home = Annotated[
    Path | None, typer.Option(help="An empty folder for the run; default: a temporary one.", show_default=False)
]
Keep = Annotated[bool, typer.Option("--keep", help="Do not remove the folder.")]
_DEADLINE = 300.0
"""Seconds that one command of a demonstration may take."""


@app.callback()
def demo() -> None:
    """Demonstrations that need no input."""


@app.command(short_help="A bug, and its recovery.")
def recovery(context: typer.Context, movements: Movements = 60_000, home: Home = None, keep: Keep = False) -> None:
    """A new version of a stream has a bug and writes impossible rows. Find it, plan, apply, undo, apply again.

    Every step is a command that you could type. After each step the tables are compared with the truth.
    """
    _in_a_home(context, home, keep, lambda at: Story(*at, movements).tell())


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

    def tell(self) -> None:
        half = len(self.all) // 2
        self.say(f"{half:,} stock movements come in; the streams inventory and low_stock read them")
        self.begin()
        self.feed(self.all[:half])
        self.run_streams()
        self.compare(half, right=True)
        self.deploy_wrong_code()
        self.run_streams()
        bad = self.compare(len(self.all), right=False)
        self.say(f"the rule `not {BAD}` turns red: {bad} products have an impossible stock. The function is corrected")
        self.deploy(RIGHT)
        plan = self.plan()
        self.recourse("recover", "apply", plan, "--yes")
        self.compare(len(self.all), right=True)
        self.say("and back: the old rows, as they were")
        self.recourse("recover", "undo", plan, "--yes")
        self.compare(len(self.all), right=False, bad=bad)
        self.say("and once more, for good")
        self.recourse("recover", "apply", self.plan(), "--yes")
        self.compare(len(self.all), right=True)
        self.say("low_stock was written by the same wrong code; its rows are right before that")
        low_stock = ("low_stock", "--before-code", self.wrong_code("low_stock"), "--require", "taken >= 5")
        self.recourse("recover", "apply", self.plan_of(*low_stock, show=False), "--yes")
        self.compare(len(self.all), right=True, low_stock=True)
        self.recourse("recover", "list")
        self.recourse("savepoints", "list", "inventory")
        self.end()

    def tell_quality(self) -> None:
        half = len(self.all) // 2
        self.say(f"{half:,} stock movements come in; the stream inventory reads them, its suite checks the table")
        self.begin()
        self.feed(self.all[:half])
        self.run_streams(["inventory"])
        self.recourse("quality", "run", _SUITE)
        self.deploy_wrong_code()
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

    def deploy_wrong_code(self) -> None:
        """Deploy the bug, and send the second half of the movements."""
        self.say("a new version of the function is deployed. It takes returns and corrections for sales")
        self.deploy(WRONG)
        self.feed(self.all[len(self.all) // 2 :])

    def plan(self) -> str:
        return self.plan_of("inventory", "--before-first-bad", BAD)

    def feed(self, part: Sequence[Movement]) -> None:
        from streaming_jobs.examples.stock.movements import send

        send(self.settings.kafka, self.bootstrap, part)

    def compare(self, count: int, *, right: bool, bad: int | None = None, low_stock: bool = False) -> int:
        """Compare `inventory` with the truth and return the number of products with an impossible stock.

        With `low_stock`, that table has to equal the truth too. Raises PermanentError when a table is not as expected.
        """
        from streaming_jobs.examples.stock import movements

        rows = {r["product"]: r for r in self.rows("inventory")}
        truth = movements.inventory(self.all[:count])
        same = {p: (r["quantity"], r["movements"], r["last_at"].astimezone(UTC)) for p, r in rows.items()} == truth
        taken = sorted((r["product"], r["taken"], r["at"].astimezone(UTC)) for r in self.rows("low_stock"))
        same_taken = taken == movements.low_stock(self.all[:count])
        wrong = sum(1 for row in rows.values() if row["quantity"] < 0)
        self.say(
            f"  inventory: {len(rows)} products, {'every row equals' if same else 'not equal to'} the truth, "
            f"{wrong} below nothing; low_stock: {len(taken):,} rows, "
            f"{'equal' if same_taken else 'not equal'} to the truth"
        )
        self.expect(same_taken or not low_stock, "low_stock is")
        self.expect(same == right and bad in (None, wrong) and (right or wrong > 0), "the tables are")
        return wrong


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
        CommittedReader.at(self.settings.kafka, self.bootstrap, topic).content(each=records.append)
        return [
            json.loads(record.value or b"{}")
            for record in records
            if not void.count({record.partition: (record.offset, record.offset + 1)})
        ]
