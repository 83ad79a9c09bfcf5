"""The documented commands with real containers: from the first request to the last signal."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration_tests.container.conftest import SECRET, Start
from integration_tests.container.podman import IMAGE, ROOT, Container, Podman
from integration_tests.server import wait_until

QUESTION = "What does textwrap.dedent do?"
ANSWER = "\n`dedent(text)`: Remove any common leading whitespace from every line in `text`."
PROMPT = "the cat sat on "
CLIENT = ".venv-clients/text-generation"


def generate(client: httpx.Client, inputs: str, **parameters: Any) -> str:
    """The text that POST /generate answers with."""
    response = client.post("/generate", json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    text: str = response.json()["generated_text"]
    return text


def stream(client: httpx.Client, inputs: str, **parameters: Any) -> list[dict[str, Any]]:
    """All events of POST /generate_stream."""
    body = {"inputs": inputs, "parameters": parameters}
    with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    return [json.loads(line.removeprefix("data:")) for line in lines]


@pytest.fixture(scope="module")
def server(podman: Podman, data: Path) -> Iterator[Container]:
    """The command without a model: the embedded one answers."""
    container = podman.start("--shm-size", "1g", "-p", "127.0.0.1::80", "-v", f"{data}:/data")
    container.wait_until_ready()
    yield container
    container.remove()


def test_a_request_and_a_stream_from_outside(server: Container) -> None:
    with server.client() as client:
        assert generate(client, QUESTION, max_new_tokens=60) == ANSWER
        events = stream(client, QUESTION, max_new_tokens=60)
    assert events[-1]["generated_text"] == ANSWER
    assert "".join(event["token"]["text"] for event in events[:-1]) == ANSWER


def test_the_official_client(server: Container) -> None:
    made = ["make", f"{CLIENT}/.installed"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True, timeout=300)
    script = (
        "import sys; from text_generation import Client; client = Client(sys.argv[1], timeout=60)\n"
        "print(client.generate(sys.argv[2], max_new_tokens=60).generated_text)\n"
        "stream = client.generate_stream(sys.argv[2], max_new_tokens=60)\n"
        "print(''.join(one.token.text for one in stream if not one.token.special))\n"
    )
    command = [str(ROOT / CLIENT / "bin/python"), "-c", script, server.url(), QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{ANSWER}\n{ANSWER}\n", done.stderr


def test_the_launcher_is_process_1_and_nobody_is_root(server: Container) -> None:
    assert "text-generation-launcher" in server.execute("cat", "/proc/1/cmdline")
    assert server.execute("id", "-u").strip() == "1000"
    status = server.execute("cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status


def test_the_health_check(server: Container, podman: Podman) -> None:
    podman.run("healthcheck", "run", server.name)
    assert "GET /readyz on 127.0.0.1 port 80: 200" in server.execute("healthcheck.py")


def test_process_1_reaps_orphans(server: Container) -> None:
    """A process whose parent has ended becomes a child of process 1, which reaps it."""
    orphan = server.execute("sh", "-c", "sleep 0.2 >/dev/null & echo $!").strip()

    def states() -> list[str]:
        script = f"test -e /proc/{orphan} && grep State /proc/{orphan}/status; true"
        return server.execute("sh", "-c", script).split()

    wait_until(lambda: not states(), 10, f"the orphan is gone: {states()}")


def test_nothing_is_written_but_data_and_tmp(server: Container) -> None:
    # what podman itself makes, for every container
    own = {"/etc", "/etc/mtab", "/run", "/run/.containerenv", "/run/secrets", "/sys", "/proc"}
    changed = {path for path in server.changed_paths() if not path.startswith(("/tmp", "/dev"))}
    assert changed <= own | {"/data"}


READ_ONLY = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp")
NO_PRIVILEGES = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges")


@pytest.mark.parametrize("has_data", [True, False])
def test_read_only_as_any_user(start: Start, data: Path, model: Path, has_data: bool) -> None:
    """User 1000 with the usual /data; and an unknown user without privileges, who can only write to
    /tmp."""
    mount = ("--user", "1000", "-v", f"{data}:/data")
    user = mount if has_data else ("--user", "4242:4242", *NO_PRIVILEGES)
    flags = (*user, "-p", "127.0.0.1::80", "-v", f"{model}:/model:ro")
    container = start(
        *READ_ONLY,
        *flags,
        arguments=("--model-id", "/model"),
    )
    container.wait_until_ready()
    with container.client() as client:
        assert generate(client, PROMPT, max_new_tokens=5)
    assert "Traceback" not in container.stop()


def test_every_setting_by_environment(start: Start, data: Path, model: Path) -> None:
    settings = {
        "MODEL_ID": "/model",
        "NUM_SHARD": "1",
        "SHARDED": "false",
        "DTYPE": "bfloat16",
        "MAX_INPUT_TOKENS": "100",
        "MAX_TOTAL_TOKENS": "200",
        "MAX_BATCH_PREFILL_TOKENS": "300",
        "MAX_BATCH_TOTAL_TOKENS": "4000",
        "MAX_CONCURRENT_REQUESTS": "7",
        "MAX_BEST_OF": "3",
        "MAX_STOP_SEQUENCES": "5",
        "MAX_CLIENT_BATCH_SIZE": "6",
        "VALIDATION_WORKERS": "1",
        "PORT": "8123",
        "API_KEY": SECRET,
        "HF_TOKEN": SECRET,
        "HUGGINGFACE_HUB_CACHE": "/data/hub",
        "CORS_ALLOW_ORIGIN": "https://example.com",
        "CUDA_GRAPHS": "0",
        "JSON_OUTPUT": "true",
        "USAGE_STATS": "off",
    }
    options = [part for name, value in settings.items() for part in ("-e", f"{name}={value}")]
    container = start(
        *options, "-p", "127.0.0.1::8123", "-v", f"{data}:/data", "-v", f"{model}:/model:ro"
    )
    container.wait_until_ready(8123)
    with container.client(8123) as client:
        assert client.get("/info").status_code == 401
        answer = client.get(
            "/info", headers={"Authorization": f"Bearer {SECRET}", "Origin": "https://example.com"}
        )
    assert answer.headers["access-control-allow-origin"] == "https://example.com"
    info = answer.json()
    expected = {
        "model_id": "/model",
        "model_dtype": "bfloat16",
        "max_input_tokens": 100,
        "max_total_tokens": 200,
        "max_concurrent_requests": 7,
        "max_best_of": 3,
        "max_stop_sequences": 5,
        "max_client_batch_size": 6,
        "validation_workers": 1,
    }
    assert {name: info.get(name) for name in expected} == expected
    assert "port 8123: 200" in container.execute("healthcheck.py")
    log = container.stop()
    assert SECRET not in log
    assert all(json.loads(line)["level"] for line in log.splitlines())


def test_sagemaker(start: Start, data: Path, model: Path) -> None:
    """SageMaker starts its image with the argument `serve`, and uses port 8080."""
    flags = (
        *("--entrypoint", "sagemaker-entrypoint"),
        *("-e", "HF_MODEL_ID=/model", "-e", "SM_NUM_GPUS=1"),
        *("-p", "127.0.0.1::8080", "-v", f"{data}:/data", "-v", f"{model}:/model:ro"),
    )
    container = start(*flags, arguments=("serve",))
    container.wait_until_ready(8080)
    with container.client(8080) as client:
        assert client.get("/ping").status_code == 200
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}}
        assert client.post("/invocations", json=body).json()[0]["generated_text"]
    assert "text-generation-launcher" in container.execute("cat", "/proc/1/cmdline")
    container.stop()


def test_sagemaker_without_a_model(start: Start) -> None:
    container = start("--entrypoint", "sagemaker-entrypoint", arguments=("serve",))
    assert container.wait_for_exit() == 1
    assert "HF_MODEL_ID must be set" in container.log()


def test_sigterm_under_load(start: Start, data: Path, model: Path) -> None:
    """Running and waiting streams end normally, new requests are refused, the exit code is 0."""
    flags = ("-p", "127.0.0.1::80", "-v", f"{data}:/data", "-v", f"{model}:/model:ro")
    container = start(
        *flags,
        # One after the other, so that on a fast machine some still run at the signal.
        arguments=(
            *("--model-id", "/model", "--graceful-termination-timeout", "60"),
            *("--max-batch-size", "1"),
        ),
    )
    container.wait_until_ready()
    parameters = {"max_new_tokens": 450, "ignore_eos_token": True}
    with container.client() as client, ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(stream, client, PROMPT, **parameters) for _ in range(16)]

        def all_came() -> bool:
            return "tgi_request_count 16" in client.get("/metrics").text

        wait_until(all_came, 30, "one stream runs, and all others wait")
        container.signal("TERM")
        wait_until(lambda: "SIGTERM: stopping" in container.log(), 10, "the signal is noticed")
        refused = client.post("/generate", json={"inputs": PROMPT})
        still_running = [not one.done() for one in streams]
        events = [one.result(60) for one in streams]
    assert any(still_running)
    assert refused.status_code == 503
    assert [len(one) for one in events] == [450] * 16
    assert container.wait_for_exit() == 0
    assert "Traceback" not in container.log()


def test_no_process_is_left_behind(start: Start, podman: Podman, data: Path) -> None:
    """SIGKILL of process 1 ends all of them, and the same volume serves the next container."""
    container = start("-p", "127.0.0.1::80", "-v", f"{data}:/data")
    container.wait_until_ready()

    def inside() -> list[str]:
        return podman.run("top", container.name, "hpid").split()[1:]

    # Launcher, router and shard; and two workers, each a server and a process that it has forked.
    wait_until(lambda: len(inside()) == 7, 20, "seven processes run")
    processes = inside()
    container.signal("KILL")
    assert container.wait_for_exit() == 137
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert podman.inspect(container.name)["ImageName"].startswith(IMAGE)
