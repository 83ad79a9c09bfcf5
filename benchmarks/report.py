"""The report of serve.py: medians, ratios, the machine's limits, and tables."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contestants import CONTESTANTS, OURS, PRICED, RIVALS
from loads import Rates, Shape, Work
from machine import heading

COLUMNS = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
Rounds = dict[str, list[dict[str, Any]]]


def summarise(
    rounds: Rounds, shapes: dict[str, Shape], rates: Rates, checkpoint: Path
) -> dict[str, Any]:
    """Medians over the rounds, comparisons, and the parameters."""
    work = Work.of(checkpoint)
    servers = {name: _server(found) for name, found in rounds.items()}
    limits = {name: work.limit(shape, rates) for name, shape in shapes.items()}
    return {
        **heading(),
        "checkpoint": f"{checkpoint.name} (benchmarks/make_checkpoint.py writes llama-125m)",
        "machine_rates": asdict(rates),
        "versions": {name: _versions(name) for name in rounds},
        "loads": {
            name: {"description": str(shape), **asdict(shape), "limit_tokens_per_s": limits[name]}
            for name, shape in shapes.items()
        },
        "servers": servers,
        "comparison": {name: _comparison(servers, name, limits[name]) for name in shapes},
        "rounds": rounds,
    }


def _server(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds that have the figure."""
    summary: dict[str, Any] = {}
    if failures := [one["failed"] for one in found if "failed" in one]:
        summary["failed"] = failures
    started = [one for one in found if "ready_s" in one]
    if started:
        for column in ("ready_s", "first_answer_s"):
            summary[column] = statistics.median(one[column] for one in started)
    if measured := [one for one in found if "pss_mb" in one]:
        summary["pss_mb"] = max(one["pss_mb"] for one in measured)
        summary["peak_rss_mb"] = max(sum(one["peak_rss_mb"].values()) for one in measured)
    names = dict.fromkeys(name for one in started for name in one["loads"])
    summary["loads"] = {
        name: {
            column: statistics.median(
                one["loads"][name][column] for one in started if name in one["loads"]
            )
            for column in COLUMNS
        }
        for name in names
    }
    return summary


def _versions(name: str) -> dict[str, str]:
    try:
        return CONTESTANTS[name].versions()
    except RuntimeError as error:
        return {"unknown": str(error)}


def _comparison(servers: dict[str, Any], load: str, limit: float) -> dict[str, Any]:
    """Our server against the fastest peer at this load; quantized ones against their rivals."""
    speed = {
        name: server["loads"][load]["tokens_per_s"]
        for name, server in servers.items()
        if load in server["loads"]
    }
    peers = [name for name in speed if CONTESTANTS[name].is_peer and name not in RIVALS.values()]
    found: dict[str, Any] = {}
    if OURS in speed:
        found["of_limit"] = speed[OURS] / limit
        if peers:
            best = max(peers, key=speed.__getitem__)
            found["best_peer"] = best
            found["ratio"] = speed[OURS] / speed[best]
        if PRICED in speed:
            found[PRICED] = speed[PRICED] / speed[OURS]
    for name, rival in RIVALS.items():
        if name in speed and rival in speed:
            found[name] = speed[name] / speed[rival]
    return found


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    rates = report["machine_rates"]
    lines = [
        f"machine: {report['machine']['cpu']}, reads {rates['read_gb_s']:.0f} GB/s, "
        f"bfloat16 products {rates['bfloat16_gflop_s']:.0f} GFLOP/s"
    ]
    for name, load in report["loads"].items():
        lines += ["", f"{name}: {load['description']}"]
        lines += _row("server", "tokens/s", "of limit", "TTFT p50 / p99 ms", "ITL p50 / p99 ms")
        lines += _row(*["---"] * 5)
        lines += _row("limit of the machine", f"{load['limit_tokens_per_s']:.1f}", "100 %", "", "")
        for server, figures in report["servers"].items():
            if one := figures["loads"].get(name):
                lines += _row(server, *_cells(server, one, load["limit_tokens_per_s"]))
            elif "failed" in figures and name in CONTESTANTS[server].loads:
                lines += _row(server, "failed", "", "", "")
    lines += ["", *_starts(report["servers"]), "", *_verdicts(report["comparison"])]
    for server, figures in report["servers"].items():
        for reason in dict.fromkeys(figures.get("failed", ())):
            lines += ["", f"{server} failed: {reason}"]
    return "\n".join(lines)


def _cells(server: str, one: dict[str, float], limit: float) -> list[str]:
    rate, *times = (one[column] for column in COLUMNS)
    first, first_99, gap, gap_99 = (f"{1000 * value:.1f}" for value in times)
    # The limit is for bfloat16, not for fewer bits.
    is_quantized = server in RIVALS or server in RIVALS.values()
    share = "–" if is_quantized else f"{100 * rate / limit:.0f} %"
    return [f"{rate:.1f}", share, f"{first} / {first_99}", f"{gap} / {gap_99}"]


def _starts(servers: dict[str, Any]) -> Iterable[str]:
    yield from _row("server", "ready s", "first answer s", "PSS MB", "peak RSS MB")
    yield from _row(*["---"] * 5)
    columns: dict[str, Callable[[float], str]] = {
        "ready_s": "{:.1f}".format,
        "first_answer_s": "{:.1f}".format,
        "pss_mb": "{:.0f}".format,
        "peak_rss_mb": "{:.0f}".format,
    }
    for name, one in servers.items():
        cells = [show(one[column]) if column in one else "–" for column, show in columns.items()]
        yield from _row(name, *cells)


def _verdicts(comparison: dict[str, Any]) -> Iterable[str]:
    for load, one in comparison.items():
        if "ratio" in one:
            yield f"{load}: {OURS} is {one['ratio']:.2f} times {one['best_peer']}, its best peer"
        if PRICED in one:
            yield f"{load}: {PRICED} is {one[PRICED]:.2f} times {OURS}"
        for name, rival in RIVALS.items():
            if name in one:
                yield f"{load}: {name} is {one[name]:.2f} times {rival}"


def _row(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |"]
