"""The report of a soak as an SVG: memory of each process, requests a second, errors, restarts.

python benchmarks/soak_plot.py benchmarks/results/soak-2026-11-25.json   writes the .svg beside it
"""

import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

_WIDTH, _LEFT, _RIGHT = 960, 70, 190
_HEIGHT, _GAP, _TOP = 170, 50, 50
_COLOURS = {
    **{
        "launcher": "#000",
        "other": "#bbb",
        "router": "#1f77b4",
        "shard": "#d62728",
        "KV cache of the shard": "#e7a",
    },
    **{"ok": "#2ca02c", "vanished": "#ff9f0e", "refused": "#1f77b4"},
    **{"explained by a kill": "#ff9f0e", "not explained": "#d62728"},
}

Series = Sequence[tuple[str, Sequence[tuple[float, float]]]]


def main() -> None:
    """Draws one report."""
    source = Path(sys.argv[1])
    source.with_suffix(".svg").write_text(svg(json.loads(source.read_text())))


def svg(report: dict[str, Any]) -> str:
    """The whole picture."""
    end_s = max(report["seconds"], 1.0)
    lives = [(life["role"], life["points"]) for life in report["memory"]]
    shards = [(role, points) for role, points in lives if role == "shard"]
    others = [(role, points) for role, points in lives if role != "shard"]
    caches = [("KV cache of the shard", life["cache"]) for life in report["memory"]]
    step = report["bucket_s"]

    def rates(*names: str) -> Series:
        buckets = report["requests_by_time"]
        return [
            (name, [((i + 0.5) * step, one[name] / step) for i, one in enumerate(buckets)])
            for name in names
        ]

    panels: list[tuple[str, Series]] = [
        ("memory of each process but shards, MB (RSS)", others),
        ("memory of each shard, MB (RSS), its KV cache apart", shards + caches),
        ("requests a second, by their end", rates("ok", "vanished", "refused")),
        ("errors a second", rates("explained by a kill", "not explained")),
    ]
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    is_good = all(finding["is_good"] for finding in report["verdict"])
    title = (
        f"Soak of {report['minutes']:g} minutes, {report['when']}: "
        f"{report['requests']} requests, {len(report['kills'])} shards killed, "
        f"{'all is well' if is_good else 'not all is well'}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 20, title, size=15),
    ]
    for number, (name, series) in enumerate(panels):
        top = _TOP + number * (_HEIGHT + _GAP)
        parts += _panel(top, name, series, end_s, report["kills"])
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    top: float, name: str, series: Series, end_s: float, kills: Sequence[dict[str, Any]]
) -> list[str]:
    most = max((y for _, points in series for _, y in points), default=0.0)
    step = _step(most)
    most = max(step, math.ceil(most / step) * step)
    bottom, right = top + _HEIGHT, _WIDTH - _RIGHT

    def x(seconds: float) -> float:
        return _LEFT + (right - _LEFT) * seconds / end_s

    def y(value: float) -> float:
        return bottom - _HEIGHT * value / most

    parts = [_text(_LEFT, top - 8, name)]
    for tick in range(round(most / step) + 1):
        at, label = y(tick * step), f"{tick * step:g}"
        parts.append(_line(_LEFT, at, right, at, "#ddd"))
        parts.append(_text(_LEFT - 6, at + 4, label, anchor="end"))
    minute = _step(end_s / 60)
    for tick in range(int(end_s / 60 / minute) + 1):
        parts.append(_text(x(tick * minute * 60), bottom + 16, f"{tick * minute:g} min", "middle"))
    for kill in kills:
        dash = "" if kill["signal"] == "SIGKILL" else ' stroke-dasharray="4 3"'
        parts.append(_line(x(kill["at_s"]), top, x(kill["at_s"]), bottom, "#999", dash))
    for role, points in series:
        line = " ".join(
            f"{x(seconds):.1f},{y(value):.1f}" for seconds, value in points if seconds <= end_s
        )
        colour = _COLOURS.get(role, "#999")
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
    for number, role in enumerate(dict.fromkeys(role for role, _ in series)):
        at = top + 10 + 18 * number
        parts.append(_line(right + 10, at, right + 30, at, _COLOURS.get(role, "#999")))
        parts.append(_text(right + 36, at + 4, role))
    if kills:
        at = bottom - 22
        parts.append(_line(right + 10, at, right + 30, at, "#999"))
        parts.append(_text(right + 36, at + 4, "shard gets SIGKILL"))
        parts.append(
            _line(right + 10, at + 18, right + 30, at + 18, "#999", ' stroke-dasharray="4 3"')
        )
        parts.append(_text(right + 36, at + 22, "shard gets SIGSTOP"))
    return parts


def _step(most: float) -> float:
    """Between two lines of a grid of about five: 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if most / (factor * power) <= 5)


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{colour}"{more}/>'


if __name__ == "__main__":
    main()
