"""`recourse doctor`: checks that this machine can run the streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import Output, OutputOption, show_table

if TYPE_CHECKING:
    from streaming_jobs.preflight.doctor import DoctorCheck
    from streaming_jobs.settings import Settings


def doctor(
    context: typer.Context,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Start a session, and prove its executors' versions, folders and clocks.")
    ] = False,
    dagster: Annotated[
        bool, typer.Option("--dagster", help="Compare the Dagster instance of DAGSTER_HOME with what is needed.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Check Java, jars, ports, disk and versions: one line per check, with the fix. Exit code 1 if one fails."""
    from streaming_jobs.preflight import doctor
    from streaming_jobs.preflight.doctor import checks
    from streaming_jobs.preflight.registry_checks import registry_checks

    settings = invocation(context).settings
    results = [*checks(settings), check_jobs(settings), *doctor.archive_checks(settings), *registry_checks(settings)]
    if cluster:
        results += doctor.executor_checks(settings)
    if dagster:
        results += check_dagster(settings)
    value = [{"name": c.name, "verdict": verdict(c), "found": c.found, "fix": c.fix} for c in results]
    rows = [[verdict(c), c.name, c.found, "" if c.ok else c.fix] for c in results]
    show_table(output, value, ["", "check", "found", "fix"], rows)
    if any(verdict(check) == "fail" for check in results):
        raise typer.Exit(1)


def check_jobs(settings: Settings) -> DoctorCheck:
    """The check that Dagster can use the job YAML and the streams that it names."""
    from orchestration.bundle import last_good
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.errors import RecourseError
    from streaming_jobs.platform.extras import MissingExtra, installed
    from streaming_jobs.preflight.doctor import DoctorCheck

    if not installed("dagster"):
        absent = MissingExtra("a check of it", "dagster")
        return DoctorCheck("job YAML", None, absent.found, absent.next_step)

    from orchestration.location import location

    try:
        topology = Topology.load(settings.flows)
    except RecourseError as error:
        return DoctorCheck("job YAML", False, f"the streams cannot be loaded: {error.found}", error.next_step)
    fault = last_good.fault(settings, topology, lambda bundle: location(bundle, topology, settings))
    if fault is None:
        return DoctorCheck("job YAML", True, "names streams that are declared")
    return DoctorCheck("job YAML", False, fault.found, fault.next_step)


def check_dagster(settings: Settings) -> list[DoctorCheck]:
    """The checks of the Dagster instance; without a usable job YAML, which `check_jobs` reports, of no job."""
    from orchestration.bundle import last_good
    from orchestration.local_dagster import instance
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.errors import RecourseError

    try:
        jobs = last_good.read(settings, Topology.load(settings.flows)).jobs
    except RecourseError:
        jobs = ()
    return instance.checks_of_home(settings, jobs)


def verdict(check: DoctorCheck) -> str:
    """The result of a check in a word: `ok`, `warn` or `fail`."""
    return {True: "ok", False: "fail", None: "warn"}[check.ok]
