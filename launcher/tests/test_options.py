import pytest
from text_generation_launcher.options import (
    OPTIONS,
    describe,
    forward,
    notes,
    read_options,
    refuse,
    split_mode,
)
from text_generation_process.option import Child, InvalidOptions, Mode, Option


def test_every_option_does_something():
    """No option is silently ignored: it goes to a child, is refused, is logged as having no effect,
    or is the launcher's own."""
    own = {
        *("model-id", "num-shard", "sharded", "master-addr", "master-port", "shard-uds-path"),
        *("max-input-length", "aip-http-port", "json-output", "env", "input", "output"),
        *("end-with-stdin", "restart", "no-restart"),
    }
    for option in OPTIONS:
        # Of some options only unsupported values are refused.
        is_refused = bool(option.refusal) and not (option.to and option.plain)
        ways = [bool(option.to), is_refused, bool(option.note), option.name in own]
        assert ways.count(True) == 1, option.name


def test_defaults_are_those_of_the_launcher_alone():
    assert dict(read_options([], {})) == {
        "restart": "true",
        "waiting-served-ratio": "0.3",
        "hostname": "0.0.0.0",
        "port": "3000",
        "graceful-termination-timeout": "90",
    }


@pytest.mark.parametrize(
    "argv, environment, name, expected",
    [
        (["--max-best-of", "3"], {}, "max-best-of", "3"),
        ([], {"MAX_BEST_OF": "4"}, "max-best-of", "4"),
        (["--max-best-of", "3"], {"MAX_BEST_OF": "4"}, "max-best-of", "3"),
        (["--max-best-of", "3"], {"MAX_BEST_OF": "junk"}, "max-best-of", "3"),
        ([], {"MAX_BEST_OF": ""}, "max-best-of", None),
        (["-p", "80"], {"PORT": "81"}, "port", "80"),
        ([], {"PORT": "080"}, "port", "80"),
        (["-g", "1.5"], {}, "graceful-termination-timeout", "1.5"),
        (["--json-output"], {}, "json-output", "true"),
        ([], {"JSON_OUTPUT": "true"}, "json-output", "true"),
        ([], {"JSON_OUTPUT": "false"}, "json-output", None),
        (["-e"], {}, "env", "true"),
        ([], {"RESTART": "false"}, "restart", None),
        (["--restart"], {"RESTART": "false"}, "restart", "true"),
        (["--resume-streams=false"], {}, "resume-streams", "false"),
        ([], {"ENV": "true"}, "env", None),
        ([], {"HOSTNAME": "4f2a1b"}, "hostname", "0.0.0.0"),
        ([], {"HOSTNAME": "127.0.0.1"}, "hostname", "127.0.0.1"),
        (["--hostname", "4f2a1b"], {}, "hostname", "4f2a1b"),
        (
            ["--cors-allow-origin", "a", "--cors-allow-origin", "b"],
            {"CORS_ALLOW_ORIGIN": "c"},
            "cors-allow-origin",
            "a\nb",
        ),
        ([], {"CORS_ALLOW_ORIGIN": "c"}, "cors-allow-origin", "c"),
        (["--api-key", "a", "--api-key=b,c"], {"API_KEY": "d"}, "api-key", "a\nb,c"),
        ([], {"API_KEY": "a,b"}, "api-key", "a\nb"),
    ],
)
def test_flag_and_environment(argv, environment, name, expected):
    assert read_options(argv, environment).get(name) == expected


@pytest.mark.parametrize(
    "argv, environment, expected",
    [
        (["--nonsense"], {}, "unrecognized arguments: --nonsense"),
        (["--max-best", "3"], {}, "unrecognized arguments: --max-best"),
        (["--port"], {}, "argument --port/-p: expected one argument"),
        (["--max-best-of", "x"], {}, "--max-best-of: expected a whole number of at least 1"),
        (["--max-best-of", "9" * 5000], {}, "a whole number of at least 1"),
        (["--max-best-of", "1", "--max-best-of", "2"], {}, "expected once, got 2 times"),
        (["--port", "0"], {}, "a whole number from 1 to 65535, got '0'"),
        (["--dtype", "fp8"], {}, "one of float32, float16, bfloat16, got 'fp8'"),
        (["--sharded", "maybe"], {}, "true or false, got 'maybe'"),
        (["--rope-factor", "nan"], {}, "a number above 0, got 'nan'"),
        (["--cuda-memory-fraction", "1.1"], {}, "a number above 0 and at most 1"),
        (["--cuda-graphs", "1,0"], {}, "whole numbers from 1 to 1024 with commas between, or 0"),
        (["-g", "-1"], {}, "graceful-termination-timeout"),
        (["--model-id", ""], {}, "a value that isn't empty"),
        ([], {"MAX_BEST_OF": "x"}, "environment variable MAX_BEST_OF: expected a whole number"),
        ([], {"JSON_OUTPUT": "yes"}, "environment variable JSON_OUTPUT: expected true or false"),
        ([], {"API_KEY": ""}, "environment variable API_KEY: expected a value that isn't empty"),
        ([], {"API_KEY": "a,"}, "environment variable API_KEY: expected a value that isn't empty"),
        ([], {"API_KEY_FILE": ""}, "API_KEY_FILE: expected a value that isn't empty, got ''"),
        (["--api-key-file", "a", "--api-key-file", "b"], {}, "expected once, got 2 times"),
        ([], {"AIP_HEALTH_ROUTE": "x"}, "AIP_HEALTH_ROUTE: expected a path that starts with /"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(argv, environment, expected, capsys):
    with pytest.raises(SystemExit) as exit:
        read_options(argv, environment)
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.startswith("text-generation-launcher: error: ")
    assert said.count("\n") == 1


def test_options_without_effect_are_said_to_have_none():
    argv = ["--usage-stats", "on", "--disable-custom-kernels", "--enable-prefill-logprobs"]
    values = read_options(argv, {})
    refuse(values)
    assert [note.split()[0] for note in notes(values)] == [
        "--disable-custom-kernels",
        "--enable-prefill-logprobs",
        "--usage-stats",
    ]
    assert notes(read_options(["--usage-stats", "off"], {})) == ()


def test_secrets_are_never_printed(capsys):
    values = read_options(["--api-key", "sesame", "--json-output"], {"NGROK_AUTHTOKEN": "x"})
    said = describe(values)
    assert "sesame" not in said
    assert "--api-key <hidden>" in said
    assert "--json-output" in said.split()


def test_forwarding_passes_on_what_was_given_and_nothing_else():
    argv = ["--dtype", "float32", "--disable-grammar-support", "--revision=-odd"]
    argv += ["--cors-allow-origin", "a", "--cors-allow-origin", "b"]
    values = read_options(argv, {})
    assert forward(values, Child.SHARD) == ("--dtype=float32",)
    assert forward(values, Child.DOWNLOAD) == ("--revision=-odd",)
    assert forward(values, Child.ROUTER) == (
        "--revision=-odd",
        "--hostname=0.0.0.0",
        "--port=3000",
        "--waiting-served-ratio=0.3",
        "--graceful-termination-timeout=90",
        "--cors-allow-origin=a",
        "--cors-allow-origin=b",
        "--disable-grammar-support",
    )


@pytest.mark.parametrize(
    "argv, mode, rest",
    [
        ([], Mode.SERVE, []),
        (["--port", "80"], Mode.SERVE, ["--port", "80"]),
        (["serve", "--port", "80"], Mode.SERVE, ["--port", "80"]),
        (["shards", "--dtype", "float32"], Mode.SHARDS, ["--dtype", "float32"]),
        (["batch"], Mode.BATCH, []),
        (["--model-id", "batch"], Mode.SERVE, ["--model-id", "batch"]),
    ],
)
def test_the_first_word_is_the_mode(argv, mode, rest):
    assert split_mode(argv) == (mode, rest)


def test_shards_and_batches_have_no_defaults_of_the_router_and_the_http_side():
    assert dict(read_options([], {}, Mode.SHARDS)) == {}
    assert dict(read_options([], {}, Mode.BATCH)) == {"waiting-served-ratio": "0.3"}


@pytest.mark.parametrize(
    "mode, argv, environment",
    [
        (Mode.SHARDS, ["--port", "80"], {"PORT": "junk", "MAX_BATCH_SIZE": "junk"}),
        (Mode.SHARDS, ["--max-batch-size", "8"], {"HOSTNAME": "127.0.0.1"}),
        (Mode.SHARDS, ["--max-input-length", "8"], {"MAX_INPUT_LENGTH": "junk"}),
        (Mode.SHARDS, ["--input", "x"], {"INPUT": "x"}),
        (Mode.BATCH, ["--api-key", "k"], {"API_KEY": ""}),
        (Mode.BATCH, ["--api-key-file", "k"], {"API_KEY_FILE": ""}),
        (Mode.BATCH, ["--end-with-stdin"], {"PORT": "junk", "AIP_HEALTH_ROUTE": "x"}),
        (Mode.SERVE, ["--output", "x"], {"OUTPUT": "x"}),
    ],
)
def test_a_flag_of_another_mode_is_unknown(mode, argv, environment, capsys):
    quiet = read_options([], environment, mode)
    assert quiet == read_options([], {}, mode), "a variable was read that means nothing here"
    with pytest.raises(SystemExit):
        read_options(argv, {}, mode)
    assert f"unrecognized arguments: {argv[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [one for one in OPTIONS if one.refusal], ids=lambda one: one.name
)
def test_a_refusal_names_the_flag(option: Option):
    value = {"quantize": "awq", "ngrok": "true"}.get(option.name, "x")
    with pytest.raises(InvalidOptions, match=f"^{option.flag} "):
        refuse(read_options([], {option.variable: value}))
