from pathlib import Path

import pytest
from text_generation_launcher.command_line import read_options
from text_generation_launcher.option import Mode
from text_generation_launcher.options import OPTIONS
from text_generation_router.offline.options import SHARDS_OPTIONS, sort_options
from text_generation_router.offline.shards_process import ShardsAddress

ADDRESS = ShardsAddress("a/b", "/models/b", "/tmp/s-0")


def test_each_option_goes_to_whom_it_belongs():
    options = sort_options(
        "a/b", {"dtype": "bfloat16", "max_batch_size": 3, "revision": "v1", "device": None}
    )
    assert set(options.shard_flags) == {"--model-id=a/b", "--dtype=bfloat16", "--revision=v1"}
    config = options.router_config(ADDRESS)
    assert config.max_batch_size == config.batch_rows == 3
    assert config.revision == "v1"
    assert config.tokenizer_name == "/models/b"
    assert config.served_model_id == "a/b"
    assert config.master_shard_uds_path == "/tmp/s-0"


def test_without_a_model_the_launcher_decides():
    assert sort_options(None, {}).shard_flags == ()


def test_nobody_is_sent_away_but_the_batch_has_its_usual_size():
    config = sort_options(None, {}).router_config(ADDRESS)
    assert config.batch_rows == 128
    assert config.max_concurrent_requests > 10**9


def test_switches_and_paths():
    options = sort_options(
        Path("/models/x"),
        {
            "deterministic": True,
            "trust_remote_code": False,
            "tokenizer_config_path": Path("/t.json"),
        },
    )
    assert options.shard_flags == ("--model-id=/models/x", "--deterministic")
    assert options.router_config(ADDRESS).tokenizer_config_path == "/t.json"


@pytest.mark.parametrize(
    "given, flags",
    [
        ({"num_shard": 2}, ("--num-shard=2",)),
        ({"sharded": True, "master_port": 29501}, ("--sharded=true", "--master-port=29501")),
        ({"sharded": False}, ("--sharded=false",)),
    ],
)
def test_several_shards_are_the_business_of_the_launcher(given, flags):
    options = sort_options(None, given)
    assert options.shard_flags == flags
    assert options.router == {}
    assert set(read_options(flags, {}, Mode.SHARDS)) == {name.replace("_", "-") for name in given}


def test_shards_and_router_have_the_same_step_deadline():
    options = sort_options(None, {"step_deadline": 7.5})
    assert options.shard_flags == ("--step-deadline=7.5",)
    assert options.router_config(ADDRESS).step_deadline == 7.5


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"port": 80}, "`port` is an option of the server"),
        ({"api_key": "k"}, "`api_key` is an option of the server"),
        ({"max_batch_size": 0}, "`--max-batch-size` must be >= 1"),
        ({"max_input_tokens": 5, "max_total_tokens": 5}, "`max_input_tokens` must be <"),
    ],
)
def test_what_can_not_be_is_said_before_anything_starts(given, expected):
    with pytest.raises(ValueError, match=expected):
        sort_options(None, given)


@pytest.mark.parametrize("value", [1, False, None])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("nonsense", "LLM has no option `nonsense`; see `help"),
        ("max_batch_sise", "no option `max_batch_sise`; did you mean `max_batch_size`"),
        ("num_shards", "did you mean `num_shard`"),
        ("tensor_parallel_size", "no option `tensor_parallel_size`"),
    ],
)
def test_options_that_there_are_not_are_named_with_what_is_near(name, value, expected):
    with pytest.raises(TypeError, match=expected):
        sort_options(None, {name: value})


def test_the_options_of_the_shards_are_those_of_the_launcher():
    ours = {"end_with_stdin", "env", "json_output", "shard_uds_path"}
    shards = {o.name.replace("-", "_") for o in OPTIONS if o.applies_in(Mode.SHARDS)}
    assert shards - ours == SHARDS_OPTIONS
