"""The columns of a table and their types, compared with the expected ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deltalake.exceptions import DeltaError

from quality.table_checks.base import Check, CheckedTable, in_words
from quality.validation import CheckOutcome, Severity
from streaming_jobs.declare.columns import OWN_COLUMN
from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import counted, instead

_AGAINST = ("declared", "last")
_MARK = "; columns "


@dataclass(frozen=True)
class SameSchema(Check):
    """No column is gone or has another type; an added one is a warning in the text.

    `against="declared"`: the schema that the table's declaration has. `"last"`: the table as of the last validation,
    also if the log no longer has that version, since the outcome's text repeats the columns. None: what is declared if
    there is a declared schema, else the last validation. Order, nullability and comments do not count, and neither do
    columns that Recourse has added itself.
    """

    against: Literal["declared", "last"] | None = None
    severity: Severity = "critical"

    kind = "same_schema"

    def _validate(self) -> None:
        if self.against is not None and self.against not in _AGAINST:
            raise UsageError(f"same_schema: against is {self.against!r}", instead(str(self.against), _AGAINST))

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        now = _columns(json.loads(checked.table.schema().to_json()))
        due, whose = self._due(checked)
        listed = f"{_MARK}{json.dumps(now)}"
        if due is None:
            return self.outcome(passed=True, observed=f"not judged yet: {whose}{listed}", number=0.0)
        gone = [f"column {name} is gone" for name in due if name not in now]
        other = [f"column {n} is {now[n]}, was {kind}" for n, kind in due.items() if n in now and now[n] != kind]
        added = [f"{name} {kind}" for name, kind in now.items() if name not in due]
        text = in_words([*gone, *other], 20) or f"{counted(len(due), 'column')} {whose}"
        if added:
            text += f"; warning: {counted(len(added), 'column')} added: {', '.join(added)}"
        differences = len(gone) + len(other) + len(added)
        return self.outcome(passed=not (gone or other), observed=text + listed, number=float(differences))

    def _due(self, checked: CheckedTable) -> tuple[Mapping[str, str] | None, str]:
        """The columns to compare with, and whose they are; None and the reason if there are none yet."""
        declared = checked.declared.schema
        if self.against == "declared" or (self.against is None and declared is not None):
            if declared is None:
                raise UsageError(
                    f"table {checked.declared.name} is declared without a schema",
                    "declare one, or write SameSchema(against='last')",
                )
            return _columns(declared.jsonValue()), "as declared"
        if checked.since is None:
            return None, "there was no earlier validation"
        words = f"as in version {checked.since}, the last validated one"
        try:
            earlier = checked.at_version(checked.since)
        except (DeltaError, OSError, ValueError):
            return self._remembered(checked), "as at the last validation"
        return _columns(json.loads(earlier.schema().to_json())), words

    def _remembered(self, checked: CheckedTable) -> Mapping[str, str]:
        """The columns in the newest outcome's text."""
        for past in checked.past.newest(self.name, 1):
            _, mark, text = past.observed.partition(_MARK)
            if mark:
                columns: dict[str, str] = json.loads(text)
                return columns
        raise UsageError(
            f"the columns of version {checked.since} of table {checked.declared.name} are not known",
            "declare a schema, or run the check again once it has an outcome",
        )


def _columns(schema: Mapping[str, Any]) -> dict[str, str]:
    """The columns and their types in words, without those that Recourse has added."""
    return {f["name"]: _words(f["type"]) for f in schema["fields"] if OWN_COLUMN not in (f.get("metadata") or {})}


def _words(kind: Any) -> str:
    """A type of Delta's schema, without nullability and comments."""
    if not isinstance(kind, dict):
        return str(kind)
    match kind["type"]:
        case "struct":
            fields = (f"{field['name']} {_words(field['type'])}" for field in kind["fields"])
            return f"struct<{', '.join(fields)}>"
        case "array":
            return f"array<{_words(kind['elementType'])}>"
        case "map":
            return f"map<{_words(kind['keyType'])}, {_words(kind['valueType'])}>"
        case other:
            return str(other)
