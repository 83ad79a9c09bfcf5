import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_generation_shard.checkpoint import download
from text_generation_shard.checkpoint.download import resolve_model
from text_generation_shard.errors import ModelError

from integration_tests.hub import COMMIT, FakeHub, serving

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "README.md": b"# a model",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(FakeHub(dict(MODEL))) as fake:
        yield fake


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="text_generation_shard.checkpoint.download")
    return caplog


def fetch(hub: FakeHub, cache: Path, revision: str | None = None) -> Path:
    return resolve_model("some/model", revision, cache, hub.endpoint)


def error_of(hub: FakeHub, cache: Path, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        fetch(hub, cache, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def local_model(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_bytes(b"{}")
    return path


# --- a local directory


def test_a_local_directory_needs_neither_torch_nor_the_hub(tmp_path):
    model = local_model(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    script = (
        "import sys; from text_generation_shard.checkpoint.download import resolve_model\n"
        f"resolve_model({str(model)!r})\n"
        "print([m for m in ('torch', 'huggingface_hub', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "names, index, expected",
    [
        (["model.safetensors"], None, "has no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], None, "it is a LoRA adapter"),
        (["config.json"], None, "holds no weights at all"),
        (["config.json", "model.gguf"], None, "holds only model.gguf"),
        (["config.json", "model.safetensors"], None, "has no tokenizer"),
        (["config.json", "a.safetensors"], {"weight_map": {"x": "b.safetensors"}}, "b.safetensors"),
        (["config.json", "a.safetensors"], {"weights": {}}, "is not an index of weights"),
        (["config.json", "a.safetensors"], [], "is not an index of weights"),
    ],
)
def test_an_incomplete_local_directory(tmp_path, names, index, expected):
    model = local_model(tmp_path / "m", *names)
    if index is not None:
        (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=expected):
        resolve_model(str(model))


@pytest.mark.parametrize("model_id", ["a/b/c", "../nowhere", "", "some model", "/nowhere"])
def test_a_name_that_is_neither_a_directory_nor_a_hub_id(model_id):
    with pytest.raises(ModelError, match="neither a directory here nor a hub id"):
        resolve_model(model_id)


# --- a slow tokenizer


def test_a_slow_tokenizer_is_converted(tmp_path, log):
    model = local_model(tmp_path / "m", "model.safetensors")
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (model / "vocab.json").write_text('{"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}')
    (model / "merges.txt").write_text("#version: 0.2\na b\n")
    before = {path.name for path in model.iterdir()}
    resolve_model(str(model))
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary["ab"] == 3
    assert {path.name for path in model.iterdir()} - before == {"tokenizer.json"}
    assert "converting vocab.json to tokenizer.json" in log.messages


def test_a_slow_tokenizer_that_cannot_be_converted(tmp_path):
    model = local_model(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.model")
    with pytest.raises(ModelError, match=r"tokenizer\.model can't be converted") as caught:
        resolve_model(str(model))
    assert "\n" not in str(caught.value)
    assert not (model / "tokenizer.json").exists()


# --- the hub


def test_downloads_what_is_needed_and_nothing_else(hub, tmp_path, log):
    snapshot = fetch(hub, tmp_path)
    assert sorted(path.name for path in snapshot.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert log.messages == [
        "downloading model.safetensors: 0.0 of 1.0 MB",
        f"downloaded some/model to {snapshot}",
    ]


def test_the_second_time_it_is_found(hub, tmp_path, log):
    first = fetch(hub, tmp_path)
    hub.requests.clear()
    assert fetch(hub, tmp_path) == first
    assert log.messages[-1] == f"found in the hub cache: {first}"
    assert [path for _, path, _ in hub.requests] == ["/api/models/some/model/revision/main"]
    hub.requests.clear()
    assert fetch(hub, tmp_path, COMMIT) == first
    assert hub.requests == [], "a commit never changes"


def test_a_cached_model_is_served_while_the_hub_is_down(hub, tmp_path, log):
    first = fetch(hub, tmp_path)
    hub.refusal = (503, "")
    assert fetch(hub, tmp_path) == first
    assert log.messages[-2:] == [
        "the hub answered with status 503 for some/model: try again later",
        f"found in the hub cache: {first}",
    ]


def test_an_interrupted_snapshot_is_completed(hub, tmp_path):
    snapshot = fetch(hub, tmp_path)
    (snapshot / "model.safetensors").unlink()
    (tmp_path / "models--some--model" / "blobs" / hub.etag("model.safetensors")).unlink()
    assert fetch(hub, tmp_path) == snapshot
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_sharded_weights_are_those_of_the_index(hub, tmp_path):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    del hub.files["model.safetensors"]
    hub.files |= {name: WEIGHTS[: 1000 * n] for n, name in enumerate(names, 1)}
    hub.files["consolidated.safetensors"] = WEIGHTS
    hub.files[INDEX] = json.dumps({"weight_map": dict(zip("ab", names, strict=True))}).encode()
    snapshot = fetch(hub, tmp_path)
    assert {path.name for path in snapshot.glob("*.safetensors")} == set(names)
    assert hub.asked_for("consolidated.safetensors") == []


def test_progress(hub, tmp_path, log, monkeypatch):
    monkeypatch.setattr(download, "PROGRESS_S", 0.05)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.chunk_delay_s = 0.02
    fetch(hub, tmp_path)
    said = [m for m in log.messages if m.startswith("downloading model.safetensors: ")]
    assert len(set(said)) > 2
    assert all(m.endswith(" of 1.0 MB") for m in said)


# --- what can go wrong with the hub


@pytest.mark.parametrize(
    "status, code, expected",
    [
        (401, "RepoNotFound", "the hub has no model some/model, or it is private"),
        (404, "RepoNotFound", "the hub has no model some/model, or it is private"),
        (403, "GatedRepo", "some/model is gated: accept its conditions"),
        (401, "GatedRepo", "some/model is gated: accept its conditions"),
        (403, "", "the hub refused the access to some/model (status 403)"),
        (500, "", "the hub answered with status 500"),
    ],
)
def test_a_refusal_of_the_hub(hub, tmp_path, status, code, expected):
    hub.refusal = (status, code)
    assert expected in error_of(hub, tmp_path)


def test_a_revision_that_does_not_exist(hub, tmp_path):
    assert "some/model has no revision v9" in error_of(hub, tmp_path, "v9")


def test_offline(hub, tmp_path):
    script = (
        "import logging; logging.basicConfig(level='INFO', format='%(message)s')\n"
        "from pathlib import Path; from text_generation_shard.checkpoint.download import *\n"
        f"try: resolve_model('some/model', None, Path({str(tmp_path)!r}), {hub.endpoint!r})\n"
        "except ModelError as error: print(error)"
    )

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ).stdout

    assert "HF_HUB_OFFLINE forbids to download it" in run()
    assert hub.requests == []
    snapshot = fetch(hub, tmp_path)
    hub.requests.clear()
    assert run() == f"found in the hub cache: {snapshot}\n"
    assert hub.requests == []


def test_a_disk_that_is_too_small_is_noticed_first(hub, tmp_path, monkeypatch):
    usage = download.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    assert "needs another 1.0 MB and the disk of" in error_of(hub, tmp_path)
    assert hub.asked_for("model.safetensors") == []


def test_files_that_arrived_before_a_failure_are_kept(hub, tmp_path, monkeypatch):
    usage = download.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    error_of(hub, tmp_path)
    monkeypatch.undo()
    hub.requests.clear()
    left_by_another = tmp_path / "models--some--model" / "blobs" / "x.1234.incomplete"
    left_by_another.write_bytes(b"x")
    os.utime(left_by_another, (0, 0))
    assert (fetch(hub, tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.asked_for("config.json") == []
    assert not left_by_another.exists()


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in error_of(hub, tmp_path / "file")


@pytest.fixture
def is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be written, as far as the permissions say."""
    monkeypatch.setattr(download.os, "access", lambda path, mode: False)


@pytest.mark.usefixtures("is_read_only")
def test_a_cache_that_may_not_be_written(hub, tmp_path, monkeypatch, log):
    monkeypatch.setattr(download.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "data").mkdir()
    snapshot = fetch(hub, tmp_path / "data")
    assert snapshot.is_relative_to(tmp_path / "tmp" / f"huggingface-{os.getuid()}")
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert f"may not write to {tmp_path / 'data'}: some/model is kept in" in log.text
    assert list((tmp_path / "data").iterdir()) == []
    hub.requests.clear()
    assert fetch(hub, tmp_path / "data") == snapshot
    assert hub.asked_for("model.safetensors") == []
