"""docker/'s files for Compose, Kubernetes and Grafana: valid by the published schemas, and true of
the program: names of options, paths, times and metrics are those that it has."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from text_generation_launcher.options import OPTIONS, read_options
from text_generation_router.metrics import Metrics

from integration_tests.prometheus import DOCKER, ROOT, dashboard

ENVIRONMENT = ".venv-clients/deployment"
COMPOSE = DOCKER / "compose.yml"
KUBERNETES = DOCKER / "kubernetes.yaml"
GRAFANA = DOCKER / "grafana.json"
# What the launcher is not asked about: Hugging Face's own variables.
FOREIGN_VARIABLES = {"HF_TOKEN"}
GRID_COLUMNS = 24


def run_tool(tool: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program of the environment that has the schemas."""
    made = subprocess.run(
        ["make", f"{ENVIRONMENT}/.installed"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stdout + made.stderr
    command = [str(ROOT / ENVIRONMENT / "bin" / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def check_compose(path: Path) -> "subprocess.CompletedProcess[str]":
    return run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))


def check_kubernetes(path: Path) -> "subprocess.CompletedProcess[str]":
    return run_tool("kubernetes-validate", "--strict", str(path))


@cache
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


@cache
def manifests() -> dict[str, Any]:
    """What kubernetes.yaml declares, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES.read_text())}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    [found] = pod()["containers"]
    return dict(found)


def test_compose_is_valid() -> None:
    checked = check_compose(COMPOSE)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_kubernetes_is_valid() -> None:
    checked = check_kubernetes(KUBERNETES)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("passed") == len(manifests()) == 4


@pytest.mark.parametrize(
    ("original", "check", "right", "wrong"),
    [
        (COMPOSE, check_compose, "stop_grace_period:", "stop_grace:"),
        (KUBERNETES, check_kubernetes, "startupProbe:", "startProbe:"),
        (KUBERNETES, check_kubernetes, "failureThreshold: 6\n", 'failureThreshold: "6"\n'),
    ],
)
def test_the_schemas_notice_a_wrong_word(
    tmp_path: Path,
    original: Path,
    check: Callable[[Path], "subprocess.CompletedProcess[str]"],
    right: str,
    wrong: str,
) -> None:
    broken = tmp_path / original.name
    broken.write_text(original.read_text().replace(right, wrong))
    assert broken.read_text() != original.read_text()
    assert check(broken).returncode != 0


def missing(ours: Any, understood: Any, path: str = "") -> Iterator[str]:
    """Where `understood` lacks or changes something that `ours` says."""
    if isinstance(ours, dict) and isinstance(understood, dict):
        for key, value in ours.items():
            yield from missing(value, understood.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(understood, list) and len(ours) == len(understood):
        for index, (one, other) in enumerate(zip(ours, understood, strict=True)):
            yield from missing(one, other, f"{path}/{index}")
    elif ours != understood:
        yield f"{path}: {ours!r}, understood as {understood!r}"


def test_grafana_understands_all_of_the_dashboard(tmp_path: Path) -> None:
    def understood(path: Path) -> Any:
        script = str(ROOT / "integration_tests/grafana_model.py")
        done = run_tool("python", script, str(path))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert list(missing(dashboard(), understood(GRAFANA))) == []
    broken = dashboard()
    broken["panels"][1]["fieldConfig"]["defaults"]["untit"] = "s"
    path = tmp_path / "grafana.json"
    path.write_text(json.dumps(broken))
    assert list(missing(broken, understood(path))) == [
        "/panels/1/fieldConfig/defaults/untit: 's', understood as None"
    ]


def test_panels_have_a_place_and_an_explanation_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert columns.stop <= GRID_COLUMNS and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters), panel["title"]


def test_the_dashboard_shows_every_metric_of_the_server() -> None:
    page = Metrics(100, 200).render().decode()
    names = set(re.findall(r"^# TYPE (tgi_\w+)", page, re.MULTILINE))
    text = GRAFANA.read_text()
    shown = {name for name in names if re.search(rf"{name}(_bucket|_sum)?\b", text)}
    # Steps begun are those that succeeded and those that failed; buckets are TGI's dashboard's.
    assert names - shown == {"tgi_batch_inference_count", "tgi_request_skipped_tokens_bucket"}


def compose_variables() -> dict[str, str]:
    """The environment of the server; what is passed on if it is set has the value `set`."""
    lines = compose()["services"]["pytgi"]["environment"]
    return {name: value or "set" for name, _, value in (line.partition("=") for line in lines)}


def kubernetes_variables() -> dict[str, str]:
    """The environment of the server; what comes from a secret has the value `set`."""
    return {one["name"]: one.get("value", "set") for one in container()["env"]}


@pytest.mark.parametrize("variables", [compose_variables, kubernetes_variables])
def test_the_launcher_takes_the_variables(variables: Callable[[], dict[str, str]]) -> None:
    environment = variables()
    taken = read_options([], environment)  # raises for a value that it can not take
    known = {option.variable: option.name for option in OPTIONS if option.has_environment}
    assert environment.keys() - known.keys() == FOREIGN_VARIABLES
    for name in environment.keys() - FOREIGN_VARIABLES:
        assert taken[known[name]] == environment[name], name


def seconds(duration: str) -> int:
    """A duration of Compose, such as 75s."""
    assert duration.endswith("s")
    return int(duration.removesuffix("s"))


def test_the_drain_fits_into_the_time_before_the_kill() -> None:
    drain_s = int(compose_variables()["GRACEFUL_TERMINATION_TIMEOUT"])
    assert seconds(compose()["services"]["pytgi"]["stop_grace_period"]) >= drain_s + 10

    program, pre_stop_s = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    drain_s = int(pre_stop_s) + int(kubernetes_variables()["GRACEFUL_TERMINATION_TIMEOUT"])
    assert pod()["terminationGracePeriodSeconds"] >= drain_s + 10


def test_probes_ask_for_health_where_the_server_listens() -> None:
    schema = json.loads((ROOT / "integration_tests/frozen/openapi.json").read_text())
    listens_on = kubernetes_variables()["PORT"]
    [port] = container()["ports"]
    assert port["containerPort"] == int(listens_on)
    probes = {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    for kind, path in probes.items():
        probe = container()[kind]
        assert probe["httpGet"] == {"path": path, "port": port["name"]}
        assert "get" in schema["paths"][probe["httpGet"]["path"]]
        # A probe that is sent before the last one has ended would tell nothing new.
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]
    annotations = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == listens_on
    assert annotations["prometheus.io/path"] in schema["paths"]
    assert manifests()["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]


def test_the_autoscaler_reads_a_gauge_that_the_server_has() -> None:
    autoscaler = manifests()["HorizontalPodAutoscaler"]["spec"]
    [metric] = autoscaler["metrics"]
    page = Metrics(100, 200).render().decode()
    assert f"# TYPE {metric['pods']['metric']['name']} gauge" in page
    assert autoscaler["scaleTargetRef"]["name"] == manifests()["Deployment"]["metadata"]["name"]
    assert "replicas" not in manifests()["Deployment"]["spec"]


def test_service_deployment_and_budget_mean_the_same_pods() -> None:
    labels = manifests()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests()["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests()["Service"]["spec"]["selector"] == labels
    assert manifests()["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


def test_servers_may_write_to_data_and_tmp_only() -> None:
    server = compose()["services"]["pytgi"]
    assert server["read_only"] is True and server["tmpfs"] == ["/tmp"]
    assert server["volumes"] == ["data:/data"]
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert mounts.keys() == {"/data", "/tmp", "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert compose()["services"]["pytgi"]["shm_size"] == "1g"
    resources = container()["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]
    # A shard has a GPU of its own.
    num_gpus = str(resources["limits"]["nvidia.com/gpu"])
    assert kubernetes_variables()["NUM_SHARD"] == num_gpus


def test_what_compose_mounts_is_there_and_where_grafana_looks() -> None:
    services = compose()["services"]
    mounted: dict[str, str] = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert (DOCKER / source).is_file(), source
                mounted[source] = target
    assert mounted["./prometheus.yml"] == "/etc/prometheus/prometheus.yml"
    for rule_file in yaml.safe_load((DOCKER / "prometheus.yml").read_text())["rule_files"]:
        assert mounted[f"./{rule_file}"] == f"/etc/prometheus/{rule_file}"

    [provider] = yaml.safe_load((DOCKER / "grafana/dashboards.yml").read_text())["providers"]
    home = mounted["./grafana.json"]
    assert provider["options"]["path"] == str(Path(home).parent)
    assert f"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH={home}" in services["grafana"]["environment"]


def test_grafana_reads_the_prometheus_that_scrapes_the_server() -> None:
    services = compose()["services"]
    scraping = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    [target] = scraping["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    assert [f"8080:{target.split(':')[1]}"] == services["pytgi"]["ports"]
    [source] = yaml.safe_load((DOCKER / "grafana/datasources.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    [variable] = [one for one in dashboard()["templating"]["list"] if one["type"] == "datasource"]
    assert variable["current"]["value"] == source["uid"]


def test_the_image_has_the_target() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE)
    build = compose()["services"]["pytgi"]["build"]
    assert build["target"] in stages
    assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
    assert container()["image"].split(":")[1] in stages
