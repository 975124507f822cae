"""The parts of the bundle format that only Databricks uses: their names and types are checked, and nothing else.

Names and types are those of the Jobs API and of the bundle reference (docs.databricks.com/dev-tools/bundles/reference).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from orchestration.bundle.fields import UNRESOLVED, Fields, Noted, Shape, refusal

COMPUTE = "the settings `spark.*` and `resources.*` decide about compute here"
LIBRARIES = "sessions import what is installed in this environment"
RIGHTS = "who may do what here is decided by the operating system and the proxy before Dagster"
WORKSPACE = "there is no workspace here"
ELSEWHERE = "a task of this kind runs on Databricks only"


def _unresolved(value: Any) -> bool:
    return isinstance(value, str) and UNRESOLVED.search(value) is not None


def _text(value: Any) -> Any:
    if value is None or isinstance(value, (list, dict)):
        raise refusal("is not a single value")
    return value


def _whole(value: Any) -> Any:
    if not _unresolved(value) and (isinstance(value, bool) or not isinstance(value, int)):
        raise refusal(f"'{value}' is not a whole number")
    return value


def _number(value: Any) -> Any:
    if not _unresolved(value) and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise refusal(f"'{value}' is not a number")
    return value


def _flag(value: Any) -> Any:
    if not _unresolved(value) and not isinstance(value, bool):
        raise refusal(f"'{value}' is not true or false")
    return value


AnyText = Annotated[Any, BeforeValidator(_text)]
AnyWhole = Annotated[Any, BeforeValidator(_whole)]
AnyNumber = Annotated[Any, BeforeValidator(_number)]
AnyFlag = Annotated[Any, BeforeValidator(_flag)]
"""Values that Databricks alone reads: a reference that only Databricks can resolve is one too."""


def shape(
    text: str = "", *, whole: str = "", number: str = "", flag: str = "", required: str = "", **below: Any
) -> Any:
    """A mapping with these fields, by the type of their values; `below` are fields with other types."""
    kinds = {AnyText: text, AnyWhole: whole, AnyNumber: number, AnyFlag: flag}
    types: dict[str, Any] = {name: kind for kind, names in kinds.items() for name in names.split()}
    types |= {name: Annotated[Any, Shape(kind)] for name, kind in below.items()}
    needed = required.split()
    fields: dict[str, Any] = {
        f"{name}_": (kind, Field(alias=name)) if name in needed else (kind | None, Field(None, alias=name))
        for name, kind in types.items()
    }
    return create_model("Shape", __base__=Fields, **fields)


def items(kind: Any) -> Any:
    """A list of these."""
    return list[kind]


def entries(kind: Any) -> Any:
    """A mapping of names to these."""
    return dict[str, kind]


Texts = dict[str, AnyText]
Names = list[AnyText]

_destination = shape("destination", required="destination")
_s3 = shape(
    "canned_acl destination encryption_type endpoint kms_key region", flag="enable_encryption", required="destination"
)
_nodes = shape("aws_context_id", alternate_node_type_ids=Names)

CLUSTER: dict[str, Any] = {
    "autoscale": shape(whole="max_workers min_workers"),
    "aws_attributes": shape(
        "availability ebs_volume_type instance_profile_arn zone_id",
        whole="ebs_volume_count ebs_volume_iops ebs_volume_size ebs_volume_throughput first_on_demand "
        "spot_bid_price_percent",
    ),
    "azure_attributes": shape(
        "availability capacity_reservation_group",
        whole="first_on_demand",
        number="spot_bid_max_price",
        log_analytics_info=shape("log_analytics_primary_key log_analytics_workspace_id"),
    ),
    "cluster_log_conf": shape(dbfs=_destination, s3=_s3, volumes=_destination),
    "custom_tags": Texts,
    "docker_image": shape("url", basic_auth=shape("password username")),
    "driver_node_type_flexibility": _nodes,
    "gcp_attributes": shape(
        "availability confidential_compute_type google_service_account zone_id",
        whole="boot_disk_size first_on_demand local_ssd_count",
        flag="use_preemptible_executors",
    ),
    "init_scripts": items(
        shape(**dict.fromkeys(("abfss", "dbfs", "file", "gcs", "volumes", "workspace"), _destination), s3=_s3)
    ),
    "spark_conf": Texts,
    "spark_env_vars": Texts,
    "ssh_public_keys": Names,
    "worker_node_type_flexibility": _nodes,
    "workload_type": shape(clients=shape(flag="jobs notebooks"), required="clients"),
}
NEW_CLUSTER = shape(
    "cluster_name data_security_mode dependency_mode driver_instance_pool_id driver_node_type_id instance_pool_id kind "
    "node_type_id policy_id runtime_engine single_user_name spark_version",
    whole="autotermination_minutes num_workers remote_disk_throughput total_initial_remote_disk_size",
    flag="apply_policy_default_values enable_elastic_disk enable_local_disk_encryption is_single_node use_ml_runtime",
    **CLUSTER,
)
LIBRARY = shape(
    "egg jar requirements whl",
    cran=shape("package repo", required="package"),
    maven=shape("coordinates repo", exclusions=Names, required="coordinates"),
    pypi=shape("package repo", required="package"),
)
ENVIRONMENT = shape(
    "environment_key",
    spec=shape(
        "base_environment client environment_version project_environment", dependencies=Names, java_dependencies=Names
    ),
    required="environment_key",
)
GIT_SOURCE = shape(
    "git_branch git_commit git_provider git_tag git_url",
    sparse_checkout=shape(patterns=Names),
    git_snapshot=shape("used_commit"),
    job_source=shape("dirty_state import_from_git_branch job_config_path"),
    required="git_provider git_url",
)
_WATCHED = "min_time_between_triggers_seconds wait_after_last_change_seconds"
FILE_ARRIVAL = shape("url", whole=_WATCHED, required="url")
TABLE_UPDATE = shape("condition", whole=_WATCHED, table_names=Names, required="table_names")
JOB_COMPLETION = shape("if_status", jobs=items(shape(whole="job_id workspace_id")))
MODEL_TRIGGER = shape("condition securable_name", whole=_WATCHED, aliases=Names, required="condition")
SQL_CONDITION = shape("sql_query_id trigger_mode warehouse_id")
RUN_AS = shape("group_name service_principal_name user_name")
PERMISSION = shape("group_name level service_principal_name user_name", required="level")
LIFECYCLE = shape(flag="prevent_destroy started")

_subscriber = shape("destination_id user_name")
_pipeline: dict[str, Any] = dict.fromkeys(
    ("full_refresh_selection", "refresh_flow_selection", "refresh_selection", "reset_checkpoint_selection"), Names
)
OTHER_TASKS: dict[str, Any] = {
    "ai_runtime_task": shape(
        "code_source_path docker_image_url experiment mlflow_artifact_location mlflow_experiment_directory mlflow_run "
        "priority_class unity_catalog_image_path",
        deployments=items(shape("command_path name", compute=dict[str, Any], required="command_path compute")),
        required="deployments experiment",
    ),
    "ai_function_task": dict[str, Any],
    "alert_task": shape(
        "alert_id warehouse_id workspace_path", subscribers=items(_subscriber), parameters=items(shape("name value"))
    ),
    "clean_rooms_notebook_task": shape(
        "clean_room_name etag notebook_name",
        notebook_base_parameters=Texts,
        required="clean_room_name notebook_name",
    ),
    "condition_task": shape("left op right", required="left op right"),
    "dashboard_task": shape(
        "dashboard_id warehouse_id",
        filters=Texts,
        subscription=shape("custom_subject", flag="paused", subscribers=items(_subscriber), attachment=dict[str, Any]),
    ),
    "dbt_cloud_task": shape("connection_resource_name", whole="dbt_cloud_job_id"),
    "dbt_platform_task": shape("connection_resource_name dbt_platform_job_id"),
    "dbt_task": shape(
        "catalog profiles_directory project_directory schema source warehouse_id", commands=Names, required="commands"
    ),
    "for_each_task": shape("inputs", whole="concurrency", task=dict[str, Any], required="inputs task"),
    "gen_ai_compute_task": shape(
        "command dl_runtime_image mlflow_experiment_name source training_script_path yaml_parameters "
        "yaml_parameters_file_path",
        compute=shape("gpu_node_pool_id gpu_type", whole="num_gpus"),
    ),
    "notebook_task": shape("notebook_path source warehouse_id", base_parameters=Texts, required="notebook_path"),
    "pipeline_task": shape("pipeline_id", flag="full_refresh", parameters=Texts, required="pipeline_id", **_pipeline),
    "power_bi_task": shape(
        "connection_resource_name warehouse_id",
        flag="refresh_after_update",
        power_bi_model=shape("authentication_method model_name storage_mode workspace_name", flag="overwrite_existing"),
        tables=items(shape("catalog name schema storage_mode")),
    ),
    "python_operator_task": shape("main", parameters=items(shape("name value"))),
    "run_job_task": shape(
        whole="job_id",
        job_parameters=Texts,
        notebook_params=Texts,
        python_named_params=Texts,
        sql_params=Texts,
        dbt_commands=Names,
        jar_params=Names,
        python_params=Names,
        spark_submit_params=Names,
        pipeline_params=shape(flag="full_refresh", **_pipeline),
        required="job_id",
    ),
    "spark_jar_task": shape("jar_uri main_class_name", flag="run_as_repl", parameters=Names),
    "spark_python_task": shape("python_file source", parameters=Names, required="python_file"),
    "spark_submit_task": shape(parameters=Names),
    "sql_task": shape(
        "warehouse_id",
        alert=shape("alert_id", flag="pause_subscriptions", subscriptions=items(_subscriber), required="alert_id"),
        dashboard=shape(
            "custom_subject dashboard_id",
            flag="pause_subscriptions",
            subscriptions=items(_subscriber),
            required="dashboard_id",
        ),
        file=shape("path source", required="path"),
        parameters=Texts,
        query=shape("query_id", required="query_id"),
        required="warehouse_id",
    ),
}
"""The kinds of a task that Databricks has besides a Python wheel."""

MAINTENANCE = shape("day_of_week timezone_id", whole="start_hour")
VARIABLES = shape("environment_variables_key", spec=shape(files=list[Any], variables=dict[str, Any]))

WORKSPACE_FIELDS = shape(
    "account_id artifact_path auth_type azure_client_id azure_environment azure_login_app_id azure_tenant_id "
    "azure_workspace_resource_id client_id file_path google_service_account host profile resource_path root_path "
    "state_path workspace_id",
    flag="azure_use_msi experimental_is_unified_host",
)
ARTIFACT = shape("build executable path type", flag="dynamic_version", files=items(shape("source", required="source")))
SYNC = shape(exclude=Names, include=Names, paths=Names)
PYTHON = shape("venv_path", mutators=Names, resources=Names)
EXPERIMENTAL = shape(
    flag="immutable_folder python_wheel_wrapper record_deployment_history skip_artifact_cleanup "
    "skip_name_prefix_for_schema use_legacy_run_as",
    pydabs=shape(flag="enabled"),
    python=PYTHON,
    scripts=Texts,
)
GIT = shape("branch origin_url")
DEPLOYMENT = shape(flag="fail_on_active_runs", lock=shape(flag="enabled force"))
SCRIPT = shape("content", env=Texts, required="content")

OTHER_RESOURCES = """
alerts apps catalogs clusters dashboards database_catalogs database_instances experiments external_locations
genie_spaces instance_pools job_runs model_serving_endpoints models pipelines postgres_branches
postgres_catalogs postgres_databases postgres_endpoints postgres_projects postgres_roles postgres_synced_tables
quality_monitors registered_models schemas secret_scopes secrets sql_warehouses synced_database_tables
vector_search_endpoints vector_search_indexes volumes
""".split()  # noqa: SIM905
"""The kinds of resources besides jobs; their contents are not checked here."""


def noted(kind: Any, reason: str) -> Any:
    """A field of this type that means nothing on this machine."""
    field: Any = Field(None)
    field.metadata += [Shape(kind | None), Noted(reason)]
    return field


LOOKUPS = Literal[
    "alert",
    "cluster",
    "cluster_policy",
    "dashboard",
    "instance_pool",
    "job",
    "metastore",
    "notification_destination",
    "pipeline",
    "query",
    "service_principal",
    "warehouse",
]
"""What Databricks looks up by name to give a variable its id."""
