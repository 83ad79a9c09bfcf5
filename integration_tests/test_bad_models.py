"""A model or an address that can not be served: one clear line, exit code 1, no traceback."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, has_ended

Change = Callable[[Path], object]


def edit_json(path: Path, **fields: object) -> None:
    """Sets fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of model.safetensors (`__` is a dot); None removes one."""
    path = directory / "model.safetensors"
    changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    assert set(changes) <= set(load_file(path)) | {"model.surprise.weight"}
    merged = load_file(path) | changes
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def truncate(path: Path) -> None:
    """Cuts a file in half, like a copy that was interrupted."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def index_a_missing_file(directory: Path) -> None:
    """An index whose second file is missing."""
    names = list(load_file(directory / "model.safetensors"))
    files = {name: "model-00001-of-00002.safetensors" for name in names}
    files[names[-1]] = "model-00002-of-00002.safetensors"
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


BROKEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ("safetensors",)),
    "half a weights file": (lambda d: truncate(d / "model.safetensors"), ("model.safetensors",)),
    "garbage weights": (
        lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 1000),
        ("model.safetensors",),
    ),
    "a file of the index is missing": (index_a_missing_file, ("model-00002-of-00002",)),
    "a weight is missing": (
        lambda d: edit_weights(d, model__norm__weight=None),
        ("model.norm.weight",),
    ),
    "an unknown weight": (
        lambda d: edit_weights(d, model__surprise__weight=torch.ones(3)),
        ("model.surprise.weight",),
    ),
    "a weight of another shape": (
        lambda d: edit_weights(d, model__norm__weight=torch.ones(63)),
        ("model.norm.weight", "63", "64"),
    ),
    "no config": (lambda d: (d / "config.json").unlink(), ("config.json",)),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), ("config.json",)),
    "no model_type": (
        lambda d: edit_json(d / "config.json", model_type=None),
        ("config.json", "model_type"),
    ),
    "unsupported architecture": (
        lambda d: edit_json(
            d / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"]
        ),
        ("transformers", "no decoder", "t5"),
    ),
    "quantized, in one word": (
        lambda d: edit_json(d / "config.json", quantization_config="awq"),
        ("config.json", "quantization_config", "awq"),
    ),
    "a rope without its factor": (
        lambda d: edit_json(d / "config.json", rope_scaling={"type": "dynamic", "alpha": 1000}),
        ("config.json", "rope_scaling", "factor"),
    ),
    "a field of another type": (
        lambda d: edit_json(d / "config.json", hidden_size="64"),
        ("config.json", "hidden_size", '"64"'),
    ),
    "an end token of another type": (
        lambda d: edit_json(d / "generation_config.json", eos_token_id="</s>"),
        ("generation_config.json", "eos_token_id", "</s>"),
    ),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "broken tokenizer": (lambda d: truncate(d / "tokenizer.json"), ("tokenizer.json",)),
}


def assert_refused(handle: LauncherHandle, *fragments: str) -> None:
    """The launcher ends by itself with code 1 and exactly one ERROR line, which says these."""
    family = handle.family()
    assert handle.wait_for_exit() == 1
    log = handle.log
    errors = [line for line in log.splitlines() if " ERROR " in line]
    assert len(errors) == 1, log
    assert log.splitlines()[-1] == errors[0], log
    assert "Traceback" not in log, log
    for fragment in fragments:
        assert fragment in errors[0], log
    assert all(map(has_ended, family))


# One of each file, and of each process that reads them: the shard's own tests have the others.
USUAL = (
    *("half a weights file", "a file of the index is missing", "no config", "no tokenizer"),
    *("unsupported architecture", "an end token of another type", "broken tokenizer"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.nightly) for name in BROKEN],
)
def test_broken_checkpoint(
    name: str, launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    change, fragments = BROKEN[name]
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_path, directory)
    change(directory)
    assert_refused(launch(directory), *fragments)


def test_model_is_nowhere(launch: Launch, tmp_path: Path) -> None:
    assert_refused(launch(tmp_path / "nothing"), str(tmp_path / "nothing"))


def test_port_in_use(launch: Launch, tiny_model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert_refused(launch(tiny_model_path, "--port", port), port, "in use")


def test_socket_path_too_long(launch: Launch, tiny_model_path: Path) -> None:
    path = "/tmp/" + "x" * 120
    assert_refused(launch(tiny_model_path, "--shard-uds-path", path), path, "107")


def test_limits_that_contradict_each_other(launch: Launch, tiny_model_path: Path) -> None:
    flags = ("--max-input-tokens", "200", "--max-total-tokens", "100")
    assert_refused(launch(tiny_model_path, *flags), "200", "100")


def test_more_tokens_than_memory_holds(launch: Launch, tiny_model_path: Path) -> None:
    flags = ("--max-total-tokens", "4000000000")
    assert_refused(launch(tiny_model_path, *flags), "Not enough memory", "4000000000")


def test_flag_that_is_not_supported(launch: Launch, tiny_model_path: Path) -> None:
    assert_refused(launch(tiny_model_path, "--quantize", "gptq"), "--quantize", "not supported")
