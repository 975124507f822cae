"""A run launcher whose workers are on other hosts, as those of Kubernetes, ECS and Docker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from dagster._core.launcher import LaunchRunContext, RunLauncher
from dagster._serdes import ConfigurableClass, ConfigurableClassData


class ElsewhereLauncher(RunLauncher, ConfigurableClass):
    """It launches nothing here: the other host would."""

    def __init__(self, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__()
        self._inst_data = inst_data

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        return cls(inst_data)

    def launch_run(self, context: LaunchRunContext) -> None: ...

    def terminate(self, run_id: str) -> bool:
        return False
