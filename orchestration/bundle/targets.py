"""A target's overrides, merged into the bundle as the Databricks CLI merges them, and what its mode and presets add.

Mappings are merged, single values replaced, lists joined; then tasks, job clusters and parameters with the same key are
merged into one. (docs.databricks.com/dev-tools/bundles/overrides, databricks/cli libs/dyn/merge.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestration.bundle.fields import Position, Problem, Steps, YamlList, YamlMap, position_of, spelled
from orchestration.bundle.model import Presets

MERGED = ("bundle", "workspace", "artifacts", "resources", "sync", "permissions", "presets")
"""The fields of a target that are merged with those of the bundle."""
REPLACED = ("run_as",)
KEYS = {"tasks": "task_key", "job_clusters": "job_cluster_key", "parameters": "name", "environments": "environment_key"}
"""The lists of a job whose items are merged by a key."""


def merged(low: Any, high: Any, at: Steps, problems: list[Problem], default: Position) -> Any:
    """`high` over `low`; positions are those of the value that is used. Values of two kinds are a problem."""
    if low is None or high is None:
        return low if high is None else high
    if isinstance(low, Mapping) and isinstance(high, Mapping):
        made = YamlMap()
        made.positions = {**getattr(low, "positions", {}), **getattr(high, "positions", {})}
        for key in (*low, *(key for key in high if key not in low)):
            here = position_of(high, (key,), default)
            made[key] = merged(low.get(key), high.get(key), (*at, key), problems, here)
        return made
    if isinstance(low, list) and isinstance(high, list):
        if len(at) == 4 and at[:2] == ("resources", "jobs") and at[3] in KEYS:
            return _by_key(low, high, KEYS[str(at[3])], at, problems, default)
        items = YamlList([*low, *high])
        items.positions = [*getattr(low, "positions", []), *getattr(high, "positions", [])]
        return items
    if isinstance(low, (list, Mapping)) or isinstance(high, (list, Mapping)):
        found = f"{_kind(high)} cannot replace {_kind(low)}"
        problems.append(Problem(default, spelled(at), found, "write the same kind"))
        return low
    return high


def _kind(value: Any) -> str:
    return "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else "a single value"


def with_target(tree: YamlMap, target: str, problems: list[Problem], default: Position) -> YamlMap:
    """The bundle with the overrides of a target, without `targets` and `variables`."""
    override = (tree.get("targets") or {}).get(target) or {}
    made = YamlMap({key: value for key, value in tree.items() if key not in ("targets", "variables", "include")})
    made.positions = dict(tree.positions)
    for name in (*MERGED, *REPLACED):
        if override.get(name) is not None:
            position = position_of(override, (name,), default)
            low = made.get(name) if name in MERGED else None
            made[name] = merged(low, override[name], (name,), problems, position)
            if name not in made.positions:
                made.positions[name] = position
    for name in ("cluster_id", "compute_id", "git"):
        if name in override and isinstance(made.get("bundle"), YamlMap):
            made["bundle"] = merged(made["bundle"], YamlMap({name: override[name]}), ("bundle",), problems, default)
    return made


def _by_key(low: list[Any], high: list[Any], key: str, at: Steps, problems: list[Problem], default: Position) -> Any:
    """Two lists of a job joined, an item of `high` merged into the item of `low` that has the same key."""
    items = YamlList(low)
    items.positions = [position_of(low, (number,), default) for number in range(len(low))]
    numbers = {item[key]: number for number, item in enumerate(low) if isinstance(item, Mapping) and key in item}
    for number, item in enumerate(high):
        position = position_of(high, (number,), default)
        there = numbers.get(item.get(key)) if isinstance(item, Mapping) else None
        if there is None:
            items.append(item)
            items.positions.append(position)
        else:
            items[there] = merged(items[there], item, (*at, there), problems, position)
    return items


def presets_of(mode: str | None, presets: Presets, user: str) -> Presets:
    """The presets with what `mode: development` adds to them."""
    if mode != "development":
        return presets
    return presets.model_copy(
        update={
            "name_prefix": presets.name_prefix or f"[dev {user}] ",
            "tags": {"dev": user, **presets.tags},
            "trigger_pause_status": presets.trigger_pause_status or "PAUSED",
        }
    )
