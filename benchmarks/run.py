"""The harness: the command line, the report of a scenario, and how times are taken, taken in turns and summed up.

    python -m benchmarks                                   the scenarios
    python -m benchmarks NAME --help                       what one measures, and its options
    python -m benchmarks NAME [--OPTION VALUE] [--out FILE.json]

A scenario is a module of `benchmarks/scenarios` with a function `run(report, *, rows: int = 1_000, ...)`: the module's
text is the help, the keyword arguments are the options. Tables go to standard output, progress to standard error. Exit
code 1: a figure missed its bound, or the run proved nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import logging
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import psutil
import structlog

Row = dict[str, Any]
T = TypeVar("T")

_SCENARIOS = Path(__file__).with_name("scenarios")
_PACKAGES = ("pyspark", "delta-spark", "deltalake", "pyarrow", "confluent-kafka")


class Report:
    """What a scenario found: tables and sentences on standard output, and with `out` the same as JSON."""

    def __init__(self, out: Path | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.good = True
        self._out = out
        self._figures: dict[str, Any] = {"machine": machine(), "options": dict(options or {})}

    def table(self, name: str, rows: Sequence[Row]) -> None:
        """Print rows of equal keys. A row that has a verdict other than `good` makes the run a failure."""
        sys.stdout.write(f"{markdown(rows)}\n")
        sys.stdout.flush()
        self.keep(**{name: rows})
        self.judge(not bad(rows))

    def say(self, text: str, **figures: Any) -> None:
        """Print a sentence; `figures` are what it says, for JSON."""
        sys.stdout.write(f"{text}\n")
        self.keep(**figures)

    def keep(self, **figures: Any) -> None:
        """Into the JSON alone, which is written anew with each figure: a run that is cut short leaves what it had."""
        self._figures |= figures
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self._figures, indent=1, default=str) + "\n")

    def judge(self, good: bool) -> None:
        """False makes the run a failure."""
        self.good = self.good and good


def machine() -> dict[str, object]:
    """What a reader has to know of where the figures were taken."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in _PACKAGES},
    }


def markdown(rows: Sequence[Row]) -> str:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def progress(text: str) -> None:
    """A line on standard error, with the time of day."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def verdict(good: bool) -> str:
    return "good" if good else "NOT GOOD"


def bad(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("verdict", "good") != "good"]


def seconds_of(task: Callable[[], object]) -> float:
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """The median; 0 of no values."""
    return float(statistics.median(values)) if values else 0.0


def in_turn(contestants: Sequence[T], number: int) -> Sequence[T]:
    """The contestants in the order of a round: each round begins with another one."""
    first = number % max(len(contestants), 1)
    return [*contestants[first:], *contestants[:first]]


def wait_until(
    done: Callable[[], bool], seconds: float, what: str, *, every: float = 0.1, check: Callable[[], object] = bool
) -> None:
    """Wait for a condition; `check` is called meanwhile, and raises what went wrong. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not done():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(every)


@contextmanager
def panels(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Axes in a grid, by matplotlib, which is not among the packages of `make setup`; written after the block.

    The file's ending says the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    yield [*axes.flat]
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Run the scenario that is named; the exit code."""
    scenarios = sorted(path.stem for path in _SCENARIOS.glob("[a-z]*.py"))
    if not arguments or arguments[0] not in scenarios:
        texts = {name: ast.get_docstring(ast.parse((_SCENARIOS / f"{name}.py").read_text())) for name in scenarios}
        lines = [f"  {name:<12} {(text or '').partition(chr(10))[0]}" for name, text in texts.items()]
        sys.stdout.write("\n".join(["python -m benchmarks NAME [--options]", *lines, ""]))
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order: children, broker and folder go first
    scenario = importlib.import_module(f"benchmarks.scenarios.{arguments[0]}")
    options = vars(command_line(arguments[0], scenario.__doc__, scenario.run).parse_args(arguments[1:]))
    out = options.pop("report_out", None)
    report = Report(out, options)
    scenario.run(report, **options)
    return int(not report.good)


def command_line(name: str, text: str | None, run: Callable[..., None]) -> argparse.ArgumentParser:
    """The options of a scenario, from its keyword arguments; `--out` unless it has its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parameters = inspect.signature(run, eval_str=True).parameters
    for parameter in parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            _add_option(parser, parameter)
    if "out" not in parameters:
        parser.add_argument("--out", dest="report_out", type=Path, metavar="FILE", help="the figures as JSON")
    return parser


def _add_option(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    """bool: a flag; tuple: values separated by commas; Sequence: an option that may be repeated; else one value."""
    kind, text = parameter.annotation, ""
    if get_origin(kind) is Annotated:
        kind, text = get_args(kind)
    flag, default = f"--{parameter.name.replace('_', '-')}", parameter.default
    given = f"default: {','.join(map(str, default)) if isinstance(default, tuple) else default}"
    helped = f"{text}; {given}".strip("; ") if default not in (None, False, (), []) else text
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=text)
    elif get_origin(kind) is Sequence:
        parser.add_argument(flag, action="append", default=[], help=text)
    elif get_origin(kind) is tuple:
        parser.add_argument(flag, type=_values(get_args(kind)[0]), default=default, help=helped)
    else:
        single = next((part for part in get_args(kind) if part is not type(None)), kind)
        parser.add_argument(flag, type=single, default=default, help=helped)


def _values(kind: Any) -> Callable[[str], tuple[Any, ...]]:
    """Reads values with commas between them, each of a type, or one of a Literal's."""

    def read(text: str) -> tuple[Any, ...]:
        parts = [part for part in text.split(",") if part]
        if get_origin(kind) is not Literal:
            return tuple(kind(part) for part in parts)
        if unknown := set(parts) - set(get_args(kind)):
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(get_args(kind))}")
        return tuple(parts)

    return read
