"""The fuzzer's inputs: bodies, heads and grammars that are nearly valid, invalid or absurd."""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from integration_tests.schemas import LEAVES

Path = tuple[str | int, ...]
_SHOWN = 1500
_MOST_ITEMS = 5000

# Fields that limit an answer stay in a body, as a small number or an invalid value.
_BOUNDS = ("max_new_tokens", "max_tokens", "max_output_tokens", "max_completion_tokens")
_INFER = "/v2/models/x/versions/1/infer"
_CHAT: dict[str, Any] = {
    "model": "tgi",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What is a list?"}]},
    ],
    "max_tokens": 3,
}
_PARAMETERS: dict[str, Any] = {
    **{"max_new_tokens": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "typical_p": 0.9},
    **{"do_sample": True, "seed": 4, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    **{"stop": ["x"], "truncate": 20, "watermark": True, "details": True, "best_of": 1},
    **{"top_n_tokens": 2, "decoder_input_details": False, "return_full_text": True},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
_GENERATE = {"inputs": "What is a list?", "parameters": _PARAMETERS}
TEMPLATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", _GENERATE),
    ("/generate", {"inputs": "def f(", "parameters": {"max_new_tokens": 2}}),
    ("/generate_stream", _GENERATE),
    ("/", {**_GENERATE, "stream": True}),
    ("/tokenize", {"inputs": "What is a list?", "add_special_tokens": True}),
    ("/chat_tokenize", _CHAT),
    ("/v1/chat/completions", {**_CHAT, "stream": False, "n": 1, "logprobs": True}),
    ("/v1/chat/completions", {**_CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**_CHAT, "tools": [_TOOL], "tool_choice": "auto"}),
    (
        "/v1/completions",
        {"model": "tgi", "prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1},
    ),
    ("/v1/completions", {"model": "tgi", "prompt": [5, 6, 7], "max_tokens": 2, "stream": True}),
    ("/v1/responses", {"model": "tgi", "input": "Hi", "max_output_tokens": 3, "store": False}),
    ("/v1/messages", {**_CHAT, "messages": [{"role": "user", "content": "Hi"}], "system": "x"}),
    ("/v1/messages/count_tokens", {"model": "tgi", "messages": _CHAT["messages"][1:]}),
    ("/invocations", _CHAT),
    ("/vertex", {"instances": [_CHAT]}),
    (
        _INFER,
        {
            "id": "1",
            "inputs": [{"name": "i", "shape": [1], "datatype": "UINT8", "data": [72, 105]}],
            "outputs": [{"name": "o"}],
            "parameters": {"max_new_tokens": 2},
        },
    ),
)

ODD_TEXTS = (
    *("", " ", "\0", "\ud800", "\udfff\ud800", "e\u0301" * 9, "\u202eabc", "\ufeff", "\uffff"),
    *(
        "👩‍👩‍👧",
        "{{ 9**9**9 }}",
        "<|im_start|>",
        "<tool_call>",
        "../../etc/passwd",
        "%s%n",
        "a" * 5000,
    ),
    *("data: x\n\n", "\r\nSet-Cookie: a=b", "-1", "1e400", "null", "http://127.0.0.1:1/x.png"),
    *("data:image/png;base64,AAAA", "[DONE]", "\x1b[2J", "日本語" * 300),
)
TEXTS = st.sampled_from(ODD_TEXTS) | st.text(max_size=20)
NUMBERS = st.sampled_from(
    [
        *(0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400, 0.0),
        *(-0.0, 5e-324, 1e309, float("inf"), float("-inf"), float("nan"), 0.1, 1e38),
    ]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS | st.integers(-5, 300)


def _nested(depth: int, is_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


JUNK = (
    SCALARS
    | st.builds(_nested, st.integers(1, 300), st.booleans())
    | st.lists(SCALARS, max_size=6)
    | st.builds(lambda item, count: [item] * count, SCALARS, st.sampled_from([50, 1000, 5000]))
    | st.dictionaries(TEXTS, SCALARS, max_size=4)
)


def _paths(value: Any, before: Path = ()) -> list[Path]:
    """The path of a value in a body, from the outside in."""
    found = [before]
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        found += _paths(item, (*before, key))
    return found


def _bounded(path: Path, value: Any) -> Any:
    """The possible values of a length limit."""
    if path and path[-1] in _BOUNDS and (value is None or isinstance(value, int | float)):
        return 3
    return value


def _mutate(draw: st.DrawFn, body: Any) -> Any:
    """One value replaced, removed, added or repeated."""
    path = draw(st.sampled_from(_paths(body)))
    if not path:
        return body if draw(st.integers(0, 9)) else draw(JUNK)
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "repeat"]))
    if kind == "remove" and path[-1] not in _BOUNDS:
        del holder[path[-1]]
    elif kind == "add" and isinstance(holder, dict):
        name = draw(st.sampled_from(sorted(_PARAMETERS)) | TEXTS)
        holder[name] = _bounded((name,), draw(JUNK))
    elif kind == "repeat" and isinstance(holder, list):
        holder[:] = (holder * draw(st.sampled_from([2, 9, 300])))[:_MOST_ITEMS]
    else:
        holder[path[-1]] = _bounded(path, draw(JUNK))
    return body


@dataclass(frozen=True, repr=False)
class Message:
    """The bytes that are sent."""

    data: bytes

    def __repr__(self) -> str:
        # Hypothesis writes it out for each case, some of which are long.
        rest = f" and {len(self.data) - _SHOWN} bytes more" if len(self.data) > _SHOWN else ""
        return f"{self.data[:_SHOWN]!r}{rest}"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Body(Message):
    """The body of a POST."""

    path: str
    content_type: str = "application/json"

    def __repr__(self) -> str:
        return f"POST {self.path} ({self.content_type!r}) {super().__repr__()}"

    @property
    def message(self) -> bytes:
        """The request as bytes."""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.data)}\r\n\r\n"
        )
        return head.encode() + self.data


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """A body of a POST route with up to four changes, sometimes of its bytes."""
    path, template = draw(st.sampled_from(TEMPLATES))
    body: Any = copy.deepcopy(template)
    for _ in range(draw(st.integers(0, 4))):
        if isinstance(body, dict):
            body = _mutate(draw, body)
    data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        data = draw(st.sampled_from(_SPOILS))(data, draw(st.integers(0, len(data))))
    kinds = ["application/json"] * 9 + ["text/plain", "application/json; charset=utf-16", "x", ""]
    return Body(data, path, draw(st.sampled_from(kinds)))


_SPOILS: list[Callable[[bytes, int], bytes]] = [
    lambda data, place: data[:place],
    lambda data, place: data[:place] + b"\xff" + data[place:],
    lambda data, place: data[:place] + b"\0" + data[place + 1 :],
    lambda data, place: b"\xef\xbb\xbf" + data,
    lambda data, place: data + data,
    lambda data, place: data.decode(errors="replace").encode("utf-16"),
    lambda data, place: b"[" * (place * 50 + 1),
    lambda data, place: b'{"inputs":' * place,
    lambda data, place: data.replace(b"{", b'{"inputs":1,"inputs":"x",', 1),
    lambda data, place: b"1" * (place * 20 + 1),
]

# ---- Heads ----

_ODD_BYTES = st.sampled_from(
    [b"", b"\0", b"\r", b"\n", b"\r\n", b" ", b"\t", b"\xff", b"\x80\x81", b"a" * 9000, b"%00"]
) | st.binary(max_size=8)
_METHODS = st.sampled_from(
    [b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE", b"CONNECT", b"PRI", b"get"]
)
_TARGETS = st.sampled_from(
    [
        *(b"/health", b"/info", b"/generate", b"/generate_stream", b"/tokenize", b"/metrics"),
        *(b"*", b"/", b"/v1/models", b"/nowhere", b"http://other/health", b"//health"),
        *(b"/health?x=%ff", b"/%2e%2e", b"/docs/../info", b"/v1/chat/completions", b"/health#x"),
        *(b"health", b"/" + b"a" * 70000),
    ]
)
_VERSIONS = st.sampled_from(
    [b"HTTP/1.1"] * 12 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.10", b"http/1.1"]
)
_SMALL = b'{"inputs":"Hi","parameters":{"max_new_tokens":2}}'
_NAMES = st.sampled_from(
    [
        *(b"X-Odd", b"Cookie", b"Authorization", b"Content-Type", b"Accept-Encoding", b"Expect"),
        *(b"Upgrade", b"Connection", b"Host", b"Range", b"Content-Encoding", b"Origin", b"Te"),
        *(b"Trailer", b"Transfer-Encoding", b"Content-Length", b"X Odd", b"X-Odd ", b""),
        *(b"Forwarded",),
    ]
)
_VALUES = st.sampled_from(
    [
        *(b"x", b"", b"close", b"keep-alive, upgrade", b"100-continue", b"h2c", b"gzip"),
        *(b"chunked", b"Bearer " + b"x" * 200, b"5, 5", b"+5", b"-1", b"0x10", b"9" * 40),
        *(b"\xe9", b"a\x00b", b"a\rb", b"identity, chunked", b"bytes=0-", b"x" * 9000),
        *(b"multipart/form-data", b"websocket"),
    ]
)


def _chunked(draw: st.DrawFn, data: bytes) -> bytes:
    sizes = [b"%x" % len(data), b"0", b"fffffffffffffffff", b"-1", b"5;a=b", b"5;" + b"x" * 5000]
    size = sizes[0] if draw(st.booleans()) else draw(st.sampled_from(sizes))
    ends = [b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\n", b"", b"\n", b"00000000000\r\n\r\n"]
    return size + b"\r\n" + data + b"\r\n" + draw(st.sampled_from(ends))


@st.composite
def heads(draw: st.DrawFn) -> Message:
    """A message of which the line, the headers or the framing of the body may be odd."""
    line = [draw(_METHODS), draw(_TARGETS), draw(_VERSIONS)]
    if draw(st.integers(0, 5)) == 0:
        line[draw(st.integers(0, 2))] += draw(_ODD_BYTES)
    headers = [] if draw(st.integers(0, 9)) == 0 else [(b"Host", b"fuzz")]
    headers += draw(st.lists(st.tuples(_NAMES, _VALUES | _ODD_BYTES), max_size=4))
    if draw(st.integers(0, 20)) == 0:
        headers = headers * draw(st.sampled_from([40, 200, 2000]))
    framing = draw(st.sampled_from(["none", "length", "length", "wrong", "chunked", "both"]))
    body = b"" if framing == "none" else _SMALL
    if framing in ("length", "both"):
        headers.append((b"Content-Length", b"%d" % len(body)))
    if framing == "wrong":
        wrong = [b"5", b"500", b"-5", b"+49", b"0x31", b"49, 49", b"1" * 30, b" 49 ", b"4 9"]
        headers.append((b"Content-Length", draw(st.sampled_from(wrong))))
    if framing in ("chunked", "both"):
        headers.append((b"Transfer-Encoding", b"chunked"))
        body = _chunked(draw, body)
    colon = draw(st.sampled_from([b": "] * 9 + [b":", b" : ", b"\t:", b""]))
    newline = draw(st.sampled_from([b"\r\n"] * 9 + [b"\n", b"\r", b"\r\n "]))
    lines = [b" ".join(line), *(name + colon + value for name, value in headers)]
    end = draw(st.sampled_from([newline * 2] * 9 + [newline, b""]))
    return Message(newline.join(lines) + end + body)


# ---- Grammars ----

_CLASSES = st.sampled_from(
    [
        *("a", "[a-z]", "[^x]", ".", "\\d", "\\w", "é", "日", "(?i:ab)", "\\p{L}", "[", "(", "\\"),
        *("\\b", "^"),
    ]
)
_REPEATS = st.sampled_from(
    ["", "", "*", "+", "?", "{2}", "{0,9}", "{3,}", "{200}", "{1,2000}", "{5,1}", "{1000000}"]
)


def _joined(parts: list[str], repeat: str) -> str:
    return f"({'|'.join(parts)}){repeat}"


REGEXES = st.recursive(
    st.builds(lambda one, count: one + count, _CLASSES, _REPEATS),
    lambda inner: (
        st.builds(_joined, st.lists(inner, min_size=1, max_size=3), _REPEATS)
        | st.lists(inner, min_size=1, max_size=4).map("".join)
    ),
    max_leaves=8,
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(LEAVES)
    | st.builds(lambda pattern: {"type": "string", "pattern": pattern}, REGEXES)
    | st.builds(
        lambda least: {"type": "string", "minLength": least}, st.sampled_from([3, 900, 10**9])
    )
    | st.dictionaries(
        st.sampled_from(["type", "enum", "$ref", "format", "const", "anyOf"]), SCALARS
    ),
    lambda inner: (
        st.builds(
            lambda kind, parts: {kind: parts},
            st.sampled_from(["allOf", "anyOf", "oneOf", "prefixItems"]),
            st.lists(inner, min_size=1, max_size=30),
        )
        | st.builds(
            lambda names: {"type": "object", "properties": names, "required": list(names)[:3]},
            st.dictionaries(st.text(max_size=5), inner, max_size=5),
        )
        | st.builds(lambda item: {"type": "array", "items": item, "maxItems": 9}, inner)
        | st.builds(lambda item: {"$defs": {"a": item}, "$ref": "#/$defs/a"}, inner)
        | st.just({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    ),
    max_leaves=12,
)
_LARK = st.lists(
    st.sampled_from(
        [
            *("start: a", "start: /[0-9]+/", "a: b", "b: a a", 'a: "x" | a "y"', "B: /x{5}/"),
            *("start: B+", "a: /(/", "%ignore /\\s/", "start: start start", "A: B & ~/x+/", "x:"),
            *("%import common.INT", "start: @1", '%json {"type": "string"}', "start: %regex {}"),
            *("start[capture]: /a/", "\x00"),
        ]
    )
    | REGEXES.map(lambda regex: f"start: /{regex}/"),
    min_size=1,
    max_size=5,
).map("\n".join)


@st.composite
def grammars(draw: st.DrawFn) -> Body:
    """A short generation with a grammar, on one of the routes that accept one."""
    kind = draw(st.sampled_from(["json", "regex", "lark"]))
    value = draw({"json": SCHEMAS, "regex": REGEXES, "lark": _LARK}[kind])
    path = draw(st.sampled_from(["/generate", "/generate_stream", "/v1/chat/completions"]))
    if path != "/v1/chat/completions":
        grammar = {"type": kind, "value": value}
        parameters = {"max_new_tokens": draw(st.integers(1, 30)), "grammar": grammar}
        body: dict[str, Any] = {"inputs": "Write it: ", "parameters": parameters}
    elif kind == "json":
        schema = {"name": "x", "schema": value, "strict": True}
        body = {**_CHAT, "response_format": {"type": "json_schema", "json_schema": schema}}
        body["max_tokens"] = draw(st.integers(1, 30))
    else:
        body = {**_CHAT, "response_format": {"type": kind, "value": value}}
    return Body(json.dumps(body).encode(), path)
