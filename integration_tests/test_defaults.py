"""A default is written in one place: text_generation_process/defaults.py, or the one package that
needs it."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_generation_process import defaults
from text_generation_process.flags import OPTIONS
from text_generation_router.cli import create_parser
from text_generation_shard.cli import build_parser

from integration_tests.test_frozen import commands_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "process", "router", "shard")
TABLE = {
    name: value
    for name, value in vars(defaults).items()
    if name.isupper() and isinstance(value, str | int | float)
}
# What a switch or a number has that changes nothing.
NEUTRAL = (None, False, 0, "", ())


def normal(name: str) -> str:
    """The same for a flag, a field, a parameter and a constant."""
    return name.strip("-_").replace("-", "_").lower().removesuffix("_s")


def literal(node: ast.expr | None) -> object:
    """The value of a literal; None of anything else."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def bindings_of(tree: ast.AST) -> Iterator[tuple[str, object]]:
    """Name and value of constants, fields, parameters' defaults and arguments of flags."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = node.value
            if isinstance(value, ast.Call) and value.args:  # `_option(default, …)`
                value = value.args[0]
            yield node.target.id, literal(value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, literal(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            given = positional[len(positional) - len(arguments.defaults) :]
            for argument, value in zip(given, arguments.defaults, strict=True):
                yield argument.arg, literal(value)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
                yield argument.arg, literal(default)
        elif isinstance(node, ast.Call) and node.args:  # `Option`, `add_argument`
            name = literal(node.args[0])
            for keyword in node.keywords:
                if keyword.arg == "default" and isinstance(name, str):
                    yield name, literal(keyword.value)


def places_of(trees: dict[str, ast.AST], names: set[str]) -> dict[str, list[str]]:
    """For each of these names, and each string of the table, the files that bind a literal to it,
    one entry for each time."""
    texts = {value for value in TABLE.values() if isinstance(value, str)}
    found = defaultdict(list)
    for path, tree in trees.items():
        for name, value in bindings_of(tree):
            if value in NEUTRAL:
                continue
            if isinstance(value, str) and value in texts:
                found[value].append(path)
            elif normal(name) in names:
                found[normal(name)].append(path)
    return found


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Of all flags and of the table."""
    commands = commands_of(build_parser())
    actions = [a for parser in (create_parser(), *commands.values()) for a in parser._actions]
    flags = {option.name for option in OPTIONS} | {action.dest for action in actions}
    # A world of 1 is no default, but one shard alone.
    return {normal(name) for name in flags | TABLE.keys()} - {"world_size"}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    """Product code."""
    paths = [p for name in PACKAGES for p in (ROOT / name).glob("text_generation_*/**/*.py")]
    assert len(paths) > 150
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


def test_no_default_is_written_twice(trees: dict[str, ast.AST], names: set[str]) -> None:
    assert {k: v for k, v in places_of(trees, names).items() if len(v) > 1} == {}


def test_every_entry_of_the_table_is_needed_by_several_packages(trees: dict[str, ast.AST]) -> None:
    """Or by another entry."""
    users = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
                users[node.attr if isinstance(node, ast.Attribute) else node.id].add(
                    path.partition("/")[0]
                )
    assert {name: users[name] for name in TABLE if len(users[name]) < 2} == {}


@pytest.mark.parametrize(
    "second",
    [
        "class Other:\n    port: int = 3000",
        "Option('port', 'help', default='3000')",
        "add('--logger-level', default='INFO')",
        "def run(answer: float, *, hostname: str = '0.0.0.0'): ...",
        "def run(starting_deadline_s: float = 20.0): ...",
        "LEVEL = 'INFO'",
        "_MAX_BEST_OF = 2",
        "class Other:\n    max_best_of: int = field(2)",
    ],
)
def test_a_second_place_is_found(trees: dict[str, ast.AST], names: set[str], second: str) -> None:
    found = places_of({**trees, "second.py": ast.parse(second)}, names)
    [places] = [places for places in found.values() if "second.py" in places]
    assert len(places) == 2
