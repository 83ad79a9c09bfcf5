"""A real Prometheus that scrapes a server under test, and its `promtool`."""

import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from integration_tests.server import free_port, wait_until

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
BINARIES = ".venv-clients/prometheus"
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`: installed ones, or Debian's, unpacked by make."""
    made = subprocess.run(
        ["make", f"{BINARIES}/.installed"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return str(ROOT / BINARIES / "usr/bin" / name)


def promtool(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs promtool to its end."""
    return subprocess.run(
        [binary("promtool"), *arguments], input=stdin, capture_output=True, text=True, timeout=60
    )


class PrometheusHandle:
    """Owns one Prometheus process whose data, configuration and log are in `folder`."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self._log_path = folder / "log"
        config_path = folder / "prometheus.yml"
        config_path.write_text(yaml.safe_dump(dict(config)))
        url = f"http://127.0.0.1:{free_port()}"
        self.client = httpx.Client(base_url=url, timeout=10, trust_env=False)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    # It must end with a test run that is killed.
                    *("setpriv", "--pdeathsig", "TERM"),
                    binary("prometheus"),
                    f"--config.file={config_path}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GOMAXPROCS": "1"},
            )

    def wait_until_ready(self) -> None:
        """Returns once it answers queries."""

        def is_ready() -> bool:
            assert self._process.poll() is None, self._log_path.read_text()
            try:
                return self.client.get("/-/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, _READY_TIMEOUT_S, "Prometheus answers /-/ready")

    def get(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer of /api/v1. Raises AssertionError if Prometheus refuses."""
        response = self.client.get(f"/api/v1/{path}", params=parameters)
        assert response.status_code == 200, f"{parameters}: {response.text}"
        return response.json()["data"]

    def values(self, expression: str) -> list[float]:
        """The current value of every series of a query."""
        data = self.get("query", query=expression)
        assert data["resultType"] == "vector", f"{expression} is a {data['resultType']}"
        return [float(series["value"][1]) for series in data["result"]]

    def returns_a_number(self, expression: str) -> bool:
        """Whether a query returns at least one value, and only finite numbers."""
        values = self.values(expression)
        return bool(values) and all(math.isfinite(value) for value in values)

    def stop(self) -> None:
        """Ends the process. Idempotent."""
        self._process.terminate()
        self._process.wait(_STOP_TIMEOUT_S)
        self.client.close()


@contextmanager
def scraping(server_url: str, folder: Path) -> Iterator[PrometheusHandle]:
    """A Prometheus with docker/prometheus.yml except the address, and a scrape every second."""
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DOCKER / name) for name in config["rule_files"]]
    [target] = config["scrape_configs"][0]["static_configs"]
    target["targets"] = [server_url.removeprefix("http://")]
    handle = PrometheusHandle(config, folder)
    try:
        handle.wait_until_ready()
        yield handle
    finally:
        handle.stop()


def dashboard() -> dict[str, Any]:
    """docker/grafana.json."""
    found: dict[str, Any] = json.loads((DOCKER / "grafana.json").read_text())
    return found


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """The rules of docker/alerts.yml of a kind, `alert` or `record`, by name."""
    groups = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}
