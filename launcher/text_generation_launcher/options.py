"""Every command line flag of the launcher, in one table.

A flag `--max-best-of` is also read from the environment variable `MAX_BEST_OF`; the flag wins. A
variable that is set to nothing counts as not set, as container files write it; that of a flag which
repeats holds its values with commas between. The table holds no default for what a child owns: a
flag that isn't given isn't passed on. Flags and variables that a mode has no use for are unknown
there: `shards` has none of the router's, and only `serve` has those of the HTTP server.
"""

from text_generation_launcher.option import Child, InvalidOptions, Mode, Option, Values
from text_generation_launcher.values import (
    choice,
    is_address,
    not_negative,
    number,
    path,
    sizes,
    true_or_false,
    whole,
)


def refused(name: str, what: str, instead: str, **rest: object) -> Option:
    """An option of TGI that is known here, but not served yet."""
    sentence = f"--{name} is not supported yet ({what}): {instead}"
    return Option(name, f"not supported yet: {what}", refusal=sentence, **rest)  # type: ignore[arg-type]


SHARD, ROUTER, DOWNLOAD = (Child.SHARD,), (Child.ROUTER,), (Child.DOWNLOAD,)
HTTP = (Mode.SERVE,)
WITH_ROUTER = (Mode.SERVE, Mode.BATCH)
PORT = whole(1, 65535)
_NEVER_REMOTE_CODE = (
    "--trust-remote-code has no effect: pytgi never runs code from a model repository, and serves "
    "models whose architecture is built in"
)
_NO_TRACES = "has no effect: traces are not supported yet; /metrics is there"
# What TGI takes beside: most need a checkpoint that was quantized before.
_CHECKPOINT_QUANTIZATIONS = (
    "awq",
    "bitsandbytes",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
    "compressed-tensors",
    "eetq",
    "exl2",
    "gptq",
    "marlin",
)
_ONLY_AT_LOAD = (
    "--quantize takes int8 or int4, and on cuda fp8, which are made from any float checkpoint "
    f"while it loads; other methods ({', '.join(_CHECKPOINT_QUANTIZATIONS)}) are not supported: "
    "choose one of the three and an unquantized checkpoint"
)

OPTIONS: tuple[Option, ...] = (
    # the model
    Option("model-id", "hub id or local directory; without it the embedded model is served"),
    Option(
        "revision",
        "branch, commit or refs/pr/N on the hub",
        to=(Child.DOWNLOAD, Child.ROUTER),
    ),
    Option("dtype", "type of the weights", choice("float32", "float16", "bfloat16"), SHARD),
    Option("device", "where the shard computes", choice("cpu", "cuda"), SHARD),
    Option("huggingface-hub-cache", "directory of the hub cache", to=DOWNLOAD),
    Option(
        "quantize",
        "hold the weights in int8 or int4, or on cuda in fp8 (compute capability 8.9 or newer), "
        "made from any float checkpoint while it loads",
        choice("int8", "int4", "fp8", *_CHECKPOINT_QUANTIZATIONS),
        SHARD,
        refusal=_ONLY_AT_LOAD,
        plain=("int8", "int4", "fp8"),
    ),
    Option(
        "deterministic",
        "start only where a request's tokens are the same in any batch, bit for bit",
        true_or_false,
        SHARD,
        switch=True,
    ),
    Option("speculate", "tokens guessed per request and step; 0: none", whole(0), ROUTER),
    Option(
        "kv-cache-dtype",
        "hold keys and values in 8 bits, without scales, instead of the type of --dtype (CUDA)",
        choice("fp8_e4m3fn", "fp8_e5m2"),
        SHARD,
    ),
    Option(
        "trust-remote-code",
        "no effect: pytgi runs no code from a model repository",
        true_or_false,
        switch=True,
        note=_NEVER_REMOTE_CODE,
    ),
    refused("weights-cache-override", "a separate weights folder", "give --model-id a directory"),
    refused("lora-adapters", "LoRA adapters", "merge the adapter into the weights first"),
    Option("rope-scaling", "stretch the context", choice("linear", "dynamic"), SHARD),
    Option("rope-factor", "by how much, 1.0 when only --rope-scaling is given", number(0), SHARD),
    # the shards
    Option(
        "num-shard",
        "processes that the model is split over; by default one for each GPU that "
        "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES names, and one on a CPU",
        whole(1),
    ),
    Option(
        "sharded",
        "true: over all GPUs, of which there must be several; false: one shard without --num-shard",
        true_or_false,
    ),
    Option("master-addr", "address of this machine where the shards meet (default localhost)"),
    Option("master-port", "port there; by default one that is free", PORT),
    Option(
        "step-deadline",
        "seconds that a shard waits for another one in a step, and the router for a shard that has "
        "just started, before they give up (default 20)",
        number(0),
        (Child.SHARD, Child.ROUTER),
    ),
    Option(
        "shard-uds-path",
        "prefix of the shards' unix sockets, -<rank> is appended; by default they are in a new "
        "folder that only this user can enter, in XDG_RUNTIME_DIR or TMPDIR",
    ),
    Option("cuda-memory-fraction", "of the card's memory", number(0, maximum=1), SHARD),
    Option(
        "cuda-graphs",
        "on a GPU, numbers of tokens, with commas between, for which steps without prompts are "
        "recorded and then start at once; 0: none; by default 1, 2, 4, 8 and every 8 up to "
        "--max-batch-size",
        sizes,
        SHARD,
    ),
    Option(
        "disable-custom-kernels",
        "no effect: pytgi's kernels compute the model, and there is no way without them",
        true_or_false,
        switch=True,
        note="--disable-custom-kernels has no effect: pytgi's kernels compute the model, and there "
        "is no way without them",
    ),
    Option(
        "enable-reflection",
        "let gRPC tools like grpcurl ask the shard which calls it has",
        true_or_false,
        SHARD,
        switch=True,
    ),
    Option("watermark-gamma", "share of the vocabulary that is favoured", number(0, 1), SHARD),
    Option("watermark-delta", "by how much it is favoured", not_negative, SHARD),
    Option(
        "enable-prefill-logprobs",
        "no effect: always on",
        true_or_false,
        switch=True,
        note="--enable-prefill-logprobs has no effect: requests can always ask for the "
        "log-probabilities of their prompt (decoder_input_details)",
    ),
    # the limits
    Option("validation-workers", "tokenizer threads of the router", whole(1), ROUTER),
    Option("max-concurrent-requests", "more are answered with 429", whole(1), ROUTER),
    Option("max-best-of", "largest best_of of a request", whole(1), ROUTER),
    Option("max-stop-sequences", "most stop sequences of a request", whole(0), ROUTER),
    Option("max-top-n-tokens", "largest top_n_tokens of a request", whole(0), ROUTER),
    Option("max-input-tokens", "longest prompt in tokens", whole(1), ROUTER),
    Option("max-input-length", "the old name of --max-input-tokens", whole(1), modes=WITH_ROUTER),
    Option("max-total-tokens", "longest prompt and answer in tokens", whole(1), ROUTER),
    Option(
        "waiting-served-ratio",
        "of waiting to running requests, above which others join; without prefill chunking only",
        not_negative,
        ROUTER,
        default="0.3",
    ),
    Option("max-batch-prefill-tokens", "tokens in one prefill", whole(1), ROUTER),
    Option(
        "disable-prefix-caching",
        "compute every prompt anew; PREFIX_CACHING=false does the same",
        true_or_false,
        ROUTER,
        switch=True,
    ),
    Option(
        "disable-prefill-chunking",
        "compute prompts in one step where they fit; PREFILL_CHUNKING=0 does the same",
        true_or_false,
        ROUTER,
        switch=True,
    ),
    Option(
        "inter-token-latency-target-ms",
        "what a step that carries parts of prompts may take",
        whole(1),
        ROUTER,
    ),
    Option("max-batch-total-tokens", "tokens of all running requests", whole(1), ROUTER),
    Option(
        "max-waiting-tokens",
        "steps that a waiting request may wait; without prefill chunking only",
        whole(0),
        ROUTER,
    ),
    Option("max-batch-size", "most running requests", whole(1), ROUTER),
    Option("max-client-batch-size", "most prompts in one request", whole(1), ROUTER),
    Option("payload-limit", "bytes of a request body", whole(1), ROUTER),
    Option("disable-grammar-support", "refuse grammars", true_or_false, ROUTER, switch=True),
    Option(
        "pooling",
        "which hidden state /v1/embeddings answers; by default as the model's "
        "1_Pooling/config.json says, else last",
        choice("last", "mean"),
        ROUTER,
    ),
    Option(
        "reranker",
        "serve /score and /rerank in the form of Qwen3-Reranker, by default if the model is one",
        true_or_false,
        ROUTER,
        switch=True,
        modes=HTTP,
    ),
    # the HTTP side
    Option(
        "served-model-name",
        "name of the model on OpenAI's and Anthropic's routes; may be given several times, the "
        "first is told; by default its id",
        to=ROUTER,
        repeat=True,
    ),
    Option(
        "any-model-name",
        "false: OpenAI's and Anthropic's routes answer 404 to any other name (default true)",
        true_or_false,
        ROUTER,
    ),
    Option(
        "hostname",
        "address to listen on (HOSTNAME counts only when it is an address: containers set it to "
        "their own name)",
        to=ROUTER,
        default="0.0.0.0",
        environment_applies=is_address,
        modes=HTTP,
    ),
    Option("port", "port to listen on", PORT, ROUTER, default="3000", short="-p", modes=HTTP),
    Option("prometheus-port", "serves /metrics on this port as well", PORT, ROUTER, modes=HTTP),
    Option(
        "api-key",
        "requests must send it, or one of several, as a bearer token",
        to=ROUTER,
        repeat=True,
        secret=True,
        modes=HTTP,
    ),
    Option(
        "api-key-file",
        "more of them, one a line; it is read again when it changes",
        to=ROUTER,
        guards=True,
        modes=HTTP,
    ),
    Option(
        "max-concurrent-requests-per-key",
        "more of one API key are answered with 429",
        whole(1),
        ROUTER,
        modes=HTTP,
    ),
    Option(
        "max-tokens-per-minute-per-key",
        "prompt and generated tokens of one API key, more are answered with 429",
        whole(1),
        ROUTER,
        modes=HTTP,
    ),
    Option(
        "public-docs",
        "show /docs and the OpenAPI file without an API key",
        true_or_false,
        ROUTER,
        switch=True,
        modes=HTTP,
    ),
    Option("ssl-certfile", "speak TLS with this certificate (PEM)", to=ROUTER, modes=HTTP),
    Option("ssl-keyfile", "its private key (PEM)", to=ROUTER, modes=HTTP),
    Option("cors-allow-origin", "may be given several times", to=ROUTER, repeat=True, modes=HTTP),
    refused("ngrok", "tunnels", "put a tunnel in front", parse=true_or_false, switch=True),
    refused("ngrok-authtoken", "tunnels", "put a tunnel in front", secret=True),
    refused("ngrok-edge", "tunnels", "put a tunnel in front"),
    Option(
        "tokenizer-config-path",
        "a tokenizer_config.json or .jinja with the chat template",
        to=ROUTER,
    ),
    Option(
        "chat-format",
        "how the model writes tool calls, found from the chat template by default",
        choice("auto", "hermes", "llama3", "mistral", "mistral-args", "generic"),
        ROUTER,
    ),
    # what Google's Vertex AI sets
    Option("aip-http-port", "port to listen on, wins over --port", PORT, modes=HTTP),
    Option("aip-predict-route", "path that answers as /vertex does", path, ROUTER, modes=HTTP),
    Option("aip-health-route", "path that answers as /health does", path, ROUTER, modes=HTTP),
    # the two other modes
    Option(
        "input",
        "the requests, in OpenAI's form for batch files",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "output",
        "where the results go, line by line; a file that is there is continued",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "end-with-stdin",
        "stop when standard input ends, as it does when who started the shards is gone",
        true_or_false,
        switch=True,
        has_environment=False,
        modes=(Mode.SHARDS,),
    ),
    # what is told to whom
    Option(
        "json-output",
        "log one JSON object per line",
        true_or_false,
        switch=True,
    ),
    Option("otlp-endpoint", "no effect: no traces yet", note=f"--otlp-endpoint {_NO_TRACES}"),
    Option(
        "otlp-service-name", "no effect: no traces yet", note=f"--otlp-service-name {_NO_TRACES}"
    ),
    Option(
        "usage-stats",
        "no effect: pytgi never sends usage statistics",
        choice("on", "off", "no-stack"),
        note="--usage-stats has no effect: pytgi never sends usage statistics",
        plain=("off",),
    ),
    Option(
        "env",
        "print what this runs on, then go on",
        switch=True,
        has_environment=False,
        short="-e",
    ),
    Option(
        "graceful-termination-timeout",
        "seconds that running requests have to end when the server is stopped",
        not_negative,
        ROUTER,
        default="90",
        short="-g",
        modes=HTTP,
    ),
)


def refuse(values: Values) -> None:
    """Raises InvalidOptions for the first option that is known but not supported."""
    for option in OPTIONS:
        if option.refusal and any(
            value not in option.plain for value in values.get(option.name, ())
        ):
            raise InvalidOptions(option.refusal)


def notes(values: Values) -> tuple[str, ...]:
    """The sentences about options that were given and change nothing."""
    return tuple(
        option.note
        for option in OPTIONS
        if option.note and any(value not in option.plain for value in values.get(option.name, ()))
    )


def describe(values: Values) -> str:
    """The options in one line for the log, secrets left out."""
    parts = []
    for option in OPTIONS:
        for value in values.get(option.name, ()):
            if option.switch:
                parts.append(option.flag)
            else:
                parts.append(f"{option.flag} {'<hidden>' if option.secret else value}")
    return " ".join(parts)


def forward(values: Values, child: Child) -> tuple[str, ...]:
    """The arguments of one child, for the options it gets under the same name."""
    arguments: list[str] = []
    for option in OPTIONS:
        if child not in option.to or option.secret:
            continue
        for value in values.get(option.name, ()):
            # `--flag=value`, so that a value which starts with a dash stays a value
            arguments.append(option.flag if option.switch else f"{option.flag}={value}")
    return tuple(arguments)


def forward_secrets(values: Values, child: Child) -> dict[str, str]:
    """The variables of one child, for the secret options it gets: one value a line."""
    return {
        option.variable: "\n".join(values[option.name])
        for option in OPTIONS
        if option.secret and child in option.to and option.name in values
    }


def secrets(values: Values) -> tuple[str, ...]:
    """What nobody else may see of the options that were given."""
    return tuple(v for option in OPTIONS if option.secret for v in values.get(option.name, ()))
