"""`LLM` in Python: the same answers as a server's, and an end to everything it starts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from text_generation_router import LLM, SamplingParams
from text_generation_router.errors import GenerationError, GrammarError, ToolError, ValidationError
from text_generation_router.offline import LLMError, RequestOutput

from integration_tests.server import (
    LauncherHandle,
    assert_ended,
    clean_environment,
    token_ids,
    wait_until,
)

PROMPTS = ["the cat sat on ", "def add(first", "what is the time", "the sun and the rain "]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """The launchers that are started here see none of the developer's variables."""
    before, clean = dict(os.environ), clean_environment()
    os.environ.clear()
    os.environ.update(clean)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def llm(environment: None, tiny_model_path: Path) -> Iterator[LLM]:
    """The model of the shared server."""
    with LLM(tiny_model_path, dtype="float32", max_input_tokens=430) as llm:
        yield llm
        for name in ("tgi_queue_size", "tgi_batch_current_size"):
            assert f"\n{name} 0" in llm.metrics()


def test_embeddings_are_the_servers(llm: LLM, server: LauncherHandle) -> None:
    found = llm.embed(PROMPTS)
    response = server.client.post("/v1/embeddings", json={"input": PROMPTS})
    wanted = [one["embedding"] for one in response.json()["data"]]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert llm.embed(PROMPTS[0])[0] == pytest.approx(found[0], abs=1e-6)
    assert [len(one) for one in llm.embed([[5, 6], [7]], dimensions=3)] == [3, 3]
    with pytest.raises(ValueError, match="`dimensions` must be 1 to 64"):
        llm.embed("a", dimensions=65)
    with pytest.raises(ValidationError, match="cannot be empty"):
        llm.embed(["a", ""])


def family() -> list[psutil.Process]:
    """What this process has started and what that has started."""
    return psutil.Process().children(recursive=True)


def launchers() -> list[psutil.Process]:
    """Launchers of LLMs, of this process."""
    return [one for one in family() if "--end-with-stdin" in words_of(one)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def ids_of(result: RequestOutput) -> list[tuple[int, ...]]:
    """The tokens of all answers."""
    return [output.token_ids for output in result.outputs]


def is_running(llm: LLM) -> bool:
    """Whether one request is in the batch."""
    return "\ntgi_batch_current_size 1\n" in llm.metrics()


def test_the_answers_are_those_of_a_server(llm: LLM, server: LauncherHandle) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    drawn = SamplingParams(max_tokens=24, seed=11, n=2, top_k=50)
    for prompt, one in zip(PROMPTS, llm.generate(PROMPTS, greedy), strict=True):
        answer = server.generate(prompt, max_new_tokens=24)
        assert one.prompt == prompt and list(one.outputs[0].token_ids) == token_ids(answer)
        logprobs = sum(token["logprob"] for token in answer["details"]["tokens"])
        assert one.outputs[0].cumulative_logprob == pytest.approx(logprobs, abs=1e-3)
        assert one.outputs[0].finish_reason == "length" and one.outputs[0].stop_reason is None
    for prompt, one in zip(PROMPTS, llm.generate(PROMPTS, drawn), strict=True):
        for place, output in enumerate(one.outputs):
            answer = server.generate(
                prompt, max_new_tokens=24, seed=11 + place, do_sample=True, top_k=50
            )
            assert list(output.token_ids) == token_ids(answer)
            assert output.text == answer["generated_text"]


def test_prompts_as_ids_and_parameters_of_their_own(llm: LLM) -> None:
    [text] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, prompt_logprobs=True))
    ids = [token.id for token in text.prompt_tokens]
    assert text.num_prompt_tokens == len(ids) > 0
    params = [SamplingParams(temperature=0, max_tokens=length) for length in (1, 16)]
    short, long = llm.generate([ids, ids], params)
    assert long.outputs[0].token_ids == text.outputs[0].token_ids
    assert short.outputs[0].token_ids == long.outputs[0].token_ids[:1]
    assert llm.generate([1, 2, 3], params[0])[0].num_prompt_tokens == 3
    assert llm.generate([]) == []


def test_what_a_prompt_asks_for(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    [shaped] = llm.generate(PROMPTS[0], SamplingParams(json_schema=schema, max_tokens=40))
    assert isinstance(json.loads(shaped.outputs[0].text)["a"], bool)
    [shaped] = llm.generate(PROMPTS[0], SamplingParams(regex="[ab]{3}", max_tokens=9, logprobs=2))
    assert len(shaped.outputs[0].text) == 3 and set(shaped.outputs[0].text) <= {"a", "b"}
    assert shaped.outputs[0].finish_reason == "stop"
    assert all(len(tops) == 2 for tops in shaped.outputs[0].top_tokens)


def test_errors_are_of_one_prompt(llm: LLM) -> None:
    results = llm.generate(
        [PROMPTS[0], [10**6], "", "word " * 400, "\ud800"], SamplingParams(max_tokens=4)
    )
    assert [type(one.error) for one in results[:1]] == [type(None)]
    assert all(isinstance(one.error, ValidationError) for one in results[1:])
    with pytest.raises(ValidationError, match="must be token ids"):
        _ = results[1].outputs
    [refused] = llm.generate(PROMPTS[0], SamplingParams(regex="("))
    assert isinstance(refused.error, GrammarError)


def test_wrong_arguments_are_wrong_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts need 2 SamplingParams"):
        llm.generate(PROMPTS[:2], [SamplingParams()])
    with pytest.raises(ValueError, match="must be a text or a list of token ids"):
        llm.generate([{"prompt": "a"}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"`messages\[0\]"):
        llm.chat([{"content": "no role"}])
    with pytest.raises(ValueError, match="must not be empty"):
        llm.chat([])


def test_chats(llm: LLM, server: LauncherHandle) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    params = SamplingParams(temperature=0, max_tokens=12)
    [one] = llm.chat(messages, params)
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert one.outputs[0].text == answer["choices"][0]["message"]["content"]
    assert one.num_prompt_tokens == answer["usage"]["prompt_tokens"]
    assert [two.outputs[0].text for two in llm.chat([messages, messages], params)] == [
        one.outputs[0].text
    ] * 2


def test_a_chat_with_tools(llm: LLM) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "roll",
            "parameters": {"type": "object", "properties": {"sides": {"enum": [6, 20]}}},
        },
    }
    messages = [{"role": "user", "content": "the cat"}]
    params = SamplingParams(temperature=0, max_tokens=80)
    [result] = llm.chat(messages, params, tools=[tool], tool_choice="required")
    (call, *_) = result.outputs[0].tool_calls
    assert call.name == "roll"
    assert json.loads(call.arguments).get("sides", 6) in (6, 20)
    with pytest.raises(ValueError, match="`tools"):
        llm.chat(messages, params, tools=[{"type": "function"}])
    [refused] = llm.chat(messages, params, tools=[tool], tool_choice="another")
    assert isinstance(refused.error, ToolError)


async def test_from_a_running_loop_and_from_other_threads(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    [here] = llm.generate(PROMPTS[0], params)
    others = await asyncio.gather(
        *(asyncio.to_thread(llm.generate, PROMPTS, params) for _ in range(3))
    )
    assert all(ids_of(other[0]) == ids_of(here) for other in others)


def test_a_second_one_beside_the_first(llm: LLM, tiny_model_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(tiny_model_path, dtype="float32", max_batch_size=2) as other:
        theirs = other.generate(PROMPTS, params)
        ours = llm.generate(PROMPTS, params)
        assert [ids_of(one) for one in theirs] == [ids_of(one) for one in ours]
        assert len(launchers()) == 2
    assert len(launchers()) == 1
    with pytest.raises(LLMError, match="is closed"):
        other.generate("a")
    other.close()


def test_closed_while_it_generates(tiny_model_path: Path) -> None:
    llm = LLM(tiny_model_path, dtype="float32")

    def close() -> None:
        wait_until(lambda: is_running(llm), 20, "it runs")
        llm.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(LLMError, match="closed while it was generating"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=480, ignore_eos=True))
    thread.join()


def test_a_shard_that_dies_fails_the_prompts_and_then_the_model(tiny_model_path: Path) -> None:
    before = family()
    with LLM(tiny_model_path, dtype="float32") as llm:
        shard = next(
            one
            for one in family()
            if one not in before and any("text-generation-server" in part for part in words_of(one))
        )

        def kill() -> None:
            wait_until(lambda: is_running(llm), 20, "it runs")
            shard.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        params = SamplingParams(max_tokens=480, ignore_eos=True)
        [result] = llm.generate(PROMPTS[0], params)
        thread.join()
        assert isinstance(result.error, GenerationError)
        wait_until(lambda: len(launchers()) < 2 and shard not in family(), 20, "they end")

        def has_ended() -> bool:
            try:
                [again] = llm.generate(PROMPTS[0])
            except LLMError as error:
                assert "killed by signal 9" in str(error)
                return True
            assert again.error is not None
            return False

        wait_until(has_ended, 20, "the model says that it has ended")


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("/nowhere", {}, "--model-id /nowhere does not exist"),
        (None, {"dtype": "int3"}, "expected one of float32, float16, bfloat16"),
    ],
)
def test_why_a_model_does_not_start(
    model: str | None, options: dict[str, str | int], expected: str
) -> None:
    before = len(family())
    with pytest.raises(LLMError, match=expected) as caught:
        LLM(model, **options)
    assert "\n" not in str(caught.value)
    assert len(family()) == before


def test_limits_that_the_model_can_not_have(tiny_model_path: Path) -> None:
    before = len(launchers())
    with pytest.raises(LLMError, match="`max_batch_prefill_tokens` must be <= `max_batch_total"):
        LLM(tiny_model_path, max_batch_total_tokens=640)
    assert len(launchers()) == before


SCRIPT = """
import os, signal, sys
from text_generation_router import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32")
print(llm.generate("the cat", SamplingParams(max_tokens=2))[0].outputs[0].finish_reason, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["falls off the end", "is killed"])
def test_nothing_outlives_its_process(tiny_model_path: Path, end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tiny_model_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() in ("length\n", "stop\n")
    children = psutil.Process(process.pid).children(recursive=True)
    # The launcher and the shard; what renders chats, what tries grammars and, a moment later, a
    # process that each of these two has forked.
    assert 3 <= len(children) <= 6
    if end == "is killed":
        process.send_signal(signal.SIGKILL)
    _, said = process.communicate("\n", timeout=30)
    assert said == ""
    assert process.returncode == (-signal.SIGKILL if end == "is killed" else 0)
    assert_ended(children)


INTERRUPTED = """
import os, signal, sys, threading, time
from text_generation_router import LLM, SamplingParams
# A shell that starts the tests in its background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with LLM(sys.argv[1], dtype="float32") as llm:
    def interrupt():
        while "\\ntgi_batch_current_size 1\\n" not in llm.metrics(): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        llm.generate("the cat", SamplingParams(max_tokens=480, ignore_eos=True))
    except KeyboardInterrupt:
        print("interrupted")
    while "\\ntgi_batch_current_size 0\\n" not in llm.metrics(): time.sleep(0.01)
    print(len(llm.generate("the cat", SamplingParams(max_tokens=2))))
"""


def test_control_c_ends_what_is_generated_and_not_the_model(tiny_model_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tiny_model_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("interrupted\n1\n", "")


FORKED = """
import os, signal, sys
from text_generation_router import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32")
if not (child := os.fork()):
    signal.alarm(20)
    sys.exit()
print(os.waitpid(child, 0)[1], len(llm.generate("the cat", SamplingParams(max_tokens=2))))
"""


def test_a_fork_ends_without_the_model(tiny_model_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tiny_model_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("0 1\n", 0)
