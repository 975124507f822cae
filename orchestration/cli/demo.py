"""`recourse demo`: a bug, and how it is found and put right, with real commands on a broker of its own."""

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
from typing import TYPE_CHECKING, Annotated, Any

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


@app.callback()
def demo() -> None:
    """Demonstrations that need no input."""


@app.command(short_help="A bug, and how it is put right.")
def recovery(
    context: typer.Context,
    movements: Movements = 60_000,
    home: Home = None,
    keep: Keep = False,
) -> None:
    """A new version of a stream has a bug and writes impossible rows. Find it, plan, apply, undo, apply again.

    Every step is a command that you could type. After each step the tables are compared with the truth.
    """
    _run(context, home, keep, movements, Story.tell)


@app.command(short_help="A check turns red, and leads to the recovery.")
def quality(
    context: typer.Context,
    movements: Movements = 60_000,
    home: Home = None,
    keep: Keep = False,
) -> None:
    """A bug makes a suite red. It names batch, code and command; the recovery passes the suite, and is published.

    Every step is a command that you could type.
    """

    _run(context, home, keep, movements, tell_quality, suites=STOCK_SUITES)


@app.command(short_help="A bug in the first of three streams, put right through the topics between them.")
def topology(
    context: typer.Context,
    orders: Annotated[int, typer.Option(min=2_000, help="Orders and deliveries in all.")] = 30_000,
    home: Home = None,
    keep: Keep = False,
) -> None:
    """A bug in the first of three streams makes two topics and a table wrong. Plan, apply, undo, apply again.

    Every step is a command that you could type. After each step the topics and the table are compared with the truth.
    """

    def tell(folder: Path, settings: Settings, bootstrap: str) -> None:
        ShopStory(folder, settings, bootstrap, orders).tell()

    _in_a_home(context, home, keep, tell)


def _run(
    context: typer.Context,
    home: Path | None,
    keep: bool,
    movements: int,
    tell: Callable[[Story], None],
    suites: Sequence[str] = (),
) -> None:
    _in_a_home(context, home, keep, lambda at, made, servers: tell(Story(at, made, servers, movements, suites)))


def _in_a_home(
    context: typer.Context, home: Path | None, keep: bool, tell: Callable[[Path, Settings, str], None]
) -> None:
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import fetch_jars
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.platform.files import private_folder
    from streaming_jobs.settings import Settings

    base = invocation(context).settings
    folder = Path(home or tempfile.mkdtemp(prefix="recourse-demo-")).absolute()
    private_folder(folder)
    machine = {"jars_dir": base.jars_dir, "java_home": base.java_home}
    settings = Settings.load({"home": folder, **{key: path for key, path in machine.items() if path is not None}})
    try:
        with stop_signals_interrupt():
            fetch_jars(base, broker=True)
            with Broker(settings) as broker:
                tell(folder, settings, broker.start())
    finally:
        if keep:
            say(f"the home is kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


_DEADLINE = 300.0


class Demonstration:
    """A home in `folder` with the flows module `module`, a copy of `source` in which the text `right` is replaced."""

    def __init__(self, folder: Path, settings: Settings, bootstrap: str, module: str, source: Path, right: str) -> None:
        self.folder, self.settings, self.bootstrap, self.right = folder, settings, bootstrap, right
        self.streams: Sequence[str] = ()
        self.suites: Sequence[str] = ()
        self.module, self.text = module, source.read_text(encoding="utf-8")
        self.code = folder / "code" / f"{module}.py"
        self.code.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()

    def deploy(self, change: str) -> None:
        """Write another version of the function into the module from which the streams are imported."""
        text = self.text.replace(self.right, change)
        if text == self.text and change != self.right:
            raise PermanentError("the line to change is not in the flows")
        self.code.write_text(text, encoding="utf-8")
        self.say(f"  {self.code.name}: {change}")

    def run_streams(self, names: Sequence[str] = ()) -> None:
        self.recourse("streams", "run", *(names or self.streams), "--trigger", "available-now", quiet=True)

    def rows(self, table: str) -> list[dict[str, Any]]:
        from streaming_jobs.platform.table_rows import rows

        return list(rows(self.settings.tables / table).to_pylist())

    def recourse(self, *arguments: str, quiet: bool = False, code: int = 0) -> str:
        """Run a command as a person would, show its output unless `quiet`, and return its stdout.

        Raises PermanentError if it ends with another exit code than `code`.
        """
        self.say(f"$ recourse {' '.join(_shown(a) for a in arguments)}")
        done = subprocess.run(
            [sys.executable, "-m", "orchestration.cli", *arguments],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            check=False,
        )
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
            "RECOURSE_FLOWS": json.dumps([self.module]),
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


class Story(Demonstration):
    def __init__(
        self, folder: Path, settings: Settings, bootstrap: str, count: int, suites: Sequence[str] = ()
    ) -> None:
        from streaming_jobs.examples.stock import movements, streams

        super().__init__(folder, settings, bootstrap, "stock_flows", Path(str(streams.__file__)), RIGHT)
        self.streams, self.suites = STREAMS, suites
        self.all: Sequence[Movement] = movements.movements(count)

    def tell(self) -> None:
        half = len(self.all) // 2
        self.say(f"{half:,} stock movements come in; the streams inventory and low_stock read them")
        self.begin()
        self.feed(self.all[:half])
        self.run_streams()
        self.compare(half, right=True)
        self.say("a new version of the function is deployed. It takes returns and corrections for sales")
        self.deploy(WRONG)
        self.feed(self.all[half:])
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
        self.recourse("recover", "apply", self.plan_low_stock(), "--yes")
        self.compare(len(self.all), right=True, low_stock=True)
        self.recourse("recover", "list")
        self.recourse("savepoints", "list", "inventory")
        self.say(f"done in {time.monotonic() - self.began:.0f} s")

    def begin(self) -> None:
        from streaming_jobs.examples.stock.movements import PARTITIONS, TOPIC
        from streaming_jobs.sources.topics import Topics

        Topics.of(self.settings.kafka, self.bootstrap).create(TOPIC, PARTITIONS)
        self.code.write_text(self.text, encoding="utf-8")

    def plan(self) -> str:
        arguments = ["recover", "plan", "inventory", "--before-first-bad", BAD]
        plan = str(json.loads(self.recourse(*arguments, "--output", "json", quiet=True))["id"])
        self.recourse("recover", "show", plan)
        return plan

    def plan_low_stock(self) -> str:
        from streaming_jobs.state import stream_record

        record = stream_record.load(self.settings, "low_stock")
        assert record is not None
        arguments = ["recover", "plan", "low_stock", "--before-code", record.code[1].hash, "--require", "taken >= 5"]
        return str(json.loads(self.recourse(*arguments, "--output", "json", quiet=True))["id"])

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
        wrong = sum(1 for row in rows.values() if row["quantity"] < 0)
        self.say(
            f"  inventory: {len(rows)} products, {'every row equals' if same else 'not equal to'} the truth, "
            f"{wrong} below nothing; low_stock: {len(taken):,} rows, "
            f"{'equal' if taken == movements.low_stock(self.all[:count]) else 'not equal'} to the truth"
        )
        if low_stock and taken != movements.low_stock(self.all[:count]):
            raise PermanentError("low_stock is not what the story says", f"look at it: --keep, {self.folder}")
        if same != right or (bad is not None and wrong != bad) or (not right and not wrong):
            raise PermanentError("the tables are not what the story says", f"look at them: --keep, {self.folder}")
        return wrong


ORDERS = 30_000
RIGHT_CHANGE = 'F.when(F.col("unit") == "box", F.col("quantity") * PIECES_OF_A_BOX).otherwise(F.col("quantity"))'
WRONG_CHANGE = 'F.col("quantity")'
SHOP_STREAMS = ("stock_changes", "stock", "availability")
CHANGES, LEVELS, TABLE = "shop_stock_changes", "shop_stock", "availability"


class ShopStory(Demonstration):
    def __init__(self, folder: Path, settings: Settings, bootstrap: str, count: int = ORDERS) -> None:
        from streaming_jobs.examples.shop import orders, streams

        super().__init__(folder, settings, bootstrap, "shop_flows", Path(str(streams.__file__)), RIGHT_CHANGE)
        self.streams = SHOP_STREAMS
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
        self.say("the function is corrected. The plan takes the streams along that read its records")
        self.deploy(RIGHT_CHANGE)
        plan = self.plan()
        self.recourse("recover", "apply", plan, "--yes")
        self.compare(len(self.all), right=True)
        self.say("and back: the old rows, and the old records count again")
        self.recourse("recover", "undo", plan, "--yes")
        self.compare(len(self.all), right=False)
        self.say("and once more, for good: it goes back behind the ranges that the first one has declared void")
        self.recourse("recover", "apply", self.plan(), "--yes")
        self.compare(len(self.all), right=True)
        self.recourse("recover", "list")
        self.say(f"done in {time.monotonic() - self.began:.0f} s")

    def begin(self) -> None:
        from streaming_jobs.examples.shop.streams import TOPICS
        from streaming_jobs.sources.topics import Topics

        topics = Topics.of(self.settings.kafka, self.bootstrap)
        for topic, partitions in TOPICS.items():
            topics.create(topic, partitions)
        self.code.write_text(self.text, encoding="utf-8")

    def feed(self, begin: int, end: int) -> None:
        from streaming_jobs.examples.shop.orders import send

        send(self.settings.kafka, self.bootstrap, self.all[begin:end])

    def run_in_order(self) -> None:
        """Run each stream until it has read what the one before it has written."""
        for name in self.streams:
            self.run_streams([name])

    def plan(self) -> str:
        from streaming_jobs.state import stream_record

        record = stream_record.load(self.settings, "stock_changes")
        assert record is not None
        arguments = ["recover", "plan", "stock_changes", "--before-code", record.code[1].hash]
        plan = str(json.loads(self.recourse(*arguments, "--output", "json", quiet=True))["id"])
        self.recourse("recover", "show", plan)
        return plan

    def compare(self, count: int, *, right: bool) -> None:
        """Compare the table and both topics with the truth; raises PermanentError if they are not as expected."""
        from streaming_jobs.examples.shop import orders

        truth = self.all[:count]
        changes = Counter((r["product"], r["pieces"]) for r in self.counting(CHANGES))
        levels = {r["product"]: (r["pieces"], r["changes"]) for r in self.counting(LEVELS)}
        shown = sorted(({k: r[k] for k in ("product", "pieces", "available")} for r in self.rows(TABLE)), key=_product)
        same = {
            CHANGES: changes == Counter((order.product, order.pieces) for order in truth),
            LEVELS: levels == orders.true_levels(truth),
            TABLE: shown == orders.true_availability(truth),
        }
        self.say("  " + "; ".join(f"{name} {'equals' if ok else 'is not'} the truth" for name, ok in same.items()))
        if set(same.values()) != {right}:
            raise PermanentError("the shop is not what the story says", f"look at it: --keep, {self.folder}")

    def counting(self, topic: str) -> Sequence[Mapping[str, Any]]:
        """The values of a topic's records that are not void, in the order of each partition."""
        from streaming_jobs.sources.topics import Topics
        from streaming_jobs.state.topic_records import void_of
        from streaming_jobs.verification.topic import CommittedReader, RawRecord

        info = Topics.of(self.settings.kafka, self.bootstrap).describe(topic)
        assert info is not None
        void, found = void_of(self.settings, topic, info.id), list[RawRecord]()
        CommittedReader.at(self.settings.kafka, self.bootstrap, topic).content(each=found.append)
        return [
            json.loads(record.value or b"{}")
            for record in found
            if not void.count({record.partition: (record.offset, record.offset + 1)})
        ]


def _product(row: Mapping[str, Any]) -> str:
    return str(row["product"])


STOCK_SUITES = ("quality.examples.stock",)
_SUITE = "inventory_rows"
_RED = 1


def tell_quality(story: Story) -> None:
    half = len(story.all) // 2
    story.say(f"{half:,} stock movements come in; the stream inventory reads them, its suite looks at the table")
    story.begin()
    story.feed(story.all[:half])
    story.run_streams(["inventory"])
    story.recourse("quality", "run", _SUITE)
    story.say("a new version of the function is deployed. It takes returns and corrections for sales")
    story.deploy(WRONG)
    story.feed(story.all[half:])
    story.run_streams(["inventory"])
    command = _offered(story, story.recourse("quality", "run", _SUITE, code=_RED))
    story.say(f"it is red, and offers: {command}")
    story.say("with the wrong code still deployed, a plan is refused")
    story.recourse(*shlex.split(command)[1:], code=2)
    story.say("the function is corrected")
    story.deploy(RIGHT)
    plan = str(json.loads(story.recourse(*shlex.split(command)[1:], "--output", "json", quiet=True))["id"])
    story.recourse("recover", "show", plan)
    story.say("the suite judges the rebuilt rows before they are published")
    story.recourse("recover", "apply", plan, "--yes")
    story.recourse("quality", "run", _SUITE)
    story.recourse("quality", "history", _SUITE)
    story.say(f"done in {time.monotonic() - story.began:.0f} s")


def _offered(story: Story, printed: str) -> str:
    found = re.search(r"next: (recourse recover plan .+)", printed)
    if found is None:
        raise PermanentError("the red suite names no batch", f"look at it: --keep, {story.folder}")
    return found[1]
