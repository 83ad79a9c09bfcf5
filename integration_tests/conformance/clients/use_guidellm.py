"""`guidellm`: benchmarks of synthetic prompts; each request has the tokens it asked for."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import API_KEY, URL, check, equal, run

TOKENIZER = Path(__file__).parents[3] / "launcher/text_generation_launcher/embedded_model"
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 100
# Every process of it imports torch and transformers: one is enough.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}


def benchmark(profile: str, count: int, **backend: str) -> dict[str, Any]:
    """The report of `guidellm run` for `count` requests, all of which must be complete."""
    options = {"kind": "openai_http", "target": URL, "api_key": API_KEY, **backend}
    shape = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments = {
            "--backend": ",".join(f"{key}={value}" for key, value in options.items()),
            "--profile": profile,
            "--constraint": f"kind=max_requests,count={count}",
            "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
            "--data": f"kind=synthetic_text,{shape}",
            "--output": f"kind=json,path={report}",
        }
        words = [word for pair in arguments.items() for word in pair]
        done = subprocess.run(
            [Path(sys.executable).with_name("guidellm"), "run", *words, "--disable-console"],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["requests"]
    equal((len(requests["errored"]), len(requests["incomplete"])), (0, 0))
    equal([_tokens(one) for one in requests["successful"]], [OUTPUT_TOKENS] * count)
    for request in requests["successful"]:
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS, request["input_metrics"]
        timings = request["info"]["timings"]
        assert timings["first_token_iteration"] < timings["last_token_iteration"], timings
    result: dict[str, Any] = found
    return result


def _tokens(request: dict[str, Any]) -> int:
    tokens: int = request["output_metrics"]["text_tokens"]
    return tokens


@check
def chat() -> None:
    metrics = benchmark("kind=concurrent,streams=3", 9)["metrics"]
    per_second = metrics["output_tokens_per_second"]["successful"]["mean"]
    assert per_second > 0, per_second


@check
def completions() -> None:
    benchmark("kind=poisson,rate=8", 6, request_format="/v1/completions")


run()
