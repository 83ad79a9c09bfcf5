"""Runs what needs a GPU, in the virtual environment or on a bare machine without one.

    python3 integration_tests/on_gpu.py wheels          with a package index: fills .whl/
    python3 integration_tests/on_gpu.py test [ARGS]     pytest -m gpu
    python3 integration_tests/on_gpu.py bench [ARGS]    benchmarks/gpu.py

Where .whl/ has wheels they are installed into a temporary folder, and the python3 that runs this
file, which must have torch and triton, runs the checkout. Where it has none, .venv does. A report
is written to $OUT, or to benchmarks/results: what ran, on which GPU, at which commit. Standard
library only; Python 3.11 or newer.
"""

import argparse
import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".whl"
MOST_BYTES = 40 * 2**20
# What a machine with torch, triton, numba, tokenizers and transformers lacks.
CARRIED = (
    *("annotated-doc", "annotated-types", "attrs", "fastapi", "fastapi-offline", "grpcio"),
    *("grpcio-reflection", "httptools", "hypothesis", "jsonschema", "jsonschema-specifications"),
    *("llguidance", "opentelemetry-api", "orjson", "protobuf", "psutil", "pydantic"),
    *("googleapis-common-protos", "opentelemetry-exporter-otlp-common", "opentelemetry-proto"),
    *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-proto-grpc"),
    *("opentelemetry-sdk", "opentelemetry-semantic-conventions"),
    *("pydantic-core", "pytest", "pytest-asyncio", "referencing", "rpds-py", "sortedcontainers"),
    *("sse-starlette", "starlette", "typing-inspection", "uvicorn"),
)
# What the machine itself must have: pip installs the wheels.
NEEDED = ("pip", "torch", "triton", "transformers", "numba")
PACKAGES = ("proto", "launcher", "router", "shard", "process", "benchmark")
# What pytest may find installed there, and must not use.
PLUGINS = ("cacheprovider", "benchmark", "xdist", "cov", "timeout", "pytest_mock", "anyio")


def main() -> None:
    """Does what the command line asks for and ends with the status of what it ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("wheels", "test", "bench"))
    parser.add_argument("--python", default="3.12", help="whose wheels are fetched")
    options, others = parser.parse_known_args()
    if options.action == "wheels":
        sys.exit(fetch_wheels(options.python))
    python, environment = prepared()
    if options.action == "bench":
        command = [python, str(ROOT / "benchmarks" / "gpu.py"), *others]
        sys.exit(subprocess.run(command, env=environment).returncode)
    folder = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    sys.exit(run_tests(python, environment, others, folder / f"gpu-test-{day}.json"))


def fetch_wheels(python: str) -> int:
    """Fill .whl/ with the versions that this Python has, for another one on Linux and x86-64."""
    WHEELS.mkdir(exist_ok=True)
    for wheel in WHEELS.glob("*.whl"):
        wheel.unlink()
    kinds = ("2014", "1", *(f"_2_{number}" for number in range(17, 40)))
    platforms = [f"--platform=manylinux{kind}_x86_64" for kind in kinds]
    wanted = [f"{name}=={version(name)}" for name in CARRIED]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(WHEELS)]
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    status = subprocess.run([*pip, *target, *platforms, *wanted]).returncode
    nbytes = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    print(f"{len(list(WHEELS.glob('*.whl')))} wheels, {nbytes / 2**20:.1f} MiB in {WHEELS}")
    if nbytes > MOST_BYTES:
        print(f"They may take {MOST_BYTES >> 20} MiB: carry less.", file=sys.stderr)
        return 1
    return status


def prepared() -> tuple[str, Mapping[str, str]]:
    """The Python that runs the checkout, and its environment."""
    wheels = sorted(WHEELS.glob("*.whl"))
    if not wheels:
        own_python = ROOT / ".venv" / "bin" / "python"
        if not own_python.exists():
            sys.exit(f"{WHEELS} has no wheels (make gpu-wheels), and there is no .venv")
        return str(own_python), os.environ
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        lacks = ", ".join(absent)
        sys.exit(f"{sys.executable} lacks {lacks}: run this by a Python that has it")
    site = Path(tempfile.mkdtemp(prefix="pytgi-site-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    where = ["--no-compile", "--no-cache-dir", "--target", str(site)]
    if subprocess.run([*pip, *where, *map(str, wheels)]).returncode:
        number = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"{WHEELS} does not suit this Python: make gpu-wheels ARGS='--python {number}'")
    # The server asks what its own version is.
    info = site / "pytgi-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pytgi\nVersion: 0.1.0\n")
    paths = [*(str(ROOT / name) for name in PACKAGES), str(site)]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(site / "triton"),
        "NUMBA_CACHE_DIR": str(site / "numba"),
    }
    return sys.executable, {**os.environ, **own}


def run_tests(
    python: str, environment: Mapping[str, str], arguments: Sequence[str], output: Path
) -> int:
    """pytest's status; its counts go into the report."""
    without = [argument for name in PLUGINS for argument in ("-p", f"no:{name}")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", *without, "-m", "gpu", f"--junitxml={report}"]
        status = subprocess.run([*command, *arguments], cwd=ROOT, env=environment).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    said = machine(python, environment)
    if suite is not None:
        said["tests"] = {
            name: float(suite.get(name, 0))
            for name in ("tests", "failures", "errors", "skipped", "time")
        }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"status": status, **said}, indent=2) + "\n")
    print(f"written to {output}")
    if said["gpu"] == "none":
        print("torch finds no CUDA device here: tests that need one fail", file=sys.stderr)
    return status


def machine(python: str, environment: Mapping[str, str]) -> dict[str, object]:
    """The GPU, its driver, torch, triton and the commit."""
    code = (
        "import json, torch, triton; there = torch.cuda.is_available(); print(json.dumps({"
        "'gpu': torch.cuda.get_device_name() if there else 'none',"
        "'torch': torch.__version__, 'triton': triton.__version__}))"
    )
    said: dict[str, object] = {"when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True)
    said |= json.loads(done.stdout) if done.returncode == 0 else {"gpu": done.stderr[-300:]}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said["driver"] = _answer(query)
    said["commit"] = _answer(["git", "rev-parse", "--short", "HEAD"])
    return said


def _answer(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
