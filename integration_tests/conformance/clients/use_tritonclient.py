"""`tritonclient[http]`: health, metadata, tensors in JSON and binary, ids, errors."""

import asyncio

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from checks import ANSWER, API_KEY, END, QUESTION, URL, check, equal, raised, run
from tritonclient.utils import InferenceServerException

HOST = URL.removeprefix("http://")
GREEDY = {"max_new_tokens": 60, "do_sample": False}
MODEL = "embedded"
client = triton.InferenceServerClient(HOST, network_timeout=60, concurrency=4)


def tensor(*texts: str, shape: tuple[int, ...] | None = None, binary: bool = True) -> object:
    """An input of such a shape; a text is an element."""
    array = np.array([text.encode() for text in texts], dtype=np.object_)
    array = array.reshape(shape or (len(texts),))
    given = triton.InferInput("text_input", list(array.shape), "BYTES")
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def texts_of(result: triton.InferResult, name: str = "text_output") -> list[str]:
    """The texts of an output, without the token that ends them."""
    found = result.as_numpy(name)
    texts = [one.decode() if isinstance(one, bytes) else one for one in found.reshape(-1)]
    return [text.strip().removesuffix(END) for text in texts]


def key() -> dict[str, str]:
    """The header with the key; a new one each time, since the client adds to it."""
    return {"Authorization": f"Bearer {API_KEY}"}


@check
def health() -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(MODEL, headers=key())
    assert client.is_model_ready(MODEL, "1", headers=key())


@check
def metadata() -> None:
    assert client.get_server_metadata(headers=key())["name"]
    found = client.get_model_metadata(MODEL, headers=key())
    equal([one["datatype"] for one in found["inputs"]], ["BYTES"])
    equal([one["datatype"] for one in found["outputs"]], ["BYTES"])
    assert found["versions"] and found["platform"], found


@check
def infer() -> None:
    for binary in (True, False):
        result = client.infer(
            MODEL, [tensor(QUESTION, binary=binary)], parameters=GREEDY, headers=key()
        )
        equal(texts_of(result), [ANSWER])
        equal(result.get_response()["model_name"], MODEL)


@check
def ids_and_outputs() -> None:
    for binary in (True, False):
        wanted = [triton.InferRequestedOutput("answer", binary_data=binary)]
        result = client.infer(
            MODEL,
            [tensor(QUESTION)],
            model_version="1",
            outputs=wanted,
            request_id="seven",
            parameters=GREEDY,
            headers=key(),
        )
        equal(texts_of(result, "answer"), [ANSWER])
        equal(result.get_response()["id"], "seven")


@check
def shapes() -> None:
    given = tensor(QUESTION, "What does math.sqrt do?", shape=(2, 1))
    result = client.infer(MODEL, [given], parameters=GREEDY, headers=key())
    found = texts_of(result)
    equal((found[0], len(found)), (ANSWER, 2))
    equal(result.as_numpy("text_output").shape, (2, 1))


@check
def compression() -> None:
    for algorithm in ("gzip", "deflate"):
        result = client.infer(
            MODEL,
            [tensor(QUESTION)],
            parameters=GREEDY,
            headers=key(),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        equal(texts_of(result), [ANSWER])


@check
def several_at_once() -> None:
    waiting = [
        client.async_infer(MODEL, [tensor(QUESTION)], parameters=GREEDY, headers=key())
        for _ in range(4)
    ]
    for one in waiting:
        equal(texts_of(one.get_result()), [ANSWER])


@check
async def asynchronous() -> None:
    async with triton_aio.InferenceServerClient(HOST) as one:
        asked = [
            one.infer(MODEL, [tensor(QUESTION)], parameters=GREEDY, headers=key()) for _ in range(2)
        ]
        for result in await asyncio.gather(*asked):
            equal(texts_of(result), [ANSWER])


@check
def errors() -> None:
    error = raised(
        InferenceServerException,
        lambda: client.infer(MODEL, [tensor(QUESTION)], parameters=GREEDY),
    )
    assert "API key" in error.message(), error
    error = raised(
        InferenceServerException,
        lambda: client.infer(
            MODEL, [tensor(QUESTION)], parameters={"temperature": -1.0}, headers=key()
        ),
    )
    assert "temperature" in error.message(), error
    number = triton.InferInput("text_input", [1], "FP32")
    number.set_data_from_numpy(np.array([1], dtype=np.float32))
    error = raised(
        InferenceServerException,
        lambda: client.infer(MODEL, [number], parameters=GREEDY, headers=key()),
    )
    assert "BYTES" in error.message(), error


run()
