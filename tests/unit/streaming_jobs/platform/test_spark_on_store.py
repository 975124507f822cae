"""State on a store: what a session gets for it, what it fetches, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.find_spark_home import _find_spark_home

from streaming_jobs.errors import ConfigurationError, SetupError
from streaming_jobs.platform import jars, spark_on_store
from streaming_jobs.platform.jars import Jar, locked
from streaming_jobs.platform.spark import profile
from streaming_jobs.platform.spark_on_store import hadoop_path, properties, store_jars
from streaming_jobs.preflight.doctor import check_checkpoints
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import StorageSettings
from streaming_jobs.storage.locations import StorePath
from tests.conftest import SettingsFactory

LAKE = StorePath("s3://lake/state")
MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


def s3a(storage: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    found = properties(LAKE, StorageSettings(**storage), environment or {})
    return {name.removeprefix("spark.hadoop.fs.s3a."): value for name, value in found.items()}


def test_a_folder_needs_no_property_and_no_jar(settings: SettingsFactory, tmp_path: Path) -> None:
    assert properties(tmp_path, StorageSettings(), {}) == {}
    assert store_jars(settings({"jars_dir": tmp_path / "none"})) == []
    assert check_checkpoints(settings()) == []
    assert hadoop_path(tmp_path) == str(tmp_path)


def test_settings_of_the_store_become_those_of_s3a() -> None:
    given = {"endpoint": "http://store:9000", "allow_http": True, "region": "eu-west-1", "timeout": "40s"}
    found = s3a(given)
    assert (found["endpoint"], found["connection.ssl.enabled"]) == ("http://store:9000", "false")
    assert (found["endpoint.region"], found["path.style.access"]) == ("eu-west-1", "true")
    assert found["connection.timeout"] == found["connection.request.timeout"] == "40s"
    virtual = s3a({"endpoint": "https://lake.s3.example.com", "addressing": "virtual", "timeout": "5s"})
    assert (virtual["endpoint"], virtual["connection.ssl.enabled"]) == ("https://s3.example.com", "true")
    assert (virtual["path.style.access"], virtual["connection.timeout"]) == ("false", "15s")
    assert "endpoint" not in s3a({})
    regions = [s3a({}, env)["endpoint.region"] for env in ({}, {"AWS_DEFAULT_REGION": "b"}, {"AWS_REGION": "a"})]
    assert regions == ["us-east-1", "b", "a"]


def test_a_session_gets_them_without_a_secret_and_the_user_s_own_properties_count_more(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    given = profile(settings({"state_dir": LAKE.url, "spark.extra": {"spark.hadoop.fs.s3a.retry.limit": "9"}}))
    assert given[MANAGER] == "recourse.StoreCheckpointFiles"
    assert given["spark.sql.streaming.checkpoint.fileChecksum.enabled"] == "false"
    assert given["spark.hadoop.fs.s3a.retry.limit"] == "9"
    assert "s3cret" not in str(given)
    assert profile(settings())[MANAGER].endswith("FileSystemBasedCheckpointFileManager")


def test_hadoop_s_scheme_of_s3_is_s3a() -> None:
    assert hadoop_path(LAKE / "orders" / "g0001") == "s3a://lake/state/orders/g0001"


@pytest.mark.parametrize(
    ("url", "names"), [("gs://lake/state", "gcs-connector"), ("abfss://c@a.dfs.core.windows.net/state", "hadoop-azure")]
)
def test_other_stores_are_refused_by_the_start_and_by_the_doctor_with_what_is_missing(
    settings: SettingsFactory, url: str, names: str
) -> None:
    there = settings({"state_dir": url})
    with pytest.raises(ConfigurationError, match=names):
        store_jars(there)
    (check,) = check_checkpoints(there)
    assert check.ok is False and names in check.found and "s3://" in check.fix


def test_the_doctor_names_the_jars_that_state_on_s3_lacks(settings: SettingsFactory, tmp_path: Path) -> None:
    (check,) = check_checkpoints(settings({"state_dir": LAKE.url, "jars_dir": tmp_path}))
    wanted = locked("s3")
    assert (check.name, check.ok) == ("jars (s3)", None)
    assert check.found.startswith(f"{len(wanted)} of {len(wanted)} are not here yet, 13 MB")


def test_make_setup_does_not_fetch_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[set[str]] = []

    def ensure(_: Settings, wanted: Iterable[Jar], **__: object) -> None:
        fetched.append({jar.set for jar in wanted})

    monkeypatch.setattr(jars, "ensure", ensure)
    assert jars.main(["fetch"]) == jars.main(["fetch", "s3"]) == 0
    assert fetched == [{"spark", "broker"}, {"s3"}]


def test_s3a_is_of_the_hadoop_in_pyspark_and_brings_none_of_its_jars_a_second_time() -> None:
    shipped = {path.name for path in (Path(_find_spark_home()) / "jars").glob("*.jar")}
    ours = {jar.artifact: jar for jar in locked("s3")}
    assert f"hadoop-client-api-{ours['hadoop-aws'].version}.jar" in shipped
    assert not shipped & {jar.file for jar in ours.values()}
    assert len({jar.version for jar in ours.values() if jar.group == "software.amazon.awssdk"}) == 1
    artifacts = {name.rpartition("-")[0] for name in shipped}
    assert not artifacts & set(ours), "in two versions"


def compiler(tmp_path: Path, settings: SettingsFactory, script: str) -> Settings:
    """Settings with a Java that runs a script in place of the compiler, and appends to `asked`."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    version = 'if [ "$1" = -version ]; then echo \'openjdk version "17.0.15"\' >&2; exit; fi'
    java.write_text(f"#!/bin/bash\n{version}\necho >> {tmp_path}/asked\n{script}\n")
    java.chmod(0o700)
    (tmp_path / "jars").mkdir()
    return settings({"state_dir": LAKE.url, "java_home": tmp_path / "java", "jars_dir": tmp_path / "jars"})


def test_the_file_manager_is_compiled_once_for_each_source(
    settings: SettingsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_on_store, "locked", lambda _: [])
    there = compiler(tmp_path, settings, 'echo jar > "${!#}"')
    (made,) = store_jars(there)
    assert made.read_text() == "jar\n" and [made] == store_jars(there)
    assert list(made.parent.iterdir()) == [made]
    monkeypatch.setattr(spark_on_store, "_COMPILER", "changed")
    assert store_jars(there) != [made]
    assert (tmp_path / "asked").read_text() == "\n\n"


def test_a_compiler_that_fails_leaves_no_jar(
    settings: SettingsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_on_store, "locked", lambda _: [])
    there = compiler(tmp_path, settings, 'echo half > "${!#}"; echo no such class >&2; exit 1')
    with pytest.raises(SetupError, match="no such class"):
        store_jars(there)
    assert list((tmp_path / "jars").iterdir()) == []
