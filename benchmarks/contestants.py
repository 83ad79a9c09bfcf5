"""The servers of the comparison, by the names that --servers accepts."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import peers
from loads import LOADS
from servers import FOLDER, Server, ours


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
        peers.llama_cpp(name, quantization),
        peers.make_gguf(quantization),
        peers.llama_cpp_versions,
        loads=loads or tuple(LOADS),
    )


_vllm_versions = partial(peers.installed_versions, "vllm", "vllm", "torch", "transformers")
_transformers_versions = partial(
    peers.installed_versions, "transformers", "transformers", "torch", "accelerate"
)

CONTESTANTS = {
    "pytgi": _ours(name="pytgi"),
    "vllm": Contestant(peers.vllm_as_it_starts, peers.install_vllm, _vllm_versions),
    "vllm-all-cores": Contestant(peers.vllm_all_cores, peers.install_vllm, _vllm_versions),
    "llama.cpp": _llama_cpp("llama.cpp", "BF16"),
    "transformers": Contestant(
        peers.transformers_serve, peers.install_transformers, _transformers_versions
    ),
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
