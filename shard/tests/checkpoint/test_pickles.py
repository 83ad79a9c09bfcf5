"""Pickled checkpoints are converted to safetensors without running their code, or are refused."""

import json
import multiprocessing
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from text_generation_shard.checkpoint.download import resolve_model
from text_generation_shard.errors import ModelError

from integration_tests.hub import FakeHub, serving

WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.randn(5, 3).to(torch.bfloat16),
    "c.half": torch.randn(7).half(),
    "d.flags": torch.tensor([True, False, True]),
    "e.one": torch.tensor(7),
    "f.none": torch.zeros(0, 4),
    "g.turned": torch.arange(6.0).reshape(2, 3).T,
}
INDEX = "pytorch_model.bin.index.json"


class Evil:
    """Runs a command when it is unpickled without protection."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._trace}",)


def model_in(path: Path, **files: object) -> Path:
    """A directory of a model with these pickled files (`__` is a dot)."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    for name, content in files.items():
        torch.save(content, path / name.replace("__", "."))
    return path


def error_of(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(directory))
    assert "\n" not in str(caught.value)
    left = {path.name for path in directory.iterdir()}
    assert not any("safetensors" in name for name in left), left
    return str(caught.value)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def test_every_tensor_is_there_and_as_it_was(tmp_path: Path) -> None:
    directory = model_in(tmp_path / "m", pytorch_model__bin=WEIGHTS, training_args__bin=[1])
    assert resolve_model(str(directory)) == directory
    assert same(load_file(directory / "model.safetensors"), WEIGHTS)
    assert {path.name for path in directory.iterdir()} == {
        *("config.json", "tokenizer.json", "pytorch_model.bin", "training_args.bin"),
        "model.safetensors",
    }
    written = (directory / "model.safetensors").stat()
    resolve_model(str(directory))
    assert (directory / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns


@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_several_files_become_one(tmp_path: Path, suffix: str) -> None:
    names = [f"pytorch_model-0000{n}-of-00002.{suffix}" for n in (1, 2)]
    halves = [dict(list(WEIGHTS.items())[:3]), dict(list(WEIGHTS.items())[3:])]
    directory = model_in(tmp_path / "m")
    for name, half in zip(names, halves, strict=True):
        torch.save(OrderedDict(half), directory / name)
    resolve_model(str(directory))
    assert same(load_file(directory / "model.safetensors"), WEIGHTS)


def test_a_tensor_with_two_names_has_both(tmp_path: Path) -> None:
    shared = torch.nn.Parameter(torch.randn(100, 7))
    directory = model_in(tmp_path / "m", pytorch_model__bin={"a": shared, "b": shared})
    resolve_model(str(directory))
    assert same(load_file(directory / "model.safetensors"), {"a": shared.data, "b": shared.data})


@pytest.mark.parametrize("place", ["value", "first", "hook"])
def test_nothing_of_a_pickle_runs(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the environment sets torch to trust everything."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trace = tmp_path / "trace"
    content: Any = {"a": torch.ones(3), "b": Evil(trace)}
    if place == "first":
        content = Evil(trace)
    elif place == "hook":
        content = OrderedDict(a=torch.ones(3))
        content._metadata = Evil(trace)
    directory = model_in(tmp_path / "m", pytorch_model__bin=content)
    message = error_of(directory)
    assert "pytorch_model.bin is refused: it imports posix.system" in message
    assert "none of its code was run" in message
    assert not trace.exists()
    # It would have: the attack is a real one.
    torch.load(directory / "pytorch_model.bin", weights_only=False)
    assert trace.exists()


def enlarged() -> torch.Tensor:
    return torch.zeros(1).expand(10**7, 10**7)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([torch.ones(1)], "no table of tensors"),
        ({}, "no table of tensors"),
        ({"model": {"a": torch.ones(1)}}, "model is not a tensor"),
        ({3: torch.ones(1)}, "3 is not a tensor"),
        ({"a": torch.ones(4, 4).to_sparse()}, "a is of a kind"),
        ({"a": torch.ones(4, device="meta")}, "a is of a kind"),
        ({"a": enlarged()}, "take 400000000000000 bytes"),
        ({str(n): torch.zeros(10**6).view(-1) for n in range(2)}, None),
    ],
    ids=str,
)
def test_a_file_that_is_no_checkpoint_is_refused(
    tmp_path: Path, content: Any, expected: str | None
) -> None:
    directory = model_in(tmp_path / "m", pytorch_model__bin=content)
    if expected is None:
        resolve_model(str(directory))
    else:
        assert expected in error_of(directory)


@pytest.mark.parametrize("kind", ["text", "half", "empty", "old", "compressed"])
def test_files_that_torch_did_not_write(tmp_path: Path, kind: str) -> None:
    directory = model_in(tmp_path / "m", pytorch_model__bin=WEIGHTS)
    path = directory / "pytorch_model.bin"
    data = path.read_bytes()
    if kind == "old":
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    elif kind == "compressed":
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "new", "w") as target:
            for part in source.infolist():
                target.writestr(part.filename, source.read(part), zipfile.ZIP_DEFLATED)
        (tmp_path / "new").rename(path)
    else:
        path.write_bytes({"text": b"not wanted", "half": data[: len(data) // 2]}.get(kind, b""))
    assert "is not a checkpoint that can be converted" in error_of(directory)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    files = {"a__pt": {"x": torch.ones(1)}, "b__pt": {"x": torch.zeros(1)}}
    assert "holds x, and so does" in error_of(model_in(tmp_path / "m", **files))


def test_a_half_written_conversion_is_never_used(tmp_path: Path) -> None:
    """A killed process leaves a file that is not read and does not prevent the next conversion;
    nothing can be loaded from it."""
    directory = model_in(tmp_path / "m", pytorch_model__bin=WEIGHTS)
    (directory / "model.safetensors.partial").write_bytes(b"x" * 100_000)
    with pytest.raises(ModelError, match="is a pickle"):
        from text_generation_shard.checkpoint.weights import weight_files

        weight_files(directory)
    resolve_model(str(directory))
    assert same(load_file(directory / "model.safetensors"), WEIGHTS)
    assert not (directory / "model.safetensors.partial").exists()


def test_a_failure_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    directory = model_in(tmp_path / "m", pytorch_model__bin=WEIGHTS)
    assert "can not write" in error_of(directory)


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    directory = model_in(tmp_path / "m", pytorch_model__bin=WEIGHTS)
    (tmp_path / "precious").write_text("kept")
    (directory / "model.safetensors.partial").symlink_to(tmp_path / "precious")
    with pytest.raises(ModelError, match="can not write"):
        resolve_model(str(directory))
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.slow
def test_several_processes_convert_once(tmp_path: Path) -> None:
    directory = model_in(tmp_path / "m", pytorch_model__bin=WEIGHTS)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=resolve_model, args=(str(directory),)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert same(load_file(directory / "model.safetensors"), WEIGHTS)
    assert not (directory / "model.safetensors.partial").exists()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_pickled_model_of_the_hub(tmp_path: Path, is_sharded: bool) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = ["pytorch_model.bin"]
    if is_sharded:
        names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    items = list(WEIGHTS.items())
    parts = [dict(items[n :: len(names)]) for n in range(len(names))]
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "training_args.bin": b"no"}
    files |= {"another.bin": b"no"} if is_sharded else {}
    for name, part in zip(names, parts, strict=True):
        torch.save(part, source / name)
        files[name] = (source / name).read_bytes()
    if is_sharded:
        index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        files[INDEX] = json.dumps({"weight_map": index}).encode()
    with serving(FakeHub(files)) as hub:
        cache = tmp_path / "cache"
        snapshot = resolve_model("some/model", None, cache, hub.endpoint)
        assert same(load_file(snapshot / "model.safetensors"), WEIGHTS)
        assert hub.asked_for("training_args.bin") == []
        # Thrown away, they are not fetched again.
        for name in names:
            (snapshot / name).resolve().unlink()
            (snapshot / name).unlink()
        hub.requests.clear()
        assert resolve_model("some/model", None, cache, hub.endpoint) == snapshot
        assert not any(hub.asked_for(name) for name in names)
