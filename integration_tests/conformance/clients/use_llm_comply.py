"""`llm-comply`: its suites for Open Responses, OpenAI's chat and Anthropic's messages.

Each of its tests is a check, greedy and with one call at most, since the model is small. A test
that fails must fail with just the errors that are listed here with their reason.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import llm_comply
from checks import API_KEY, URL, check, equal, run
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase
from llm_comply.tests import get_tests

SPECS = Path(llm_comply.__file__).parent / "specs"
CONFIG = ComplianceConfig(f"{URL}/v1", API_KEY, "tgi", timeout=60)
ANTHROPIC = dataclasses.replace(
    CONFIG,
    auth_header="x-api-key",
    use_bearer_prefix=False,
    extra_headers={"anthropic-version": "2023-06-01"},
)

# The models that are served read no images.
NO_IMAGES = {
    "HTTP 400 (expected [200])",
    "response.id is missing or empty",
}
# TGI serves its model also where a request names none.
MODEL_LEFT_OUT = {"HTTP 200 (expected [400, 422])"}
# What only Anthropic's own service can tell: its regions and tiers, containers, tools that run
# there, what a refusal was about. Its package does without.
ANTHROPICS_OWN = {
    "'container' is a required property",
    "'stop_details' is a required property",
    "usage: 'cache_creation' is a required property",
    "usage: 'inference_geo' is a required property",
    "usage: 'output_tokens_details' is a required property",
    "usage: 'server_tool_use' is a required property",
    "usage: 'service_tier' is a required property",
    # A text needs `citations`, a call `caller`.
    "content.0: … is not valid under any of the given schemas",
}
FAILURES: dict[str, set[str]] = {
    "image-input": {
        *NO_IMAGES,
        "expected status='completed', got 'None'",
        "response.output is missing or empty",
    },
    "error-handling": MODEL_LEFT_OUT,
    "chat-image-input": {
        *NO_IMAGES,
        "response.choices is empty",
        "response.choices is missing or empty",
    },
    "chat-error-handling": MODEL_LEFT_OUT,
    "anth-basic-response": ANTHROPICS_OWN,
    "anth-system-prompt": ANTHROPICS_OWN,
    "anth-multi-turn": ANTHROPICS_OWN,
    "anth-tool-calling": ANTHROPICS_OWN,
    "anth-image-input": {
        *NO_IMAGES,
        "expected type='message', got 'error'",
        "response.content is missing or empty",
        "stop_reason: expected 'end_turn', got 'None'",
    },
}


def add(suite: str, spec_file: str, config: ComplianceConfig) -> None:
    """Registers the tests of a suite."""
    spec = SpecLoader(str(SPECS / spec_file))
    for case in get_tests(suite):
        if case.skip_reason is None or case.skip_reason(config) is None:
            add_test(TestRunner(config, [], spec), case)


def add_test(runner: TestRunner, case: TestCase) -> None:
    """Registers one test."""

    def action() -> None:
        result = runner.run_one(dataclasses.replace(case, build_request=greedy))
        errors = {re.sub(r"\{.*\}", "…", error) for error in result.errors}
        equal(errors, FAILURES.get(case.id, set()))

    def greedy(config: ComplianceConfig) -> dict[str, Any]:
        body = {"temperature": 0, **case.build_request(config)}
        if "tools" not in body:
            return body
        if case.endpoint == "/messages":
            choice = body.get("tool_choice", {"type": "any"})
            return {**body, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        return {**body, "parallel_tool_calls": False}

    action.__name__ = case.id.replace("-", "_")
    check(action)


add("open-responses", "openresponses.json", CONFIG)
add("openai-chat", "openai_chat.json", CONFIG)
add("anthropic", "anthropic.json", ANTHROPIC)
run()
