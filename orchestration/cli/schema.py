"""`recourse schema`: the newest schema of a subject of the registry, to be declared in code."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import say
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands


def schema(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(help="Such as orders-value, for the values of topic orders.")],
) -> None:
    """Print the newest schema of a subject, as the registry has it: the text that `Avro` or `JsonSchema` declares."""
    from streaming_jobs.registry.client import Registry, RegistryAddress

    call = invocation(context)
    found = Registry(RegistryAddress.of(call.settings.registry)).latest(subject)
    if found is None:
        raise UsageError(f"the registry has no subject '{subject}'", f"see registry.url: `{commands.settings()}`")
    print(found.text)
    say(f"{found.kind.lower()}{', with ' + ', '.join(found.references) if found.references else ''}")
