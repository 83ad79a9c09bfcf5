"""What each package may pull into its process (ARCHITECTURE, section 4), found by importing it."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

IMPORT_ALL = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
package = importlib.import_module(sys.argv[1])
paths = getattr(package, "__path__", [])
for module in pkgutil.walk_packages(paths, package.__name__ + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@cache
def imported_by(package: str) -> set[str]:
    """Names of all modules in the process after every module of the package was imported."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def roots(modules: set[str]) -> set[str]:
    """Top-level names, without the standard library."""
    return {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)


def test_launcher_is_standard_library_only() -> None:
    own = {"text_generation_launcher", "text_generation_process"}
    assert roots(imported_by("text_generation_launcher")) == own


def test_what_all_processes_need_is_standard_library_only() -> None:
    assert roots(imported_by("text_generation_process")) == {"text_generation_process"}


def test_proto_needs_protobuf_and_grpc_only() -> None:
    found = roots(imported_by("text_generation_proto"))
    # grpc imports those of its companions that are installed, and Cython's runtime.
    theirs = {name for name in found if "cython" in name or name.startswith("grpc")}
    assert found - theirs <= {"text_generation_proto", "google", "typing_extensions"}


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        (
            "text_generation_router",
            {
                *("torch", "transformers", "text_generation_shard", "text_generation_launcher"),
                "text_generation_benchmark",
            },
        ),
        ("text_generation_benchmark", {"torch", "text_generation_shard"}),
        # The load generator measures any server.
        ("text_generation_benchmark.load", {"text_generation_router", "fastapi", "rich"}),
        (
            "text_generation_router.scheduler",
            {"fastapi", "starlette", "grpc", "google", "text_generation_proto", "pydantic"},
        ),
        ("text_generation_router.request", {"fastapi", "grpc", "pydantic", "tokenizers"}),
        (
            "text_generation_shard",
            {
                *("fastapi", "starlette", "uvicorn", "pydantic", "tokenizers"),
                *("text_generation_router", "text_generation_launcher"),
            },
        ),
        ("text_generation_shard.models", {"grpc", "google", "text_generation_proto"}),
    ],
)
def test_forbidden_modules_stay_out(package: str, forbidden: set[str]) -> None:
    assert roots(imported_by(package)) & forbidden == set()


@pytest.mark.parametrize(
    ("package", "above"),
    [
        ("text_generation_router.scheduler", ("api", "app", "cli", "infer", "client")),
        ("text_generation_router.client", ("api", "app", "cli", "infer")),
        ("text_generation_shard.models", ("engine", "service", "server", "cli")),
        ("text_generation_shard.device", ("checkpoint", "models", "engine", "grammars")),
        ("text_generation_shard.sampling", ("device", "engine", "grammars")),
    ],
)
def test_imports_go_down(package: str, above: tuple[str, ...]) -> None:
    top = package.partition(".")[0]
    graph = import_graph(next(ROOT.glob(f"*/{top}")))
    found = {name for name in graph if f"{name}.".startswith(f"{package}.")}
    assert found
    while more := set().union(*(graph[name] for name in found)) - found:
        found |= more
    assert {name.split(".")[1] for name in found if "." in name} & {*above} == set()


def imports_of(path: Path, modules: Collection[str]) -> Iterator[str]:
    """Which of the modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            for item in node.names:
                name = f"{node.module}.{item.name}"
                yield name if name in modules else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (item.name for item in node.names)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module → modules of the same package that it imports."""
    paths = {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path
        for path in root.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    return {
        name: {item for item in imports_of(path, modules) if item in modules and item != name}
        for name, path in modules.items()
    }


@pytest.mark.parametrize("root", ["router/text_generation_router", "shard/text_generation_shard"])
@pytest.mark.parametrize("depth", [2, 3, 9])
def test_nothing_imports_what_imports_it(root: str, depth: int) -> None:
    """Neither files nor folders, whatever is taken for one room: raises CycleError with the way."""
    graph = import_graph(ROOT / root)
    assert len(graph) > 50
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        room = ".".join(name.split(".")[:depth])
        found = {".".join(other.split(".")[:depth]) for other in others}
        rooms.setdefault(room, set()).update(found - {room})
    assert tuple(TopologicalSorter(rooms).static_order())


def test_no_dialect_imports_another() -> None:
    """What two of them need lies beside their folders. Only `platforms/` passes bodies on."""
    api = "text_generation_router.api."
    graph = import_graph(ROOT / "router/text_generation_router")
    folder = ROOT / "router" / api.replace(".", "/")
    dialects = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert dialects == {"tgi", "openai", "responses", "anthropic", "platforms"}
    found = {
        (name.removeprefix(api).partition(".")[0], other.removeprefix(api).partition(".")[0])
        for name, others in graph.items()
        for other in others
        if name.startswith(api) and other.startswith(api)
    }
    between = {(one, other) for one, other in found if other in dialects and one != other}
    assert between == {("platforms", "tgi"), ("platforms", "openai")}


def test_kernels_are_given_checked_addresses() -> None:
    """`tensor_address` checks the layout."""
    device = ROOT / "shard/text_generation_shard/device"
    found = {path.name for path in device.rglob("*.py") if ".data_ptr(" in path.read_text()}
    assert found == {"vector.py"}


@pytest.mark.parametrize(
    "folder",
    ["launcher", "router", "shard", "process", "benchmark", "benchmarks", "integration_tests"],
)
def test_calls_name_their_arguments(folder: str) -> None:
    """No literal tuple is unpacked into a call."""
    found = []
    paths = (ROOT / folder).rglob("*.py")
    for path in (one for one in paths if "/." not in str(one.relative_to(ROOT))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                unpacked = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
                if any(isinstance(value, ast.Tuple | ast.List) for value in unpacked):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_offline_imports_nothing_from_http() -> None:
    """`LLM` shares types of fields and chat messages with the routes, and no body of theirs."""
    package = "text_generation_router."
    graph = import_graph(ROOT / "router/text_generation_router")
    offline = {name: others for name, others in graph.items() if ".offline" in name}
    assert len(offline) > 5
    for name, others in offline.items():
        assert not any(other.startswith(f"{package}api") for other in others), name
    reached, found = [f"{package}offline.llm"], set[str]()
    while reached:
        found |= (new := graph[reached.pop()] - found)
        reached += new
    assert not {name for name in found if name.startswith(f"{package}api")}


def test_the_files_of_one_request_exist() -> None:
    """Those that the numbered steps of CONTRIBUTING name, in the router up to the fourth."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^(\d)\. ((?:.|\n   )*)", text.partition("## One request")[2], re.M)[:8]
    assert [number for number, _ in steps] == list("12345678")
    router, shard = ROOT / "router/text_generation_router", ROOT / "shard/text_generation_shard"
    process = ROOT / "process/text_generation_process"
    named = [
        process / name.removeprefix("process/")
        if name.startswith("process/")
        else (router if number in "12348" else shard) / name
        for number, step in steps
        for name in re.findall(r"`([\w/]+\.py)`", step)
    ]
    assert [path for path in named if not path.is_file()] == []
    assert 12 < len(named) <= 50
