"""All of TGI's environment variables, as `docker run -e` sets them: each has its effect."""

import pytest
from text_generation_launcher.config import LauncherConfig, create_config
from text_generation_launcher.options import notes, read_options
from text_generation_process.option import InvalidOptions

from launcher.tests.test_options import TGI_FLAGS

# Variable, value, and the argument of the router.
TRACES = [
    ("OTLP_ENDPOINT", "http://x:4317", "--otlp-endpoint=http://x:4317"),
    ("OTLP_ENDPOINT", "http://x", "--otlp-endpoint=http://x:80"),
    ("OTLP_SERVICE_NAME", "x", "--otlp-service-name=x"),
]
TO_ROUTER = [
    ("REVISION", "v1", "--revision=v1"),
    ("SPECULATE", "3", "--speculate=3"),
    ("VALIDATION_WORKERS", "4", "--validation-workers=4"),
    ("MAX_CONCURRENT_REQUESTS", "7", "--max-concurrent-requests=7"),
    ("MAX_BEST_OF", "3", "--max-best-of=3"),
    ("MAX_STOP_SEQUENCES", "5", "--max-stop-sequences=5"),
    ("MAX_TOP_N_TOKENS", "6", "--max-top-n-tokens=6"),
    ("MAX_INPUT_TOKENS", "100", "--max-input-tokens=100"),
    ("MAX_INPUT_LENGTH", "100", "--max-input-tokens=100"),
    ("MAX_TOTAL_TOKENS", "200", "--max-total-tokens=200"),
    ("WAITING_SERVED_RATIO", "1.5", "--waiting-served-ratio=1.5"),
    ("MAX_BATCH_PREFILL_TOKENS", "300", "--max-batch-prefill-tokens=300"),
    ("MAX_BATCH_TOTAL_TOKENS", "4000", "--max-batch-total-tokens=4000"),
    ("MAX_WAITING_TOKENS", "9", "--max-waiting-tokens=9"),
    ("MAX_BATCH_SIZE", "8", "--max-batch-size=8"),
    ("MAX_CLIENT_BATCH_SIZE", "2", "--max-client-batch-size=2"),
    ("PAYLOAD_LIMIT", "1000", "--payload-limit=1000"),
    ("HOSTNAME", "127.0.0.1", "--hostname=127.0.0.1"),
    ("PORT", "81", "--port=81"),
    ("PROMETHEUS_PORT", "9100", "--prometheus-port=9100"),
    ("CORS_ALLOW_ORIGIN", "https://a.b", "--cors-allow-origin=https://a.b"),
    ("TOKENIZER_CONFIG_PATH", "/t.json", "--tokenizer-config-path=/t.json"),
    ("DISABLE_GRAMMAR_SUPPORT", "true", "--disable-grammar-support"),
    ("GRACEFUL_TERMINATION_TIMEOUT", "30", "--graceful-termination-timeout=30"),
    *TRACES,
]
TO_SHARD = [
    ("DTYPE", "bfloat16", "--dtype=bfloat16"),
    ("QUANTIZE", "int8", "--quantize=int8"),
    ("KV_CACHE_DTYPE", "fp8_e5m2", "--kv-cache-dtype=fp8_e5m2"),
    ("ROPE_SCALING", "linear", "--rope-scaling=linear"),
    ("ROPE_FACTOR", "2.0", "--rope-factor=2.0"),
    ("CUDA_MEMORY_FRACTION", "0.5", "--cuda-memory-fraction=0.5"),
    ("CUDA_GRAPHS", "1,2, 8", "--cuda-graphs=1,2,8"),
    ("CUDA_GRAPHS", "0", "--cuda-graphs=0"),
    ("WATERMARK_GAMMA", "0.4", "--watermark-gamma=0.4"),
    ("WATERMARK_DELTA", "1.5", "--watermark-delta=1.5"),
    ("SHARD_UDS_PATH", "/tmp/x", "--uds-path=/tmp/x"),
    *TRACES,
]
TO_DOWNLOAD = [
    ("MODEL_ID", "a/b", "a/b"),
    ("REVISION", "v1", "--revision=v1"),
    ("HUGGINGFACE_HUB_CACHE", "/data", "--huggingface-hub-cache=/data"),
]
REFUSED = [
    ("QUANTIZE", "awq"),
    ("WEIGHTS_CACHE_OVERRIDE", "/w"),
    ("LORA_ADAPTERS", "a/b"),
    ("NGROK", "true"),
    ("NGROK_AUTHTOKEN", "x"),
    ("NGROK_EDGE", "x"),
]
WITHOUT_EFFECT = [
    ("DISABLE_CUSTOM_KERNELS", "true"),
    ("ENABLE_PREFILL_LOGPROBS", "true"),
    ("TRUST_REMOTE_CODE", "true"),
    ("USAGE_STATS", "on"),
]
# Each has a test below, except `--env`, which is not a variable in TGI either.
OTHERS = {"API_KEY", "JSON_OUTPUT", "ENV", "NUM_SHARD", "SHARDED", "MASTER_ADDR", "MASTER_PORT"}


def create(**environment: str) -> LauncherConfig:
    """With a model from the hub, as in a container."""
    environment = {"MODEL_ID": "some/model", **environment}
    return create_config(read_options([], environment), environment)


def test_the_tables_hold_every_variable_of_tgi() -> None:
    tables = (TO_ROUTER, TO_SHARD, TO_DOWNLOAD, REFUSED, WITHOUT_EFFECT)
    named = {row[0] for table in tables for row in table}
    assert named | OTHERS == {flag.upper().replace("-", "_") for flag in TGI_FLAGS}


@pytest.mark.parametrize(("variable", "value", "argument"), TO_ROUTER)
def test_the_router_gets_it(variable: str, value: str, argument: str) -> None:
    router = create(**{variable: value}).router
    assert router is not None
    assert argument in router.argv


@pytest.mark.parametrize(("variable", "value", "argument"), TO_SHARD)
def test_the_shard_gets_it(variable: str, value: str, argument: str) -> None:
    assert argument in create(**{variable: value}).shards[0].argv


@pytest.mark.parametrize(("variable", "value", "argument"), TO_DOWNLOAD)
def test_the_download_gets_it(variable: str, value: str, argument: str) -> None:
    download = create(**{variable: value}).download
    assert download is not None
    assert argument in download.argv


@pytest.mark.parametrize(("variable", "value"), REFUSED)
def test_a_refusal_names_the_flag(variable: str, value: str) -> None:
    with pytest.raises(InvalidOptions, match=f"--{variable.lower().replace('_', '-')} "):
        create(**{variable: value})


@pytest.mark.parametrize(("variable", "value"), WITHOUT_EFFECT)
def test_a_note_names_the_flag_without_effect(variable: str, value: str) -> None:
    said = notes(read_options([], {variable: value}))
    assert [note.split()[0] for note in said] == [f"--{variable.lower().replace('_', '-')}"]


@pytest.mark.parametrize("name", ["paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"])
def test_a_kernel_of_tgi_is_named_and_not_refused(name: str) -> None:
    assert [note.split()[0] for note in create(ATTENTION=name).notes] == [f"ATTENTION={name}"]


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"])
def test_what_children_read_themselves_is_inherited(variable: str) -> None:
    config = create(**{variable: "1"})
    assert config.router is not None and config.download is not None
    for command in (config.download, config.router, *config.shards):
        assert command.environment[variable] == "1"


def test_the_number_of_shards_and_where_they_meet() -> None:
    meeting = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": "29501"}
    config = create(NUM_SHARD="3", **meeting, STEP_DEADLINE="7.5")
    assert (config.master_addr, config.master_port, config.notes) == ("127.0.0.2", 29501, ())
    for rank, shard in enumerate(config.shards):
        expected = {f"--rank={rank}", "--world-size=3", "--step-deadline=7.5"}
        assert expected | {"--master-addr=127.0.0.2"} <= set(shard.argv)
    assert len(config.shards) == 3
    assert len(create(SHARDED="true", CUDA_VISIBLE_DEVICES="0,1", DEVICE="cuda").shards) == 2
    assert len(create(SHARDED="0", CUDA_VISIBLE_DEVICES="0,1", DEVICE="cuda").shards) == 1
    alone = create(**meeting, STEP_DEADLINE="7.5")
    assert [note.split()[0] for note in alone.notes] == [
        "--master-addr",
        "--master-port",
    ]


@pytest.mark.parametrize("name", ["REQUEST_TIMEOUT", "MAX_QUEUE_WAIT"])
def test_how_long_a_request_may_take(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    router = create(**{name: "2.5"}).router
    assert router is not None
    assert f"--{name.lower().replace('_', '-')}=2.5" in router.argv
    for bad in ("0", "-1", "nan", "inf", "long"):
        with pytest.raises(SystemExit):
            create(**{name: bad})
        assert f"{name}: expected a number above 0, got '{bad}'" in capsys.readouterr().err
