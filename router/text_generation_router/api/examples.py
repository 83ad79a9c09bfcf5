"""What the documentation fills in: for each POST route bodies that work as they are.

The first body of a route is what its editor shows at first. A test sends each of them to the
embedded model, and fails where a POST route has none.
"""

from typing import Any

_QUESTION = "What does textwrap.dedent do?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_GENERATE: dict[str, Any] = {"inputs": _QUESTION, "parameters": {"max_new_tokens": 60}}
_CHAT: dict[str, Any] = {
    "model": "tgi",
    "messages": _MESSAGES,
    "max_tokens": 100,
    "temperature": 0,
}
_COMPLETION: dict[str, Any] = {
    "model": "tgi",
    "prompt": _QUESTION,
    "max_tokens": 60,
    "temperature": 0,
}
_RESPONSE: dict[str, Any] = {
    "model": "tgi",
    "input": _QUESTION,
    "max_output_tokens": 100,
    "temperature": 0,
}
_COUNTED: dict[str, Any] = {"model": "tgi", "messages": _MESSAGES}
_MESSAGE: dict[str, Any] = _COUNTED | {"max_tokens": 100, "temperature": 0}
_VERSION: dict[str, Any] = {
    "inputs": "Which version of Python is this?",
    "parameters": {"max_new_tokens": 20, "grammar": {"type": "regex", "value": "3\\.[0-9]{1,2}"}},
}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"function": {"type": "string"}, "is_useful": {"type": "boolean"}},
    "required": ["function", "is_useful"],
}
_JSON_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": _SCHEMA},
}
_TENSOR: dict[str, Any] = {
    "name": "prompt",
    "shape": [1, len(_QUESTION)],
    "datatype": "UINT8",
    "data": list(_QUESTION.encode()),
}
_TEXTS: dict[str, Any] = {
    "name": "text_input",
    "shape": [2],
    "datatype": "BYTES",
    "data": [_QUESTION, "Hello"],
}
_DOCUMENTS = ["Remove any common leading whitespace from every line.", "Wrap a paragraph."]
_SCORE: dict[str, Any] = {"model": "tgi", "text_1": _QUESTION, "text_2": _DOCUMENTS}
_RANK: dict[str, Any] = {"model": "tgi", "query": _QUESTION, "documents": _DOCUMENTS}
_STREAM = {"stream": True}
_A_STREAM = "A stream of events"

BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "/": {"A prompt": _GENERATE, _A_STREAM: _GENERATE | _STREAM},
    "/generate": {"A prompt": _GENERATE, "A text that matches a regular expression": _VERSION},
    "/generate_stream": {"A prompt": _GENERATE},
    "/tokenize": {"A text": {"inputs": _QUESTION}},
    "/chat_tokenize": {"A chat": {"messages": _MESSAGES}},
    "/invocations": {
        "A prompt, as / takes it": _GENERATE,
        "A chat, as /v1/chat/completions takes it": _CHAT,
        "A prompt, as /v1/completions takes it": _COMPLETION,
    },
    "/vertex": {
        "A prompt": {"instances": [_GENERATE]},
        "A prompt and a chat": {"instances": [_GENERATE, _CHAT]},
    },
    "/v1/embeddings": {"Two texts": {"model": "tgi", "input": _DOCUMENTS}},
    "/score": {"Two pairs": _SCORE},
    "/v1/score": {"Two pairs": _SCORE},
    "/rerank": {"Two documents": _RANK},
    "/v1/rerank": {"Two documents": _RANK},
    "/v2/rerank": {"Two documents": _RANK},
    "/v1/completions": {"A prompt": _COMPLETION, _A_STREAM: _COMPLETION | _STREAM},
    "/v1/chat/completions": {
        "A question": _CHAT,
        _A_STREAM: _CHAT | _STREAM,
        "JSON that follows a schema": _CHAT | {"response_format": _JSON_FORMAT},
    },
    "/v1/responses": {"A question": _RESPONSE, _A_STREAM: _RESPONSE | _STREAM},
    "/v1/messages": {"A question": _MESSAGE, _A_STREAM: _MESSAGE | _STREAM},
    "/v1/messages/count_tokens": {"A question": _COUNTED},
    "/v2/models/{model_name}/infer": {
        "Texts": {"inputs": [_TEXTS], "parameters": {"max_new_tokens": 60}},
    },
    "/v2/models/{model_name}/versions/{model_version}/infer": {
        "A prompt": {
            "id": "1",
            "inputs": [_TENSOR],
            "outputs": [{"name": "text"}],
            "parameters": {"max_new_tokens": 60},
        }
    },
}
"""Path → the name of an example → the body."""

PARAMETERS: dict[str, tuple[str, str]] = {
    "model": ("tgi", "A name of the served model. It may contain slashes."),
    "model_name": ("tgi", "Any name: the server has one model."),
    "model_version": ("1", "Any version: the server has one model."),
}
"""The name of a path's parameter → a value that works, and its description."""
