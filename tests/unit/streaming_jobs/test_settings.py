"""One typed configuration: the last layer wins, every value knows its origin, and a wrong one is named."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError, UsageError
from streaming_jobs.settings import (
    DEMONSTRATION,
    Loaded,
    Settings,
    StreamSettings,
    _installed_flows,
    configuration,
    demonstrate,
    load,
    project_folder,
)
from tests.conftest import SettingsFactory

FILE = """
[kafka]
bootstrap_servers = "file:9092"
timeout = "20 seconds"

[stream]
lateness = "6 hours"
max_restarts = 2

[streams.airport_hours]
lateness = "10 days"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def file(folder: Path) -> Path:
    (folder / "recourse.toml").write_text(FILE)
    return folder / "recourse.toml"


def origin(loaded: Loaded, key: str) -> tuple[str, str]:
    """Value and origin as shown."""
    return next((o.value, o.origin) for o in loaded.origins if o.key == key)


def test_without_any_layer_the_defaults_hold_and_settings_do_not_change_once_they_are_loaded() -> None:
    loaded = load()
    assert loaded.settings.kafka.bootstrap_servers == ""
    assert origin(loaded, "stream.max_offsets_per_trigger") == ("300000", "default")
    settings = Settings.load()
    with pytest.raises(ValidationError):
        settings.target = "prod"
    with pytest.raises(ValidationError):
        settings.kafka.bootstrap_servers = "h:1"


def test_flags_win_over_environment_over_file_over_defaults_and_a_layer_changes_nothing_beside_what_it_names(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert origin(load(), "kafka.bootstrap_servers") == ("file:9092", f"file {file.name}")
    monkeypatch.setenv("RECOURSE_KAFKA__BOOTSTRAP_SERVERS", "environment:9092")
    assert origin(load(), "kafka.bootstrap_servers") == ("environment:9092", "environment")
    flags = {"kafka.bootstrap_servers": "flag:9092"}
    assert origin(load(flags), "kafka.bootstrap_servers") == ("flag:9092", "flag")
    assert load(flags).settings.kafka.timeout == timedelta(seconds=20)
    monkeypatch.setenv("RECOURSE_STREAM__MAX_RESTARTS", "9")
    stream = load({"stream.trigger": "available-now"}).settings.stream
    assert (stream.max_restarts, stream.lateness, stream.trigger) == (9, timedelta(hours=6), "available-now")


def test_nested_and_dotted_flags_are_the_same() -> None:
    nested = load({"kafka": {"bootstrap_servers": "h:1"}, "spark.master": "local[1]"}).settings
    assert nested == load({"kafka.bootstrap_servers": "h:1", "spark": {"master": "local[1]"}}).settings


def test_one_streams_own_values_come_before_the_defaults_and_a_null_is_a_value_that_is_not_set(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOURSE_STREAMS__AIRPORT_HOURS__TRIGGER", "every 10 seconds")
    settings = load({"streams.airport_hours.max_offsets_per_trigger": 7}).settings
    values = settings.for_stream("airport_hours")
    assert (values.lateness, values.trigger, values.max_offsets_per_trigger, values.max_restarts) == (
        timedelta(days=10),
        "every 10 seconds",
        7,
        2,
    )
    assert settings.for_stream("carrier_totals") == settings.stream
    monkeypatch.setenv("RECOURSE_STREAMS", '{"orders": {"max_restarts": null, "trigger": null, "max_batch_mb": 7}}')
    settings = Settings.load({"stream.max_restarts": 3})
    of_stream = settings.for_stream("orders")
    assert (of_stream.max_restarts, of_stream.trigger, of_stream.max_batch_mb) == (3, settings.stream.trigger, 7)


def test_a_streams_value_that_is_set_to_its_default_is_its_own() -> None:
    unset, default = (
        load({"stream.max_restarts": 9, "streams.x": {"max_batch_mb": 7} | own}).settings
        for own in ({}, {"max_restarts": 5})
    )
    assert (unset.for_stream("x").max_restarts, default.for_stream("x").max_restarts) == (9, 5)
    assert default.with_stream("x", pace="live").for_stream("x").max_restarts == 5
    assert unset.model_dump_json() != default.model_dump_json(), "a running session sees the change"


def test_paths_are_absolute_and_lie_in_the_home_unless_said_otherwise(folder: Path) -> None:
    settings = load().settings
    home = folder / ".recourse"
    assert (settings.state, settings.tables, settings.logs) == (home / "state", home / "tables", home / "logs")
    assert (settings.dagster_home, settings.broker_dir) == (home / "dagster", home / "broker")
    moved = load({"home": "elsewhere", "tables_dir": "~/tables"}).settings
    assert (moved.state, moved.tables) == (folder / "elsewhere" / "state", Path.home() / "tables")
    assert load({"home": "~/rec"}).settings.home == Path.home() / "rec"


def test_secrets_are_shown_as_hidden_and_never_printed_also_if_they_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RECOURSE_KAFKA__SASL_PASSWORD", "s3cret")
    loaded = load({"maven_repository": "s3cret"})
    assert origin(loaded, "kafka.sasl_password") == ("(hidden)", "environment")
    assert origin(loaded, "maven_repository") == ("(hidden)", "flag")
    assert loaded.settings.kafka.sasl_password.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(loaded)
    assert origin(load({"kafka.sasl_password": ""}), "kafka.sasl_password") == ("", "flag")
    with pytest.raises(ConfigurationError) as refused:
        load({"kafka.sasl_password": ["s3cret"]})
    assert "s3cret" not in str(refused.value)


def test_every_setting_is_shown_once_durations_as_they_are_written_and_what_a_stream_does_not_set_is_not(
    file: Path,
) -> None:
    loaded = load()
    assert origin(loaded, "streams.airport_hours.lateness") == ("10 days", "file recourse.toml")
    assert origin(loaded, "table.log_retention") == ("1 hour", "default")
    keys = [o.key for o in load().origins]
    assert len(keys) == len(set(keys))
    assert [key for key in keys if key.startswith("streams.")] == ["streams.airport_hours.lateness"]
    assert {"home", "kafka.timeout", "stream.start", "table.checkpoint_interval", "dagster.port"} <= set(keys)


def test_a_wrong_value_in_the_environment_or_the_file_is_named_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[spark]\ndriver_memory_mb = 1\n")
    with pytest.raises(ConfigurationError, match=r"spark\.driver_memory_mb \(file recourse\.toml\)"):
        load()
    monkeypatch.setenv("RECOURSE_SPARK__DRIVER_MEMORY_MB", "2")
    with pytest.raises(ConfigurationError, match=r"spark\.driver_memory_mb \(environment\)"):
        load()
    monkeypatch.setenv("RECOURSE_SPARK__DRIVER_MEMORY_MB", "512")
    assert load().settings.spark.driver_memory_mb == 512


def test_a_file_that_is_no_toml_and_a_variable_that_is_no_json_are_ordinary_errors(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[kafka\n")
    with pytest.raises(ConfigurationError, match=r"recourse\.toml is not TOML: .*line 1"):
        load()
    file.unlink()
    monkeypatch.setenv("RECOURSE_SPARK", "local[*]")
    with pytest.raises(ConfigurationError, match="the environment: .*spark"):
        load()


def test_another_file_can_be_named_by_flag_or_environment_and_has_to_be_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other.toml").write_text('[spark]\nmaster = "local[3]"\n')
    assert load(config_file=folder / "other.toml").settings.spark.master == "local[3]"
    monkeypatch.setenv("RECOURSE_CONFIG", str(folder / "other.toml"))
    assert load().settings.spark.master == "local[3]"
    with pytest.raises(ConfigurationError, match="no configuration file at"):
        load(config_file=folder / "missing.toml")
    monkeypatch.setenv("RECOURSE_CONFIG", str(folder / "prod.toml"))
    with pytest.raises(ConfigurationError, match=r"no configuration file at .*prod\.toml") as refused:
        load()
    assert "RECOURSE_CONFIG" in refused.value.next_step


def test_the_commit_interval_goes_by_pace_unless_it_is_set_and_upserts_may_have_their_own() -> None:
    live, economy = StreamSettings(pace="live"), StreamSettings(pace="economy")
    assert live.commit_interval(upsert=True) < timedelta(milliseconds=100) < economy.commit_interval(upsert=False)
    assert StreamSettings().commit_interval(upsert=False) == timedelta(milliseconds=250)
    explicit = StreamSettings(
        pace="economy", min_commit_interval=timedelta(0), min_upsert_interval=timedelta(seconds=9)
    )
    assert explicit.commit_interval(upsert=False) == timedelta(0)
    assert explicit.commit_interval(upsert=True) == timedelta(seconds=9)


def test_the_file_is_looked_for_upwards_and_its_paths_belong_to_its_folder(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "recourse.toml").write_text('tables_dir = "data"\njobs = "~/jobs.yml"\n')
    (folder / "deep" / "down").mkdir(parents=True)
    monkeypatch.chdir(folder / "deep" / "down")
    loaded = load()
    assert loaded.file == folder / "recourse.toml"
    assert (loaded.settings.home, loaded.settings.tables) == (folder / ".recourse", folder / "data")
    assert loaded.settings.jobs == Path.home() / "jobs.yml"
    assert project_folder() == folder
    assert loaded.sources == {"configuration": str(file), "home": str(folder / ".recourse")}
    assert load({"home": "mine"}).settings.home == folder / "deep" / "down" / "mine"


def test_a_table_in_pyproject_toml_is_a_configuration_file_as_recourse_toml_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyproject = folder / "pyproject.toml"
    pyproject.write_text('[project]\nname = "mine"\n\n[tool.recourse]\nflows = ["mine"]\ntables_dir = "data"\n')
    (folder / "deep").mkdir()
    (folder / "deep" / "pyproject.toml").write_text('[project]\nname = "of-another-tool-for-recourse"\n')
    monkeypatch.chdir(folder / "deep")
    loaded = load()
    assert (loaded.file, loaded.settings.flows, loaded.settings.tables) == (pyproject, ["mine"], folder / "data")
    assert origin(loaded, "flows")[1] == f"file {pyproject}" and project_folder() == folder
    assert configuration(None) == pyproject
    monkeypatch.chdir(folder)
    (folder / "recourse.toml").write_text("")
    with pytest.raises(
        ConfigurationError, match=r"settings in recourse.toml and in \[tool.recourse\] of pyproject.toml"
    ):
        load()
    assert load(config_file=pyproject).settings.flows == ["mine"]
    with pytest.raises(ConfigurationError, match=r"deep/pyproject.toml has no table \[tool.recourse\]"):
        load(config_file=folder / "deep" / "pyproject.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.recourse]\nflows = [", "pyproject.toml is not TOML"),
        ("[tool]\nrecourse = 1\n", "is no table"),
        ("[tool.recourse]\nflow = 1\n", r"flow \(file pyproject.toml\): no such setting"),
    ],
)
def test_a_table_in_pyproject_toml_that_is_of_no_use_is_refused(folder: Path, text: str, words: str) -> None:
    (folder / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        load()


def test_a_pyproject_toml_that_concerns_other_tools_is_left_to_them(folder: Path) -> None:
    for text in ("[project\n", "[tool.other]\nrecourse = 1\n"):
        (folder / "pyproject.toml").write_text(text)
        assert load().file is None
    (folder / "pyproject.toml").write_bytes(b"\xff")
    assert load().file is None


def test_installed_packages_name_their_streams_where_no_layer_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = folder / "acme_streams-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: acme-streams\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[recourse.streams]\nb = acme.eu\na = acme.us:orders\n")
    monkeypatch.syspath_prepend(str(folder))
    _installed_flows.cache_clear()
    try:
        loaded = load()
        assert loaded.settings.flows == ["acme.eu", "acme.us"]  # also where the demonstration was chosen
        assert origin(loaded, "flows")[1] == "entry points recourse.streams"
        assert load({"flows": ["mine"]}).settings.flows == ["mine"]
    finally:
        _installed_flows.cache_clear()


def test_no_streams_without_a_configuration_unless_the_demonstration_was_chosen_for_the_home(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECOURSE_DEMO")
    settings = load().settings
    assert settings.flows == []
    with pytest.raises(ConfigurationError, match="no streams are configured"):
        Topology.of_settings(settings)
    (folder / ".recourse").mkdir()
    demonstrate(folder / ".recourse")
    monkeypatch.delenv("RECOURSE_DEMO")  # as in a later command
    loaded = load()
    assert loaded.settings.flows == [*DEMONSTRATION]
    assert origin(loaded, "flows")[1] == "demonstration"
    assert load({"flows": ["mine"]}).settings.flows == ["mine"]


@pytest.mark.parametrize(
    ("key", "address", "words"),
    [
        ("home", "s3://bucket/home", "is an address"),
        ("home", "file:/t", "is an address"),
        ("state_dir", "file:/t", "is on no store that is supported"),
        ("tables_dir", "hdfs://host/t", "is on no store that is supported"),
    ],
)
def test_an_address_that_is_of_no_use_is_refused(key: str, address: str, words: str, file: Path) -> None:
    file.write_text(f'{key} = "{address}"\n')
    with pytest.raises(ConfigurationError, match=rf"{key} \(file recourse\.toml\): .*{words}"):
        load()


@pytest.mark.parametrize("address", ["s3://bucket/t", "gs://bucket/t", "abfss://c@a.dfs.core.windows.net/t"])
def test_tables_and_state_can_be_on_a_store(address: str, file: Path) -> None:
    file.write_text(f'tables_dir = "{address}/"\nstate_dir = "{address}"\n')
    settings = load().settings
    assert str(settings.tables) == str(settings.state) == address
    with pytest.raises(UsageError, match="needs them in a folder"):
        settings.tables_folder.exists()


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "local[3]", "local[2,4]", "local-cluster[2, 1, 1024]", "spark://a:7077,b:7077"]
)
def test_a_master_that_is_supported_is_taken(master: str) -> None:
    assert load({"spark.master": master}).settings.spark.master == master


def test_a_misspelt_variable_is_refused_and_neither_one_that_sets_nothing_nor_those_of_a_kubernetes_service_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SERVICE_HOST", "PORT", "UI_SERVICE_PORT_HTTP", "PORT_3000_TCP_ADDR", "UI_PORT"):
        monkeypatch.setenv(f"RECOURSE_{name}", "tcp://10.0.0.1:3000")
    monkeypatch.setenv("RECOURSE_BROKER__PORT", "9099")
    with capture_logs() as logs:
        assert load().settings.broker.port == 9099
    assert {line["variable"] for line in logs} >= {"RECOURSE_PORT", "RECOURSE_UI_PORT"}
    monkeypatch.setenv("RECOURSE_RUN_ID", "1")
    load()
    monkeypatch.setenv("RECOURSE_HOMEE", "/elsewhere")
    with pytest.raises(ConfigurationError, match="RECOURSE_HOMEE"):
        load()


def test_a_text_without_brackets_is_a_list_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOURSE_FLOWS", "my_flows")
    monkeypatch.setenv("RECOURSE_QUALITY__SUITES", '["a", "b"]')
    settings = load({"quality.email_to": '["x@y"]'}).settings
    assert (settings.flows, settings.quality.suites, settings.quality.email_to) == (["my_flows"], ["a", "b"], ["x@y"])


OAUTH = {
    "kafka.security_protocol": "SASL_SSL",
    "kafka.sasl_mechanism": "OAUTHBEARER",
    "kafka.sasl_oauthbearer_token_endpoint_url": "https://login.example.com/token",
    "kafka.sasl_oauthbearer_client_id": "recourse",
    "kafka.sasl_oauthbearer_client_secret": "hush",
}
REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"kafka.timeout": "soon"}, r"kafka\.timeout \(flag\): .*'soon' is not a duration"),
    ({"stream.max_offsets_per_trigger": 0}, r"stream\.max_offsets_per_trigger \(flag\): .*greater than 0"),
    ({"stream.committer": "both"}, r"stream\.committer \(flag\): .*'auto', 'direct' or 'spark'"),
    ({"kafka.bootstrap_server": "h:1"}, r"kafka\.bootstrap_server \(flag\): no such setting"),
    ({"strems.x.trigger": "continuous"}, r"strems \(flag\): no such setting"),
    ({"streams.x.triger": "continuous"}, r"streams\.x\.triger \(flag\): no such setting"),
    ({"broker.port": 70_000}, r"broker\.port \(flag\)"),
    *(({"spark.master": master}, r"spark\.master \(flag\)") for master in ("mesos://host:5050", "locl[*]", "local[")),
    ({"spark.master": "k8s://https://host:443"}, r"spark \(flag\)"),
    ({"spark.extra": {"spark.sql.streaming.multipleWatermarkPolicy": "max"}}, "dropped as late; .* idle_after"),
    ({"topic_sink.prefix": "a b/ü!"}, "topic_sink.prefix"),
    ({"topic_sink.transaction_timeout": "2 hours"}, "above 15 minutes"),
    ({"stream.trigger": "every 0 seconds"}, "longer than 0"),
    ({"dagster.max_session": "0 s"}, "longer than 0"),
    ({"dagster.keep_runs": "0 s"}, "longer than 0"),
    ({"dagster.stale_after": "0 s"}, "longer than 0"),
    ({"kafka.security_protocol": "SASL_SSL"}, r"kafka \(flag\): sasl_username is empty"),
    ({**OAUTH, "kafka.sasl_oauthbearer_client_secret": ""}, "sasl_oauthbearer_client_secret is empty"),
    ({**OAUTH, "kafka.sasl_oauthbearer_callback": "mine:token"}, "are both set"),
    ({"kafka.sasl_oauthbearer_callback": "mine.token"}, "write package.module:function"),
    ({"kafka.security_protocol": "SASL_SSL", "kafka.sasl_mechanism": "GSSAPI"}, "sasl_kerberos_principal is empty"),
    *(
        ({"kafka.extra": {name: "1"}}, f"kafka.extra .*'{name}' is for Recourse to choose")
        for name in ("isolation.level", "enable.auto.commit", "transactional.id", "acks", "group.id", "partitioner")
    ),
    ({"kafka.extra": {"enable.idempotence": "false"}}, "'enable.idempotence' is for Recourse to choose"),
    ({"kafka.extra": {"sasl.password": "x"}}, "a setting of its own: kafka.sasl_password"),
    ({"kafka.extra": {"sasl.mechanisms": "PLAIN"}}, "a setting of its own: kafka.sasl_mechanism"),
    ({"kafka.extra": {"linger.ms": "5"}}, "a setting of its own: topic_sink.linger"),
    ({"kafka.clusters": {"eu": {}}}, r"kafka\.clusters \(flag\): eu\.bootstrap_servers is empty"),
    ({"kafka.clusters": {"e.u": {"bootstrap_servers": "h:1"}}}, "'e.u' is not a cluster's name"),
    (
        {"kafka.clusters.eu": {"bootstrap_servers": "h:1", "security_protocol": "SASL_SSL"}},
        r"kafka\.clusters\.eu \(flag\): sasl_username is empty",
    ),
    ({"kafka.clusters.eu.bootstrap_server": "h:1"}, r"kafka\.clusters\.eu\.bootstrap_server \(flag\): no such setting"),
    ({"quality.webhook": "hooks.example.com"}, "quality.webhook is no URL"),
]


@pytest.mark.parametrize(("flags", "text"), REFUSED, ids=[str(flags) for flags, _ in REFUSED])
def test_a_wrong_value_is_refused_at_once_and_named_with_its_origin(flags: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as refused:
        load(flags)
    assert "recourse config show" in refused.value.next_step


@pytest.mark.parametrize(
    ("section", "secrets", "open_value"),
    [
        ("spark", ("spark.hadoop.fs.s3a.secret.key",), {"spark.executor.cores": "2"}),
        (
            "kafka",
            ("ssl.key.pem", "ssl.keystore.password", "sasl.oauthbearer.assertion.private.key.passphrase"),
            {"client.rack": "eu-1a"},
        ),
    ],
)
def test_secrets_among_the_properties_of_spark_and_of_kafkas_client_are_hidden(
    section: str, secrets: tuple[str, ...], open_value: Mapping[str, str]
) -> None:
    loaded = load({f"{section}.extra": dict.fromkeys(secrets, "TOPSECRET") | open_value})
    shown = {o.key.removeprefix(f"{section}.extra."): o.value for o in loaded.origins}
    assert {name: shown[name] for name in secrets} == dict.fromkeys(secrets, "(hidden)")
    assert open_value.items() <= shown.items()
    assert section == "spark" or "TOPSECRET" not in repr(loaded.settings)


def test_a_cluster_has_settings_of_its_own_and_its_secrets_are_hidden_like_those_of_the_default_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RECOURSE_KAFKA__CLUSTERS__EU__BOOTSTRAP_SERVERS", "eu:9093")
    monkeypatch.setenv("RECOURSE_KAFKA__CLUSTERS__EU__SASL_PASSWORD", "TOPSECRET")
    monkeypatch.setenv("RECOURSE_KAFKA__CLUSTERS__EU__EXTRA", '{"ssl.key.pem": "TOPSECRET", "client.rack": "a"}')
    loaded = load({"kafka.sasl_username": "jo", "kafka.timeout": "3 s", "kafka.clusters.eu.timeout": "4 s"})
    kafka = loaded.settings.kafka
    assert (kafka.of("t@eu").bootstrap_servers, kafka.of("t@eu").timeout) == ("eu:9093", timedelta(seconds=4))
    assert kafka.of("t") is kafka and kafka.of("t@eu").sasl_username == "", "nothing comes from the default cluster"
    shown = {o.key: o.value for o in loaded.origins}
    assert shown["kafka.clusters.eu.sasl_password"] == shown["kafka.clusters.eu.extra.ssl.key.pem"] == "(hidden)"
    assert shown["kafka.clusters.eu.extra.client.rack"] == "a"
    assert "TOPSECRET" not in repr(loaded.settings)
    with pytest.raises(ConfigurationError, match="cluster 'us'") as unknown:
        kafka.of("t@us")
    assert "kafka.clusters.us.bootstrap_servers" in unknown.value.next_step


def test_a_misspelt_setting_of_a_cluster_is_named(settings: SettingsFactory) -> None:
    with pytest.raises(ConfigurationError, match="no such setting") as refused:
        settings({"kafka.clusters.eu.sasl_usernam": "jo"})
    assert "did you mean 'kafka.clusters.eu.sasl_username'?" in refused.value.next_step


def test_a_token_may_come_in_another_way_than_by_a_clients_secret() -> None:
    other = {"sasl.oauthbearer.metadata.authentication.type": "azure_imds", "sasl.oauthbearer.method": "oidc"}
    chosen = {"kafka.security_protocol": "SASL_SSL", "kafka.sasl_mechanism": "OAUTHBEARER", "kafka.extra": other}
    assert load(chosen).settings.kafka.extra == other


def test_the_file_that_is_watched_is_the_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = tmp_path / "project" / "sub"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert configuration(None) == below / "recourse.toml", "where there is none, one may come"
    found = tmp_path / "project" / "recourse.toml"
    found.write_text("")
    assert configuration(None) == found == load().file
    monkeypatch.setenv("RECOURSE_CONFIG", str(tmp_path / "named.toml"))
    assert configuration(None) == tmp_path / "named.toml"
    assert configuration(tmp_path / "flag.toml") == tmp_path / "flag.toml"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("storage.endpoint", "https://user:pass-word@store.example.com"),
        ("storage.endpoint", "https://user:pass-word/1@store.example.com"),
        ("tables_dir", "s3://AKIA:pass-word@lake/tables"),
        ("tables_dir", "s3://AKIA:pass-word/1@lake/tables"),
        ("tables_dir", "s3://pass-word@lake/tables"),
        ("tables_dir", "https://user:pass-word@store.example.com/lake"),
        ("state_dir", "abfss://lake:pass-word@account.dfs.core.windows.net/state"),
        ("state_dir", "gs://pass-word@lake/state"),
    ],
)
def test_credentials_in_the_address_of_a_store_are_refused_and_not_shown(
    settings: SettingsFactory, name: str, value: str
) -> None:
    with pytest.raises(ConfigurationError, match="has a user or a password") as raised:
        settings({name: value})
    assert "pass-word" not in str(raised.value) and "pass-word" not in repr(raised.value.__cause__ or "")
    settings({"tables_dir": "abfss://lake@account.dfs.core.windows.net/tables", "state_dir": "s3://lake/a@b"})
