"""`llama-index-llms-huggingface-api`: chat and text generation, sync, async, streamed."""

from checks import ANSWER, API_KEY, END, QUESTION, URL, WEATHER_TOOL, check, equal, is_weather, run
from llama_index.core.llms import ChatMessage
from llama_index.llms.huggingface_api import HuggingFaceInferenceAPI

SERVER = {
    "model_name": URL,
    "provider": "hf-inference",  # else it does not ask /info for the context window
    "token": API_KEY,
    "timeout": 60,
    "num_output": 60,
}
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def new_chat() -> HuggingFaceInferenceAPI:
    """Its streams close the client they used."""
    return HuggingFaceInferenceAPI(**SERVER, temperature=0.01)


def new_text() -> HuggingFaceInferenceAPI:
    return HuggingFaceInferenceAPI(**SERVER, temperature=0.01, task="text-generation")


@check
def chat() -> None:
    llm = new_chat()
    equal(llm.context_window, 600)  # from /info
    equal(llm.chat(MESSAGES).message.content, ANSWER)
    equal(llm.complete(QUESTION).text, ANSWER)


@check
def chat_stream() -> None:
    pieces = list(new_chat().stream_chat(MESSAGES))
    equal("".join(piece.delta for piece in pieces), ANSWER)
    equal(pieces[-1].message.content, ANSWER)


@check
def chat_tools() -> None:
    llm = new_chat()
    answer = llm.chat(
        MESSAGES,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        max_tokens=150,
        extra_body={"parallel_tool_calls": False},
    )
    (call,) = answer.message.additional_kwargs["tool_calls"]
    equal(call.function.name, "get_weather")
    is_weather(call.function.arguments)


@check
def text_generation() -> None:
    llm = new_text()
    equal(llm.complete(QUESTION).text, f"{QUESTION}\n{ANSWER}")
    pieces = list(llm.stream_complete(QUESTION))
    equal("".join(piece.delta for piece in pieces), f"\n{ANSWER}{END}")


@check
async def asynchronous() -> None:
    equal((await new_chat().achat(MESSAGES)).message.content, ANSWER)
    equal((await new_text().acomplete(QUESTION)).text, f"{QUESTION}\n{ANSWER}")
    pieces = [piece async for piece in await new_chat().astream_chat(MESSAGES)]
    equal("".join(piece.delta for piece in pieces), ANSWER)


run()
