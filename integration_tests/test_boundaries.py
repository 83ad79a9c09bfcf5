"""What each package may pull into its process (ARCHITECTURE, section 4), found by importing it."""

import json
import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
package = importlib.import_module(sys.argv[1])
paths = getattr(package, "__path__", [])
for module in pkgutil.walk_packages(paths, package.__name__ + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


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
            {"torch", "transformers", "text_generation_shard", "text_generation_launcher"},
        ),
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
        ("text_generation_shard.layers", ("models.llama", "engine", "service")),
        (
            "text_generation_shard.device",
            ("layers.attention", "models.llama", "engine"),
        ),
    ],
)
def test_imports_go_down(package: str, above: tuple[str, ...]) -> None:
    top = package.partition(".")[0]
    assert imported_by(package) & {f"{top}.{name}" for name in above} == set()
