"""`lm-eval`: log-likelihoods over `echo`, generation over completions and chat; own small tasks."""

import contextlib
import json
import math
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from checks import ANSWER, API_KEY, QUESTION, URL, check, equal, run

HERE = Path(__file__).parent
TASKS = HERE / "lm_eval_tasks"
TOKENIZER = HERE.parents[2] / "launcher/text_generation_launcher/embedded_model"
os.environ |= {"OPENAI_API_KEY": API_KEY, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
os.chdir(TASKS)  # the paths in the tasks are relative

import lm_eval  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

COMPLETIONS = {
    "model": "pytgi/embedded",
    "base_url": f"{URL}/v1/completions",
    "tokenizer": str(TOKENIZER),
    "tokenizer_backend": "huggingface",
    "max_length": 512,
    "max_retries": 1,
}
CHAT = {"model": "pytgi/embedded", "base_url": f"{URL}/v1/chat/completions", "max_retries": 1}


def evaluate(model: str, arguments: dict[str, Any], *tasks: str, **options: Any) -> dict[str, Any]:
    """The results of each task."""
    with contextlib.redirect_stdout(sys.stderr):
        found = lm_eval.simple_evaluate(
            model,
            arguments,
            tasks=list(tasks),
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
            **options,
        )
    return {task: found["results"][task] for task in tasks}


@check
def loglikelihood() -> None:
    asked = {**COMPLETIONS, "num_concurrent": 2}
    tasks = ("stdlib_choice", "stdlib_greedy", "stdlib_rolling")
    found = evaluate("local-completions", asked, *tasks)
    equal(found["stdlib_choice"]["acc,none"], 1.0)
    equal(found["stdlib_choice"]["acc_norm,none"], 1.0)
    equal(found["stdlib_greedy"]["acc,none"], 1.0)  # all are what the model says by itself
    assert 1 < found["stdlib_greedy"]["perplexity,none"] < 100, found
    assert 1 < found["stdlib_rolling"]["word_perplexity,none"] < 1e6, found


@check
def loglikelihood_is_the_models() -> None:
    # The same from TGI's own route, which returns the log-probabilities of a prompt's tokens.
    context, continuation = f"{QUESTION}\n", ANSWER
    asked = {
        "inputs": context + continuation,
        "parameters": {"max_new_tokens": 1, "decoder_input_details": True, "details": True},
    }
    request = urllib.request.Request(
        f"{URL}/generate",
        json.dumps(asked).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        prefill = json.load(answer)["details"]["prefill"]
    model = get_model("local-completions")(**COMPLETIONS)
    length = len(model.tok_encode(context))
    ((found, is_greedy),) = model.loglikelihood(
        [Instance("loglikelihood", {}, (context, continuation), 0)]
    )
    expected = sum(token["logprob"] for token in prefill[length:])
    assert math.isclose(found, expected, abs_tol=1e-2), (found, expected)
    equal(is_greedy, True)


@check
def loglikelihood_in_batches() -> None:
    one = evaluate("local-completions", COMPLETIONS, "stdlib_choice", "stdlib_greedy")
    asked = {**COMPLETIONS, "batch_size": 8}
    several = evaluate("local-completions", asked, "stdlib_choice", "stdlib_greedy")
    equal(several["stdlib_choice"]["acc,none"], one["stdlib_choice"]["acc,none"])
    found = [each["stdlib_greedy"]["perplexity,none"] for each in (one, several)]
    assert math.isclose(*found, rel_tol=1e-3), found


@check
def generate() -> None:
    for tokenized in (True, False):
        asked = {**COMPLETIONS, "tokenized_requests": tokenized, "batch_size": 2}
        found = evaluate("local-completions", asked, "stdlib_generate")
        equal(found["stdlib_generate"]["exact_match,stripped"], 1.0)


@check
def generate_by_chat() -> None:
    asked = {**CHAT, "num_concurrent": 2}
    found = evaluate("local-chat-completions", asked, "stdlib_generate", apply_chat_template=True)
    equal(found["stdlib_generate"]["exact_match,stripped"], 1.0)


run()
