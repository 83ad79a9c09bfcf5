"""The command as a user runs it, up to the start of the first child."""

import os
import subprocess
import sys

import pytest


def run(*argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "text_generation_launcher.cli", *argv],
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--quantize", "awq"], "--quantize takes int8 or int4"),
        (["--model-id", "/nowhere"], "--model-id /nowhere does not exist"),
        (["shards", "--shard-uds-path", "/tmp/" + "x" * 110], "is too long"),
    ],
)
def test_a_fatal_error_is_one_error_line_and_exit_code_1(argv, expected):
    result = run(*argv)
    assert result.returncode == 1
    assert result.stderr == ""
    errors = [line for line in result.stdout.splitlines() if " ERROR " in line]
    assert len(errors) == 1
    assert expected in errors[0]


def test_a_bad_value_is_exit_code_2():
    result = run("--port", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def test_env_is_printed_and_the_launcher_goes_on(free_port):
    port = str(free_port)
    argv = ("--env", "--port", port, "--shard-uds-path", "/nowhere/s", "--api-key", "sesame")
    result = run(*argv)
    assert result.returncode == 1
    for expected in ("Python: 3.", "pytgi: ", "torch: ", "nvidia-smi: ", "cannot write /nowhere"):
        assert expected in result.stdout
    assert "sesame" not in result.stdout


def test_secrets_are_not_for_all_to_see_on_the_command_line():
    script = (
        "import sys; from text_generation_launcher.process import conceal\n"
        "conceal(('sesame', 'ouvre-toi', 'b,ü'))\n"
        "print(sys.argv, open('/proc/self/cmdline').read().split(chr(0)))"
    )
    argv = ["--api-key", "sesame", "--api-key=ouvre-toi", "--api-key=b,ü", "--model-id", "sesame/x"]
    said = subprocess.check_output([sys.executable, "-c", script, *argv], text=True)
    kept, shown = said.split("] [")
    assert all(repr(argument) in kept for argument in argv)
    assert shown.endswith(
        "'--api-key', 'xxxxxx', '--api-key=xxxxxxxxx', '--api-key=xxxx', '--model-id', "
        "'sesame/x', '']\n"
    )


def test_a_closed_standard_output():
    """`>&-`: no pipe of a child may get the descriptor of the log."""
    script = (
        "import os, sys; os.close(1); os.close(0)\n"
        "from text_generation_launcher.cli import main\n"
        "code = main(['--quantize', 'awq'])\n"
        "sys.stderr.write(f'{code} {os.readlink(\"/proc/self/fd/1\")}')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr == "1 /dev/null"
