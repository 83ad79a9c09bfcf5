"""The command as a user runs it, up to the start of the first child."""

import os
import subprocess
import sys


def run(*argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "text_generation_launcher.cli", *argv],
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_env_is_printed_and_the_launcher_goes_on(free_port):
    port = str(free_port)
    argv = ("--env", "--port", port, "--shard-uds-path", "/nowhere/s", "--api-key", "sesame")
    result = run(*argv)
    assert result.returncode == 1
    for expected in ("Python: 3.", "pytgi: ", "torch: ", "nvidia-smi: ", "cannot write /nowhere"):
        assert expected in result.stdout
    assert "sesame" not in result.stdout


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
