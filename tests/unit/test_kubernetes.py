"""The manifests are what Kubernetes' own schemas ask for, their settings are ours, and their names fit each other."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from streaming_jobs.settings import Settings
from streaming_jobs.text.durations import parse_duration
from tests.unit.test_docs import DOCS, SECONDS_TO_STOP

pytestmark = pytest.mark.slow

FOLDER = DOCS / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
VERSION = "1.34"


def resources(manifest: Path) -> dict[str, dict[str, Any]]:
    """By kind; each kind occurs once."""
    found = [each for each in yaml.safe_load_all(manifest.read_text(encoding="utf-8")) if each]
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


def settings_in(config: dict[str, Any]) -> Settings:
    """Read as the driver reads them; raises ConfigurationError for a setting that is none."""
    return Settings.load(tomllib.loads(config["data"]["recourse.toml"]))


def mounted(pod: dict[str, Any]) -> dict[str, str]:
    """Path -> volume of the only container."""
    [container] = pod["containers"]
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_each_resource_is_what_the_schema_of_its_kind_asks_for(manifest: Path) -> None:
    for each in resources(manifest).values():
        kubernetes_validate.validate(each, VERSION, strict=True)
        assert each["metadata"]["namespace"] == "streams"
    wrong = resources(manifest)["StatefulSet"]
    wrong["spec"]["template"]["spec"]["containers"][0]["imagee"] = "misspelled"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_a_driver_is_one_pod_with_its_folders_on_volumes_and_time_to_stop(manifest: Path) -> None:
    by_kind = resources(manifest)
    driver, settings = by_kind["StatefulSet"]["spec"], settings_in(by_kind["ConfigMap"])
    pod = driver["template"]["spec"]
    assert driver["replicas"] == 1 and pod["terminationGracePeriodSeconds"] >= SECONDS_TO_STOP
    volumes = {v["name"] for v in pod["volumes"]} | {c["metadata"]["name"] for c in driver["volumeClaimTemplates"]}
    mounts = mounted(pod)
    assert set(mounts.values()) <= volumes
    for folder in (settings.home, settings.tables, settings.state):
        assert any(folder.is_relative_to(path) for path, name in mounts.items() if name != "config"), folder
    assert pod["containers"][0]["args"][:2] == ["streams", "run"]
    memory = int(pod["containers"][0]["resources"]["limits"]["memory"].removesuffix("Gi")) << 10
    assert memory >= 1.5 * settings.spark.driver_memory_mb


def test_one_pod_has_as_many_tasks_as_its_container_has_cpus() -> None:
    by_kind = resources(FOLDER / "one-pod.yaml")
    settings = settings_in(by_kind["ConfigMap"])
    [container] = by_kind["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert settings.spark.master == f"local[{container['resources']['limits']['cpu']}]"


def test_executors_find_the_driver_its_volume_and_its_image() -> None:
    by_kind = resources(FOLDER / "cluster.yaml")
    spark, driver = settings_in(by_kind["ConfigMap"]).spark, by_kind["StatefulSet"]
    pod, service, name = driver["spec"]["template"]["spec"], by_kind["Service"], driver["metadata"]["name"]
    assert spark.driver_host == f"{name}-0.{service['metadata']['name']}.streams.svc.cluster.local"
    assert driver["spec"]["serviceName"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == driver["spec"]["template"]["metadata"]["labels"]
    ports = {str(port["port"]) for port in service["spec"]["ports"]}
    assert ports == {spark.extra["spark.driver.port"], spark.extra["spark.driver.blockManager.port"]}
    assert spark.extra["spark.kubernetes.driver.pod.name"] == f"{name}-0"
    assert spark.extra["spark.kubernetes.namespace"] == "streams"
    claim = "spark.kubernetes.executor.volumes.persistentVolumeClaim.lake"
    assert mounted(pod)[spark.extra[f"{claim}.mount.path"]] == "lake"
    assert spark.extra[f"{claim}.options.claimName"] == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
    assert by_kind["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    executor = yaml.safe_load(by_kind["ConfigMap"]["data"]["executor.yaml"])
    assert spark.extra["spark.kubernetes.executor.podTemplateFile"] in mounted(pod)
    assert executor["spec"]["securityContext"] == pod["securityContext"], "one user reads and writes the files"
    images = {pod["containers"][0]["image"], executor["spec"]["containers"][0]["image"]}
    assert images == {spark.extra["spark.kubernetes.container.image"]}
    account = pod["serviceAccountName"]
    assert by_kind["RoleBinding"]["subjects"][0]["name"] == by_kind["ServiceAccount"]["metadata"]["name"] == account


FAKES = {
    "java": 'printf "%s\\n" "$@"',
    "recourse": 'echo recourse "$@"',
    "hostname": "echo master",
    "python3": f'exec {sys.executable} "$@"',
}


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """An environment in which Java and `recourse` print what they are asked for."""
    folder = tmp_path / "java" / "bin"
    folder.mkdir(parents=True)
    for name, script in FAKES.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"JAVA_HOME": str(folder.parent), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def said(image: dict[str, str], *arguments: str) -> list[str]:
    command = [str(FOLDER / "entrypoint.sh"), *arguments]
    return subprocess.run(command, env=image, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def test_the_image_runs_recourse_or_the_part_of_a_cluster_that_is_asked_for(image: dict[str, str]) -> None:
    assert said(image, "streams", "run", "orders clean") == ["recourse streams run orders clean"]
    assert said(image, "worker", "spark://master:7077")[2:] == [
        "org.apache.spark.deploy.worker.Worker", "--work-dir", "/tmp/spark", "spark://master:7077",
    ]  # fmt: skip
    assert said(image, "master")[-4:] == ["--host", "master", "--port", "7077"]
    asked = {
        "SPARK_EXECUTOR_MEMORY": "3072m",
        "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
        "SPARK_EXECUTOR_ID": "2",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_APPLICATION_ID": "spark-1",
        "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "recourse-exec-2",
        "SPARK_CONF_DIR": "/opt/spark/conf",
        **{f"SPARK_JAVA_OPT_{number}": f"-Doption={number} of 12" for number in range(12)},
    }
    words = said({**image, **asked}, "executor")
    assert words[:14] == [*(f"-Doption={number} of 12" for number in range(12)), "-Xms3072m", "-Xmx3072m"]
    assert words[14] == "-cp" and words[15].startswith("/opt/spark/conf:") and words[15].endswith("/pyspark/jars/*")
    assert words[16:] == [
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        "--driver-url", "spark://CoarseGrainedScheduler@driver:7078", "--executor-id", "2", "--cores", "2",
        "--app-id", "spark-1", "--hostname", "10.0.0.7", "--resourceProfileId", "0", "--podName", "recourse-exec-2",
    ]  # fmt: skip


def test_the_compose_cluster_shares_its_folders_and_gives_its_driver_time_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compose = yaml.safe_load((DOCS / "docker" / "cluster.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert all("lake:/lake" in service["volumes"] for service in services.values())
    assert {service["image"] for service in services.values()} == {"recourse-cluster:0.1.0"}
    assert (DOCS / "docker" / services["worker"]["build"]["context"]).resolve() == DOCS.parent
    assert (DOCS.parent / services["worker"]["build"]["dockerfile"]) == FOLDER / "Dockerfile"
    driver = services["recourse"]
    for name, value in driver["environment"].items():
        monkeypatch.setenv(name, value)
    settings = Settings.load({"home": "/srv/recourse/.recourse"})
    assert settings.spark.master == services["worker"]["command"][1] == "spark://master:7077"
    assert settings.spark.driver_host == driver["hostname"] and services["master"]["hostname"] == "master"
    assert all(folder.is_relative_to("/lake") for folder in (settings.tables, settings.state))
    assert parse_duration(driver["stop_grace_period"]).total_seconds() >= SECONDS_TO_STOP
    copied = [line.split()[-2] for line in (FOLDER / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    assert copied and all((DOCS.parent / name).is_file() for name in copied)
