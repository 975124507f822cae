"""A real Prometheus for tests: the programs of PATH, or of Debian's package, unpacked into the user's cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml
from platformdirs import user_cache_path

from streaming_jobs.platform.ports import free_port
from tests.support.waiting import wait_for

_CACHE = user_cache_path("recourse-tests") / "prometheus"


def program(name: str) -> Path:
    """`prometheus` or `promtool`; a machine with neither them nor apt-get fails the test, which would prove nothing."""
    if (found := shutil.which(name)) is not None:
        return Path(found)
    if not (path := _CACHE / "usr/bin" / name).exists():
        assert shutil.which("apt-get") and shutil.which("dpkg"), f"{name} is not on PATH: install Prometheus"
        _unpack()
    return path


def _unpack() -> None:
    _CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE.parent) as folder:
        fetched = subprocess.run(
            ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        packages = list(Path(folder).glob("*.deb"))
        assert packages, f"apt-get download prometheus (after apt-get update?): {fetched.stderr}"
        subprocess.run(["dpkg", "-x", str(packages[0]), f"{folder}/unpacked"], check=True, timeout=120)
        if not _CACHE.exists():  # another worker may have been first
            Path(folder, "unpacked").rename(_CACHE)


@dataclass(frozen=True)
class PrometheusServer:
    url: str

    def firing(self) -> dict[str, set[str]]:
        """The alerts that fire, by name: the streams, tables or topics that they are about, without the watchdog."""
        found: dict[str, set[str]] = {}
        for alert in self._get("alerts")["alerts"]:
            labels = alert["labels"]
            if alert["state"] == "firing" and labels["alertname"] != "RecourseWatchdog":
                about = labels.get("table") or labels.get("topic") or labels.get("stream") or ""
                found.setdefault(labels["alertname"], set()).add(about)
        return found

    def values(self, query: str) -> list[float]:
        return [float(each["value"][1]) for each in self._get("query", query=query)["result"]]

    def without_data(self, dashboard: str) -> dict[str, list[str]]:
        """The queries of a dashboard that return nothing, by panel, with everything chosen; fails for one that is none.

        Rates are of 15 seconds: of 15 samples, as `prometheus` scrapes.
        """
        variables = {"$__rate_interval": "15s", **dict.fromkeys(("$job", "$instance", "$stream"), ".*")}
        empty: dict[str, list[str]] = {}
        for panel in json.loads(dashboard)["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for name, value in variables.items():
                    query = query.replace(name, value)
                if not self.values(query):
                    empty.setdefault(panel["title"], []).append(target["legendFormat"])
        return empty

    def _get(self, path: str, **parameters: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, target: str, rules: str) -> Iterator[PrometheusServer]:
    """Prometheus at a free port, which scrapes `target` (host:port) and judges `rules` each second, without delays."""
    prompt = yaml.safe_load(rules)
    for rule in prompt["groups"][0]["rules"]:
        rule.pop("for", None)
    (folder / "rules.yml").write_text(yaml.safe_dump(prompt))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "recourse", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port, log = free_port(), folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=output,
        )
    server = PrometheusServer(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: _ready(process, server, log), "Prometheus")
        yield server
    finally:
        process.kill()
        process.wait()


def _ready(process: subprocess.Popen[bytes], server: PrometheusServer, log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")
    try:
        return bool(server.values("recourse_build_info"))
    except OSError:
        return False
