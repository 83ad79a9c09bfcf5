"""Turns the records of the GPU benchmark into goals, problems and a table."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gpu_children import Found

ERROR = 1e-2


class Goal(NamedTuple):
    """A figure of one record and its bound."""

    sentence: str
    section: str
    record: str
    figure: str
    least: float = -math.inf
    most: float = math.inf


GOALS = (
    Goal("decode attention, 32 rows x 4k: at least 70 % of the copy bandwidth",
         "decode", "8B 32 x 4096", "of_copy", 0.7),
    Goal("prefill attention, 8 x 4k: at least 350 TFLOP/s on an H100",
         "prefill", "8B 8 x 4096", "tflop_s", 350),
    Goal("prefill attention, 1 x 32k: at least 350 TFLOP/s on an H100",
         "prefill", "8B 1 x 32768", "tflop_s", 350),
    Goal("8B at one row: at least 75 % of the floor", "steps", "8B 1 x 1024", "share", 0.75),
    Goal("1B at one row: at least 65 % of the floor", "steps", "1B 1 x 1024", "share", 0.65),
    Goal("8B, prompts of 8 x 2048: at least 60 % of the matrix rate",
         "steps", "8B prefill 8 x 2048", "share", 0.6),
    Goal("8B at 32 rows: kernels run at least 97 % of the time",
         "gaps", "8B 32 x 1024", "busy", 0.97),
    Goal("64 clients: at least 2 times transformers' tokens a second",
         "server", "1B, ours beside transformers", "times", 2.0),
    Goal("8B from the page cache: first token within 15 s",
         "start", "8B", "first_token_s", most=15.0),
    Goal("8B: ledger and driver within 5 %", "soak", "8B", "ledger_agrees", 0.95),
)  # fmt: skip
# Columns of the table; other fields of a record follow as text.
_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "us": ("µs", "{:.1f}".format),
    "ms": ("ms", "{:.2f}".format),
    "host_us": ("host µs", "{:.1f}".format),
    "gb_s": ("GB/s", "{:.0f}".format),
    "tflop_s": ("TFLOP/s", "{:.1f}".format),
    "share": ("of limit", "{:.0%}".format),
    "error": ("error", "{:.1e}".format),
}
# Characters of a refusal in the table; the report has all of it.
_WIDEST = 120
_UNSAID = {"section", "name", "bound", "of_copy", "is_own", "broken"}


def goals(found: Found) -> list[dict[str, Any]]:
    """Each goal with its figure: met, missed or not measured."""
    rows = []
    for goal in GOALS:
        key = goal.section, goal.record
        values = [one.get(goal.figure) for one in found.records if _key(one) == key]
        value = values[0] if values else None
        state = "not measured"
        if isinstance(value, float):
            state = "met" if goal.least <= value <= goal.most else "missed"
        rows.append({"goal": goal.sentence, "value": value, "state": state})
    errors = [one["error"] for one in found.records if "error" in one]
    rows.append({"goal": f"error in bfloat16: at most {ERROR}", **_worst(errors)})
    return rows


def _worst(errors: list[float | str]) -> dict[str, Any]:
    """An error that is not finite is written in words."""
    if not errors:
        return {"value": None, "state": "not measured"}
    if any(isinstance(error, str) for error in errors):
        return {"value": "not finite", "state": "missed"}
    worst = max(float(error) for error in errors)
    return {"value": worst, "state": "met" if worst <= ERROR else "missed"}


def problems(found: Found) -> list[str]:
    """Problems as sentences; with any of them the exit status is 1."""
    said = [f"{name} failed: {reason}" for name, reason in found.failed.items()]
    for one in found.records:
        if "refused" in one and "is_own" in one:
            said.append(f"{one['section']}, {one['name']}: {one['refused']}")
        elif "broken" in one:
            said.append(f"{one['section']}, {one['name']}: {one['broken']}")
        elif "bound" in one and not _is_within(one):
            told = f"the error is {one['error']}, the bound {one['bound']}"
            said.append(f"{one['section']}, {one['name']}: {told}")
    return said


def _is_within(record: dict[str, Any]) -> bool:
    error = record["error"]
    return isinstance(error, float) and error <= record["bound"]


def _key(record: dict[str, Any]) -> tuple[str, str]:
    return record["section"], record["name"]


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{report['gpu']}, driver {report['driver']}, torch {report['torch']}, triton "
        f"{report['triton']}, commit {report['commit']}; {report['seconds']} s"
    ]
    limits = report["limits"]
    if limits:
        lines.append(
            f"reads {limits['read_gb_s']:.0f} GB/s, copies {limits['copy_gb_s']:.0f} GB/s, "
            f"products {limits['matrix_tflop_s']:.1f} TFLOP/s"
        )
    for section in dict.fromkeys(one["section"] for one in report["records"]):
        records = [one for one in report["records"] if one["section"] == section]
        lines += ["", section, *_rows(records)]
    lines += ["", "goals"]
    for one in report["goals"]:
        value = f"{one['value']:.3g}" if isinstance(one["value"], float) else one["value"]
        lines.append(f"  {one['state']}: {one['goal']}" + (f"; {value}" if value else ""))
    if report["left_out"]:
        lines += ["", f"no time for: {', '.join(report['left_out'])}"]
    return "\n".join([*lines, *(f"PROBLEM: {sentence}" for sentence in report["problems"])])


def _rows(records: list[dict[str, Any]]) -> Iterable[str]:
    columns = [key for key in _COLUMNS if any(key in one for one in records)]
    width = max(len(one["name"]) for one in records) + 2
    if columns:
        yield f"  {'':{width}}" + "".join(f"{_COLUMNS[key][0]:>10}" for key in columns)
    for one in records:
        cells = "".join(f"{_cell(key, one.get(key)):>10}" for key in columns)
        rest = {key: value for key, value in one.items() if key not in _COLUMNS.keys() | _UNSAID}
        told = "; ".join(f"{key}: {_short(value)}" for key, value in rest.items())
        yield f"  {one['name']:{width}}{cells}  {told}".rstrip()


def _cell(key: str, value: float | str | None) -> str:
    if isinstance(value, float | int):
        return _COLUMNS[key][1](value)
    return "" if value is None else value


def _short(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    told = str(value)
    return told if len(told) <= _WIDEST else f"{told[:_WIDEST]} …"
