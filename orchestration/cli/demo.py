"""`recourse demo`: a bug, and how it is found and put right, with real commands on a broker of its own."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.demo_steps import Steps
from orchestration.cli.invocation import invocation
from orchestration.cli.output import say
from streaming_jobs.errors import PermanentError

if TYPE_CHECKING:
    from streaming_jobs.examples.stock.movements import Movement
    from streaming_jobs.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Demonstrations that need no input.", rich_markup_mode=None)

MOVEMENTS = 60_000
STREAMS = ("inventory", "low_stock")
RIGHT = 'F.when(F.col("kind") == "sold", -F.col("quantity")).otherwise(F.col("quantity"))'
WRONG = 'F.when(F.col("kind") == "received", F.col("quantity")).otherwise(-F.abs("quantity"))'
BAD = "quantity < 0"

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
    movements: Movements = MOVEMENTS,
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
    movements: Movements = MOVEMENTS,
    home: Home = None,
    keep: Keep = False,
) -> None:
    """A bug makes a suite red. It names batch, code and command; the recovery passes the suite, and is published.

    Every step is a command that you could type.
    """
    from orchestration.cli.demo_quality import SUITES, tell

    _run(context, home, keep, movements, tell, suites=SUITES)


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
    from orchestration.cli.demo_topology import ShopStory

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
    """Tell a story of stock movements."""
    _in_a_home(context, home, keep, lambda at, made, servers: tell(Story(at, made, servers, movements, suites)))


def _in_a_home(
    context: typer.Context, home: Path | None, keep: bool, tell: Callable[[Path, Settings, str], None]
) -> None:
    """Tell a story in a folder and on a broker of its own."""
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.setup import fetch_jars
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


class Story(Steps):
    """The steps of the demonstration, each shown as the command that runs."""

    def __init__(
        self, folder: Path, settings: Settings, bootstrap: str, count: int, suites: Sequence[str] = ()
    ) -> None:
        from streaming_jobs.examples.stock import movements, streams

        super().__init__(folder, settings, bootstrap, "stock_flows", Path(str(streams.__file__)), RIGHT)
        self.streams, self.suites = STREAMS, suites
        self.all: Sequence[Movement] = movements.movements(count)

    def tell(self) -> None:
        """Run all steps, from the first movement to the second recovery."""
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
        """Make the topic, and deploy the right code."""
        from streaming_jobs.examples.stock.movements import PARTITIONS, TOPIC
        from streaming_jobs.sources.topics import Topics

        Topics.of(self.settings.kafka, self.bootstrap).create(TOPIC, PARTITIONS)
        self.code.write_text(self.text, encoding="utf-8")

    def plan(self) -> str:
        """Plan the recovery of `inventory`, show it, and return its name."""
        arguments = ["recover", "plan", "inventory", "--before-first-bad", BAD]
        plan = str(json.loads(self.recourse(*arguments, "--output", "json", quiet=True))["id"])
        self.recourse("recover", "show", plan)
        return plan

    def plan_low_stock(self) -> str:
        """Plan the recovery of `low_stock` to before its second version of the code, the wrong one."""
        from streaming_jobs.state import stream_record

        record = stream_record.load(self.settings, "low_stock")
        assert record is not None
        arguments = ["recover", "plan", "low_stock", "--before-code", record.code[1].hash, "--require", "taken >= 5"]
        return str(json.loads(self.recourse(*arguments, "--output", "json", quiet=True))["id"])

    def feed(self, part: Sequence[Movement]) -> None:
        """Send movements."""
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
