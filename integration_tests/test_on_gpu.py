"""What runs the GPU tests on a bare machine, where there is no GPU."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from integration_tests import on_gpu

OLDEST = (3, 11)


def write_wheel(folder: Path, tag: str) -> None:
    """A package with one module, for the Pythons of this tag."""
    info = "made_up-1.0.dist-info"
    files = {
        "made_up.py": "ANSWER = 42\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record))
    with zipfile.ZipFile(folder / f"made_up-1.0-{tag}.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of .whl/, and is empty."""
    monkeypatch.setattr(on_gpu, "WHEELS", tmp_path)
    return tmp_path


def test_it_needs_no_package() -> None:
    """And no Python newer than the oldest one."""
    source = Path(on_gpu.__file__).read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(source, feature_version=OLDEST)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert "json" in imported
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_wheels_and_the_checkout_can_be_imported(wheels: Path) -> None:
    write_wheel(wheels, "py3-none-any")
    python, environment = on_gpu.prepared()
    code = (
        "import made_up, importlib.metadata, text_generation_shard as shard\n"
        "print(made_up.ANSWER, importlib.metadata.version('pytgi'), shard.__file__)"
    )
    command = [python, "-c", code]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    answer, version, place = done.stdout.split()
    assert (answer, version) == ("42", "0.1.0")
    assert Path(place).is_relative_to(on_gpu.ROOT)
    site = environment["PYTHONPATH"].split(os.pathsep)[-1]
    assert environment["TRITON_CACHE_DIR"].startswith(site)


def test_wheels_for_another_python(wheels: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_wheel(wheels, "cp310-cp310-manylinux2014_x86_64")
    with pytest.raises(SystemExit) as ended:
        on_gpu.prepared()
    number = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert str(ended.value).endswith(f"make gpu-wheels ARGS='--python {number}'")
    assert "not a supported wheel on this platform" in capfd.readouterr().err


def test_a_python_that_lacks_something(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(wheels, "py3-none-any")
    monkeypatch.setattr(on_gpu, "NEEDED", ("pip", "torch_of_nobody", "triton_of_nobody"))
    with pytest.raises(SystemExit) as ended:
        on_gpu.prepared()
    assert str(ended.value).startswith(f"{sys.executable} lacks torch_of_nobody, triton_of_nobody:")


def test_neither_wheels_nor_an_environment(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        on_gpu.prepared()
    assert str(ended.value) == f"{wheels} has no wheels (make gpu-wheels), and there is no .venv"


def test_the_report(tmp_path: Path) -> None:
    """Status and counts of the tests, and what they ran on."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_made_up.py").write_text(
        "import pytest\n"
        "def test_left_out(): assert False\n"
        "@pytest.mark.gpu\n"
        "def test_passes(): pass\n"
        "@pytest.mark.gpu\n"
        "def test_fails(): assert False\n"
    )
    output = tmp_path / "results" / "report.json"
    status = on_gpu.run_tests(sys.executable, os.environ, [str(tmp_path)], output)
    report = json.loads(output.read_text())
    assert status == report["status"] == 1
    counts = report["tests"]
    assert (counts["tests"], counts["failures"], counts["errors"]) == (2, 1, 0)
    assert {"gpu", "torch", "triton", "driver", "commit", "when"} <= report.keys()


def test_what_pytest_could_not_start_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_gpu, "machine", lambda *_: {"gpu": "none"})
    output = tmp_path / "report.json"
    nowhere = str(tmp_path / "test_nowhere.py")
    assert on_gpu.run_tests(sys.executable, os.environ, [nowhere], output) == 4
    report = json.loads(output.read_text())
    assert (report["status"], report["gpu"]) == (4, "none")
    assert "torch finds no CUDA device here" in capfd.readouterr().err
