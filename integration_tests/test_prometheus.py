"""Metrics for real: Debian's Prometheus scrapes a loaded server, and everything that asks it gets
numbers: our dashboard, our alerts, TGI's dashboard."""

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration_tests import tgi_dashboard
from integration_tests.prometheus import (
    DOCKER,
    PrometheusHandle,
    dashboard,
    promtool,
    rules,
    scraping,
)
from integration_tests.server import LauncherHandle, wait_until

PROMPTS = ("the cat ", "the dog ran in the rain; ", "def add(first, second):\n    return " * 3)
COMPARISON = re.compile(r"^(?P<number>.+) (?P<sign>[<>]) (?P<limit>[\d.]+)$")
# All that promtool may find fault with: TGI's names, and those of ours that are made like them.
COMPLAINT = re.compile(
    r"^tgi_\w+ ("
    r'counter metrics should have "_total" suffix'
    r'|non-histogram and non-summary metrics should not have "_count" suffix'
    r'|non-histogram metrics should not have ("_bucket" suffix|"le" label)'
    r")$"
)


async def _ask_for_ever(server: LauncherHandle, prompt: str, num_tokens: int) -> None:
    parameters = {"max_new_tokens": num_tokens, "ignore_eos_token": True}
    async with server.async_client() as client:
        while True:
            body = {"inputs": prompt, "parameters": parameters}
            response = await client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            refused = await client.post("/generate", json={"inputs": ""})
            assert refused.status_code == 422, refused.text


@contextmanager
def load(server: LauncherHandle) -> Iterator[None]:
    """Six clients in a closed loop: some always run when another joins, and some are refused."""
    stop = threading.Event()

    async def ask() -> None:
        async with asyncio.TaskGroup() as clients:
            tasks = [
                clients.create_task(_ask_for_ever(server, prompt, num_tokens))
                for prompt in PROMPTS
                for num_tokens in (11, 30)
            ]
            while not stop.is_set():
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()

    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(ask())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not errors, errors


@pytest.fixture(scope="module")
def prometheus(
    shared_server: LauncherHandle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusHandle]:
    """A Prometheus that has seen the shared server under load, and still does."""
    folder = tmp_path_factory.mktemp("prometheus")
    with scraping(shared_server.url, folder) as handle, load(shared_server):

        def has_seen_enough() -> bool:
            scrapes = handle.values("count_over_time(tgi_request_count[1m])")
            joins = handle.values("increase(tgi_batch_concat_duration_count[1m])")
            numbers = map(handle.returns_a_number, rules("record"))
            return scrapes >= [5.0] and any(value > 0 for value in joins) and all(numbers)

        wait_until(has_seen_enough, 60, "five scrapes, a join and every rule evaluated")
        yield handle
    shared_server.assert_idle()


def test_promtool_takes_the_page(
    shared_server: LauncherHandle, prometheus: PrometheusHandle
) -> None:
    checked = promtool("check", "metrics", stdin=shared_server.client.get("/metrics").text)
    assert checked.returncode in (0, 3), checked.stderr
    complaints = checked.stderr.splitlines()
    assert complaints == [line for line in complaints if COMPLAINT.match(line)]


def test_promtool_finds_fault_with_a_broken_page() -> None:
    checked = promtool("check", "metrics", stdin="# TYPE tgi_a counter\ntgi_a one\n")
    assert checked.returncode == 1, checked.stderr


@pytest.mark.parametrize(("kind", "file"), [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_promtool_takes_the_files(kind: str, file: str) -> None:
    checked = promtool("check", kind, str(DOCKER / file))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def _substituted(expression: str) -> str:
    """As Grafana does it for `All` servers in a window of a minute."""
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            expression = expression.replace(f"${variable['name']}", variable["allValue"])
    return expression.replace("$__rate_interval", "1m")


def _without_number(prometheus: PrometheusHandle, expressions: Sequence[str]) -> list[str]:
    return [text for text in expressions if not prometheus.returns_a_number(text)]


@pytest.mark.parametrize("panel", _panels(), ids=lambda panel: panel["title"])
def test_every_query_of_the_dashboard_returns_a_number(
    prometheus: PrometheusHandle, panel: dict[str, Any]
) -> None:
    expressions = [_substituted(target["expr"]) for target in panel["targets"]]
    assert expressions and not any("$" in text for text in expressions)
    assert _without_number(prometheus, expressions) == []


def test_the_dashboard_finds_the_server_for_its_variables(prometheus: PrometheusHandle) -> None:
    variables = [one for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    assert [variable["name"] for variable in variables] == ["job", "instance"]
    for variable in variables:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert found is not None, variable
        matcher, label = _substituted(found[1]), found[2]
        values = prometheus.get(f"label/{label}/values", **{"match[]": matcher})
        assert len(values) == 1, f"{variable['name']}: {values}"


@pytest.mark.parametrize("title", tgi_dashboard.PANELS)
def test_every_panel_of_tgis_dashboard_works_unchanged(
    prometheus: PrometheusHandle, title: str
) -> None:
    assert _without_number(prometheus, tgi_dashboard.PANELS[title]) == []
    assert f"| {title} |" in (DOCKER / "MIGRATION.md").read_text()


def test_tgis_dashboard_finds_the_server(prometheus: PrometheusHandle) -> None:
    values = prometheus.get("label/container/values", **{"match[]": "tgi_request_count"})
    assert values == ["pytgi"]


def test_a_query_of_a_metric_that_is_not_there_is_noticed(prometheus: PrometheusHandle) -> None:
    assert not prometheus.returns_a_number("sum(rate(tgi_no_such_name[1m]))")
    assert not prometheus.returns_a_number("sum(tgi_queue_size) * 0 / 0")


@pytest.mark.parametrize("name", rules("record"))
def test_every_recorded_number_is_one(prometheus: PrometheusHandle, name: str) -> None:
    assert _without_number(prometheus, [name]) == []


@pytest.mark.parametrize("name", rules("alert"))
def test_every_alert_compares_a_number(prometheus: PrometheusHandle, name: str) -> None:
    comparison = COMPARISON.match(rules("alert")[name]["expr"])
    assert comparison is not None, "an alert is `number > limit`, and the number a recorded one"
    assert _without_number(prometheus, [comparison["number"]]) == []


def test_prometheus_evaluates_all_rules_and_nothing_is_wrong(prometheus: PrometheusHandle) -> None:
    evaluated = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in evaluated} == {*rules("alert"), *rules("record")}
    assert [rule for rule in evaluated if rule["health"] != "ok"] == []
    assert prometheus.values('ALERTS{alertstate="firing"}') == []


# Of each alert: what a server in trouble shows, and what another shows; a value every 15 s, in
# promtool's words ("0+5x80": from 0 in 80 steps of 5).
COUNT = "tgi_request_count"
FIRST = "tgi_request_time_to_first_token_duration_bucket"
NEXT = "tgi_request_inter_token_latency_duration_bucket"
ALERT_CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "PytgiDown": ({"up": "0x80"}, {"up": "1x80"}),
    "PytgiStalled": (
        {"tgi_batch_current_size": "3x80", "tgi_batch_inference_success": "7x80"},
        {"tgi_batch_current_size": "3x80", "tgi_batch_inference_success": "7+9x80"},
    ),
    "PytgiRequestsFail": (
        {'tgi_request_failure{err="generation"}': "0+1x80", COUNT: "0+10x80"},
        {'tgi_request_failure{err="validation"}': "0+9x80", COUNT: "0+10x80"},
    ),
    "PytgiTurnsRequestsAway": (
        {'tgi_request_failure{err="overloaded"}': "0+9x80"},
        {'tgi_request_failure{err="overloaded"}': "9x80"},
    ),
    "PytgiQueueIsLong": ({"tgi_queue_size": "20x80"}, {"tgi_queue_size": "2x80"}),
    "PytgiFirstTokenIsLate": (
        {
            f'{FIRST}{{le="12.8"}}': "0x80",
            f'{FIRST}{{le="19.2"}}': "0+5x80",
            f'{FIRST}{{le="+Inf"}}': "0+5x80",
        },
        {
            f'{FIRST}{{le="0.5"}}': "0+5x80",
            f'{FIRST}{{le="+Inf"}}': "0+5x80",
        },
    ),
    "PytgiTokensAreSlow": (
        {
            f'{NEXT}{{le="1.1"}}': "0x80",
            f'{NEXT}{{le="1.7"}}': "0+5x80",
            f'{NEXT}{{le="+Inf"}}': "0+5x80",
        },
        {
            f'{NEXT}{{le="0.1"}}': "0+5x80",
            f'{NEXT}{{le="+Inf"}}': "0+5x80",
        },
    ),
    "PytgiPreempts": (
        {"tgi_request_preempted": "0+20x80"},
        {"tgi_request_preempted": "0+1x80"},
    ),
    "PytgiKvCacheIsFull": (
        {"tgi_kv_blocks_used": "99x80", "tgi_kv_blocks_free": "1x80"},
        {"tgi_kv_blocks_used": "90x80", "tgi_kv_blocks_free": "10x80"},
    ),
    "PytgiRestarts": (
        {'tgi_restarts{process="shard"}': "0x50 1x30"},
        {"up": "1x80"},
    ),
    "PytgiLosesLogLines": (
        {"tgi_log_lines_dropped": "0+5x80"},
        {"tgi_log_lines_dropped": "5x80"},
    ),
    "PytgiRefusesConnections": (
        {'tgi_connections_refused{reason="silent"}': "0+30x80"},
        {'tgi_connections_refused{reason="silent"}': "0+3x80"},
    ),
}


def _alert_test(name: str, series: dict[str, str], num_firing: int) -> dict[str, Any]:
    """What `promtool test rules` shall find when one server shows the series."""

    def of_server(one: str) -> str:
        metric, _, labels = one.rstrip("}").partition("{")
        return f'{metric}{{job="pytgi",instance="a"{labels and ","}{labels}}}'

    firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    return {
        "interval": "15s",
        "input_series": [
            {"series": of_server(one), "values": values} for one, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": "19m",
                "exp_samples": [{"labels": "{}", "value": num_firing}],
            }
        ],
    }


def test_every_alert_has_a_case() -> None:
    assert ALERT_CASES.keys() == rules("alert").keys()


def test_alerts_fire_when_they_must_and_not_else(tmp_path: Path) -> None:
    cases = {
        "rule_files": [str(DOCKER / "alerts.yml")],
        "evaluation_interval": "15s",
        "tests": [
            _alert_test(name, series, num_firing)
            for name, (trouble, health) in ALERT_CASES.items()
            for series, num_firing in ((trouble, 1), (health, 0))
        ],
    }
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump(cases))
    checked = promtool("test", "rules", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr
