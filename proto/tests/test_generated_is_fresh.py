"""The committed protobuf code is what generate.proto makes (`make proto`)."""

import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parent.parent
PACKAGE = Path("text_generation_proto/v1")


@pytest.mark.parametrize("name", ["generate_pb2.py", "generate_pb2.pyi", "generate_pb2_grpc.py"])
def test_committed_code_is_fresh(name: str, tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    source = str(PROTO / PACKAGE / "generate.proto")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO), *outputs, source]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / PACKAGE / name).read_text() == (PROTO / PACKAGE / name).read_text()
