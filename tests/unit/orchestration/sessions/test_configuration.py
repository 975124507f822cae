"""A configuration beside a project's file: its paths are those of the file's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.sessions.configuration import beside


@pytest.mark.parametrize(("name", "table"), [("recourse.toml", ""), ("pyproject.toml", "[tool.recourse]\n")])
def test_relative_paths_are_those_of_the_files_folder(tmp_path: Path, name: str, table: str) -> None:
    (tmp_path / name).write_text(f'{table}flows = ["shop"]\ntables_dir = "tables"\nstate_dir = "s3://lake/state"\n')
    loaded = beside(tmp_path / name, {}).load().settings
    assert (loaded.home, loaded.tables_dir) == (tmp_path / ".recourse", tmp_path / "tables")
    assert str(loaded.state_dir) == "s3://lake/state" and loaded.flows == ["shop"]
