"""The options of an `LLM`, and its services in a thread of their own."""

import asyncio
import errno
from pathlib import Path

import pytest
from text_generation_launcher.options import read_options
from text_generation_process.option import Mode
from text_generation_router.config import RouterConfig
from text_generation_router.offline import llm
from text_generation_router.offline.llm import router_config, sort_options
from text_generation_router.offline.shards_process import ShardsAddress

CONFIG = RouterConfig(tokenizer_name="unused")
ADDRESS = ShardsAddress("a/b", "/models/b", "/tmp/s-0")


@pytest.mark.parametrize(
    "model, given, flags",
    [
        (None, {}, []),
        ("a/b", {"dtype": "bfloat16", "device": None}, ["--model-id=a/b", "--dtype=bfloat16"]),
        (Path("/x"), {"deterministic": True}, ["--model-id=/x", "--deterministic"]),
        (None, {"trust_remote_code": False, "num_shard": 2}, ["--num-shard=2"]),
        (None, {"sharded": True, "master_port": 29501}, ["--sharded=true", "--master-port=29501"]),
        (None, {"sharded": False}, ["--sharded=false"]),
        (None, {"max_batch_size": 3, "tokenizer_config_path": Path("/t.json")}, []),
    ],
)
def test_the_launcher_gets_the_options_of_shards(model, given, flags):
    found, _ = sort_options(model, given)
    assert list(found) == flags
    assert read_options(found, {}, Mode.SHARDS) is not None


def test_a_switch_is_a_boolean_and_the_launcher_refuses_anything_else():
    flags, _ = sort_options(None, {"trust_remote_code": "false"})
    assert flags == ("--trust-remote-code=false",)


def test_the_router_gets_its_options():
    given = {"max_batch_size": 3, "revision": "v1", "step_deadline": 7.5}
    flags, options = sort_options("a/b", given | {"tokenizer_config_path": Path("/t.json")})
    assert flags == ("--model-id=a/b", "--revision=v1", "--step-deadline=7.5")
    config = router_config(options, ADDRESS)
    assert (config.max_batch_size, config.batch_rows) == (3, 3)
    assert (config.revision, config.step_deadline) == ("v1", 7.5)
    assert config.tokenizer_config_path == "/t.json"
    assert (config.tokenizer_name, config.served_model_id) == ("/models/b", "a/b")
    assert config.master_shard_uds_path == "/tmp/s-0"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"port": 80}, "`port` is an option of the server"),
        ({"api_key": "k"}, "`api_key` is an option of the server"),
        ({"max_concurrent_requests": 3}, "`max_concurrent_requests` is an option of the server"),
        ({"max_batch_size": 0}, "`--max-batch-size` must be a whole number of at least 1"),
        (
            {"max_input_tokens": 5, "max_total_tokens": 5},
            "--max-input-tokens 5 must be less than --max-total-tokens 5",
        ),
    ],
)
def test_an_invalid_option_is_an_error_before_anything_starts(given, expected):
    with pytest.raises(ValueError, match=expected):
        sort_options(None, given)


@pytest.mark.parametrize("value", [1, None])
@pytest.mark.parametrize("name", ["nonsense", "launcher_fd"])
def test_an_unknown_option_is_an_error(name, value):
    with pytest.raises(TypeError, match=f"LLM has no option `{name}`; see `help"):
        sort_options(None, {name: value})


def test_only_the_known_noise_of_grpc_is_ignored(caplog):
    empty = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    noise = {"message": "Exception in callback PollerCompletionQueue._handle_events()"}
    loop = asyncio.new_event_loop()
    llm._ignore_other_loops(loop, noise | {"exception": empty})
    assert caplog.records == []
    llm._ignore_other_loops(loop, noise | {"exception": ValueError()})
    llm._ignore_other_loops(loop, {"message": "something else", "exception": empty})
    assert len(caplog.records) == 2
    loop.close()
