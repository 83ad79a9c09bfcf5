"""The output of `--env`: what a bug report needs."""

import os
import platform
import subprocess
import sys
from importlib import metadata

PACKAGES = (
    "pytgi",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "grpcio",
    "protobuf",
    "fastapi",
    "uvicorn",
    "pydantic",
)


def describe_environment() -> str:
    """Several lines: Python, system, package versions, NVIDIA GPUs."""
    lines = [
        "Runtime environment:",
        f"Python: {sys.version.split()[0]} ({sys.executable})",
        f"Platform: {platform.platform()}, {os.cpu_count()} cores",
        *(f"{name}: {_version(name)}" for name in PACKAGES),
        f"nvidia-smi: {_nvidia_smi()}",
    ]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _nvidia_smi() -> str:
    try:
        result = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=10, check=False
        )
    except FileNotFoundError:
        return "not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return "\n" + (result.stdout or result.stderr).strip()
