import sys
from pathlib import Path

import pytest
from text_generation_launcher.config import (
    EMBEDDED_MODEL_PATH,
    LauncherConfig,
    console_script,
    create_config,
)
from text_generation_launcher.options import read_options
from text_generation_process.option import InvalidOptions, Mode


def create(*argv: str, mode: Mode = Mode.SERVE, **environment: str) -> LauncherConfig:
    return create_config(read_options(argv, environment, mode), environment, mode)


def arguments(argv: tuple[str, ...]) -> list[str]:
    """Without the interpreter and the program."""
    return list(argv[argv.index(next(a for a in argv if a in ("serve", "download-weights"))) :])


def test_the_embedded_model_needs_no_download():
    config = create()
    assert config.download is None
    assert config.model_path == EMBEDDED_MODEL_PATH
    assert "--model-id=pytgi/embedded" in config.router.argv


def test_the_commands_of_a_hub_model():
    config = create("--model-id", "a/b", "--revision", "v1", "--huggingface-hub-cache", "/c")
    assert config.model_path is None
    assert config.download is not None
    logging = ["--logger-level", "INFO", "--json-output"]
    hub = ["--huggingface-hub-cache=/c", "--revision=v1"]
    assert arguments(config.download.argv) == ["download-weights", "a/b", *hub, *logging]
    serve = ["serve", "{model_path}", "--uds-path={shard_uds_path}", "--rank=0", "--world-size=1"]
    assert arguments(config.shards[0].argv) == [*serve, *logging]
    assert list(config.router.argv[-11:]) == [
        "--master-shard-uds-path={shard_uds_path}-0",
        "--tokenizer-name={model_path}",
        "--model-id=a/b",
        "--revision=v1",
        "--hostname=0.0.0.0",
        "--port=3000",
        "--waiting-served-ratio=0.3",
        "--graceful-termination-timeout=90",
        *logging,
    ]


NO_CACHE, NO_CHUNKS = "--disable-prefix-caching", "--disable-prefill-chunking"


@pytest.mark.parametrize(
    "argv, environment, beginning, expected",
    [
        (["--rope-factor", "2"], {}, "--rope", ["--rope-scaling=linear", "--rope-factor=2"]),
        (["--rope-scaling=dynamic"], {}, "--rope", ["--rope-scaling=dynamic", "--rope-factor=1.0"]),
        ([], {}, "--rope", []),
        (["--max-input-length", "7"], {}, "--max-input", ["--max-input-tokens=7"]),
        ([], {"PREFIX_CACHING": "true", "PREFILL_CHUNKING": "1"}, "--disable-pre", []),
        ([], {"PREFIX_CACHING": "", "USE_PREFIX_CACHING": "True"}, "--disable-pre", []),
        ([], {"PREFIX_CACHING": "false"}, "--disable-pre", [NO_CACHE]),
        ([NO_CACHE], {"PREFIX_CACHING": "0"}, "--disable-pre", [NO_CACHE]),
        ([], {"USE_PREFIX_CACHING": "False"}, "--disable-pre", [NO_CACHE]),
        ([], {"PREFILL_CHUNKING": "0"}, "--disable-pre", [NO_CHUNKS]),
        (["--port", "3000"], {"AIP_HTTP_PORT": "8080"}, "--port", ["--port=8080"]),
        ([], {"REQUEST_TIMEOUT": "2.5"}, "--request", ["--request-timeout=2.5"]),
        ([], {"MAX_QUEUE_WAIT": "2.5"}, "--max-queue", ["--max-queue-wait=2.5"]),
        ([], {"LOG_LEVEL": "trace"}, "DEBUG", ["DEBUG", "DEBUG"]),
        ([], {"LOG_LEVEL": "WARN"}, "WARN", ["WARNING", "WARNING"]),
        ([], {"LOG_LEVEL": ""}, "INFO", ["INFO", "INFO"]),
    ],
)
def test_shard_and_router_get_these_arguments(argv, environment, beginning, expected):
    config = create(*argv, **environment)
    given = (*config.shards[0].argv, *config.router.argv)
    assert [argument for argument in given if argument.startswith(beginning)] == expected


@pytest.mark.parametrize(
    "argv, environment, expected",
    [
        (["--max-input-tokens", "5", "--max-input-length", "5"], {}, "are the same limit"),
        (["--max-input-tokens", "5", "--max-total-tokens", "5"], {}, "must be less than"),
        (["--max-input-length", "6", "--max-total-tokens", "5"], {}, "must be less than"),
        (["--max-total-tokens", "6", "--max-batch-total-tokens", "5"], {}, "must not be more than"),
        (["--port", "81", "--prometheus-port", "81"], {}, "are both 81"),
        (["--port", "81", "--master-port", "81"], {}, "--master-port and --port are both 81"),
        (["--sharded", "true", "--num-shard", "1"], {}, "contradict each other"),
        (["--sharded", "true", "--device", "cpu"], {}, "--sharded true needs --num-shard on a CPU"),
        (["--max-concurrent-requests-per-key", "1"], {}, "but there are no keys: add --api-key"),
        ([], {"MAX_TOKENS_PER_MINUTE_PER_KEY": "9"}, "but there are no keys: add --api-key"),
        (["--ssl-certfile", __file__], {}, "belong together: give both or neither"),
        (["--ssl-keyfile", __file__], {}, "belong together: give both or neither"),
        (
            ["--ssl-certfile", "/none", "--ssl-keyfile", __file__],
            {},
            "--ssl-certfile /none is not a file that can be read",
        ),
        (["--revision", "v1"], {}, "--revision is given without --model-id"),
        (["--model-id", "/nowhere"], {}, "--model-id /nowhere does not exist"),
        (["--model-id", "a/b/c"], {}, "--model-id a/b/c does not exist"),
        (["--model-id", __file__], {}, "is a file"),
        ([], {"PREFIX_CACHING": "maybe"}, "PREFIX_CACHING=maybe is neither on nor off"),
        ([], {"PREFILL_CHUNKING": "2"}, "PREFILL_CHUNKING=2 is neither on nor off"),
        ([], {"LOG_LEVEL": "loud"}, "LOG_LEVEL='loud' is not a level"),
    ],
)
def test_options_that_contradict_each_other(argv, environment, expected):
    with pytest.raises(InvalidOptions, match=expected) as caught:
        create(*argv, **environment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "environment, token",
    [
        ({}, None),
        ({"HF_TOKEN": "t"}, "t"),
        ({"HF_API_TOKEN": "a"}, "a"),
        ({"HF_API_TOKEN": "a", "HF_TOKEN": "t"}, "t"),
        ({"HF_API_TOKEN": "a", "HF_TOKEN": ""}, "a"),
    ],
)
def test_only_the_download_gets_the_token(environment, token):
    config = create("--model-id", "a/b", **environment, API_KEY="k", OMP_NUM_THREADS="1")
    assert config.download is not None
    assert config.download.environment.get("HF_TOKEN") == token
    for command in (config.download, *config.shards, config.router):
        assert command.environment["OMP_NUM_THREADS"] == "1"
        assert "HF_API_TOKEN" not in command.environment
        assert command.environment.get("API_KEY") == ("k" if command is config.router else None)
    assert "HF_TOKEN" not in config.shards[0].environment
    assert "HF_TOKEN" not in config.router.environment
    assert config.has_api_key


@pytest.mark.parametrize("given", [{}, {"GLIBC_TUNABLES": "glibc.malloc.check=3"}])
def test_the_shard_has_huge_pages_unless_told_otherwise(given):
    config = create("--model-id", "a/b", **given)
    wanted = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | given
    assert wanted.items() <= config.shards[0].environment.items()
    assert config.router.environment.get("GLIBC_TUNABLES") == given.get("GLIBC_TUNABLES")


@pytest.mark.parametrize(
    ("argv", "environment", "keys"),
    [
        (["--api-key", "k1", "--api-key=k2,k3"], {}, ["k1", "k2,k3"]),
        ([], {"API_KEY": "k1,k2"}, ["k1", "k2"]),
    ],
)
def test_keys_go_to_the_router_by_its_environment(argv, environment, keys):
    router = create(*argv, **environment).router
    assert router.environment["API_KEY"].split("\n") == keys
    assert not any("api-key" in part or key in part for part in router.argv for key in keys)


def test_programs_are_those_of_this_installation(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert console_script("some-program", "some.module") == (
        sys.executable,
        "-m",
        "some.module",
    )
    (tmp_path / "some-program").touch()
    assert console_script("some-program", "some.module") == (
        sys.executable,
        str(tmp_path / "some-program"),
    )


def test_a_batch_runs_in_the_place_of_the_router(tmp_path: Path):
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    source.touch()
    files = ["--input", str(source), "--output", str(target)]
    config = create(*files, "--max-batch-size", "9", "--max-input-length", "7", mode=Mode.BATCH)
    assert config.router is not None
    assert config.router.name == "the batch"
    assert config.router.draws
    for expected in (
        f"--input={source}",
        f"--output={target}",
        "--tokenizer-name={model_path}",
        "--max-batch-size=9",
        "--max-input-tokens=7",
    ):
        assert expected in config.router.argv
    assert not any(part.startswith(("--port", "--hostname")) for part in config.router.argv)


@pytest.mark.parametrize(
    "names, expected",
    [
        ({"input": "requests"}, "--output is missing"),
        ({"output": "results"}, "--input is missing"),
        ({"input": "nowhere", "output": "results"}, "--input .* is not a file"),
        ({"input": "requests", "output": "none/results"}, "does not exist: create it"),
        ({"input": "requests", "output": "folder"}, "is a directory"),
        ({"input": "requests", "output": "folder/../requests"}, "is the --input"),
    ],
)
def test_the_files_of_a_batch(names, expected, tmp_path: Path):
    (tmp_path / "requests").touch()
    (tmp_path / "folder").mkdir()
    argv = [part for name, path in names.items() for part in (f"--{name}", str(tmp_path / path))]
    with pytest.raises(InvalidOptions, match=expected):
        create(*argv, mode=Mode.BATCH)


def test_flags_without_effect_are_noted():
    config = create("--otlp-service-name", "mine", "--master-port", "1", ATTENTION="paged")
    noted = [note.split()[0] for note in config.notes]
    assert noted == ["--master-port", "--otlp-service-name", "ATTENTION=paged"]


def test_the_number_of_shards_and_where_they_meet():
    rendezvous = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": "29501"}
    config = create(NUM_SHARD="3", **rendezvous, STEP_DEADLINE="7.5")
    assert (config.master_addr, config.master_port, config.notes) == ("127.0.0.2", 29501, ())
    for rank, shard in enumerate(config.shards):
        assert (shard.name, shard.rank) == (f"shard {rank}", rank)
        expected = {f"--rank={rank}", "--world-size=3", "--step-deadline=7.5"}
        rendezvous_flags = {"--master-addr=127.0.0.2", "--master-port={master_port}"}
        assert expected | rendezvous_flags <= set(shard.argv)
    assert len(config.shards) == 3 and create().shards[0].rank is None
    assert len(create(SHARDED="true", CUDA_VISIBLE_DEVICES="0,1", DEVICE="cuda").shards) == 2
    assert len(create(SHARDED="0", CUDA_VISIBLE_DEVICES="0,1", DEVICE="cuda").shards) == 1
