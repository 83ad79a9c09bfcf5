"""The flags of the launcher by subject, in the order of --help, with the children that get them."""

from text_generation_process import defaults
from text_generation_process.option import (
    DOWNLOAD,
    HTTP,
    PORT,
    WITH_ROUTER,
    Child,
    Mode,
    Option,
    choice,
    is_address,
    not_negative,
    number,
    path,
    refused,
    router_option,
    server_option,
    shard_option,
    sizes,
    true_or_false,
    whole,
    without_effect,
)
from text_generation_process.tracing import collector

# TGI's other values. Most of them need a checkpoint that is already quantized.
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

MODEL = (
    Option("model-id", "hub id or local directory; by default the embedded model"),
    Option("revision", "branch, commit or refs/pr/N on the hub", to=(Child.DOWNLOAD, Child.ROUTER)),
    shard_option("dtype", "data type of the weights", choice("float32", "float16", "bfloat16")),
    shard_option("device", "device that computes the model", choice("cpu", "cuda")),
    Option("huggingface-hub-cache", "directory of the hub cache", to=DOWNLOAD),
    shard_option(
        "quantize",
        "quantize the weights to int8 or int4, or on cuda to fp8 (compute capability 8.9 or "
        "newer), while any float checkpoint loads",
        choice("int8", "int4", "fp8", *_CHECKPOINT_QUANTIZATIONS),
        refusal=_ONLY_AT_LOAD,
        plain=("int8", "int4", "fp8"),
    ),
    shard_option(
        "deterministic",
        "start only if a request's tokens are the same in every batch, bit for bit",
        switch=True,
    ),
    router_option("speculate", "maximum tokens drafted per request and step; 0: none", whole(0)),
    shard_option(
        "kv-cache-dtype",
        "store keys and values in 8 bits, without scales, instead of the type of --dtype (CUDA)",
        choice("fp8_e4m3fn", "fp8_e5m2"),
    ),
    shard_option(
        "model-impl",
        "native: this server's own code, for the architectures that it knows; transformers: the "
        "modules of transformers, over this server's cache and batches; auto (the default): "
        "native where that is possible",
        choice("auto", "native", "transformers"),
    ),
    shard_option(
        "trust-remote-code",
        "let transformers run the Python files of the model's folder, if its architecture needs "
        "them",
        switch=True,
    ),
    refused("weights-cache-override", "a separate weights folder", "give --model-id a directory"),
    refused("lora-adapters", "LoRA adapters", "merge the adapter into the weights first"),
    shard_option("rope-scaling", "RoPE scaling, for a longer context", choice("linear", "dynamic")),
    shard_option(
        "rope-factor",
        f"factor of --rope-scaling, {defaults.ROPE_FACTOR} if only --rope-scaling is given",
        number(0),
    ),
)


_STEP_DEADLINE = (
    f"{defaults.LEAST_STEP_DEADLINE_S:g} (on a GPU {defaults.LEAST_STEP_DEADLINE_ON_GPU_S:g}), or "
    f"{defaults.STEP_DEADLINE_FACTOR:g} times what warm-up expects of such a step"
)

SHARDS = (
    Option(
        "num-shard",
        "processes that the model is split over; by default one for each GPU that "
        "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES names, and one on a CPU",
        whole(1),
    ),
    Option(
        "sharded",
        "true: split over all GPUs, which must be at least two; false: one shard, unless "
        "--num-shard is given",
        true_or_false,
    ),
    Option(
        "master-addr",
        f"address of this machine where the shards meet (default {defaults.MASTER_ADDR})",
    ),
    Option("master-port", "port of --master-addr; by default a free one", PORT),
    Option(
        "step-deadline",
        "seconds that a step may take, and that one shard waits for another in it, before they are "
        f"declared lost; by default {_STEP_DEADLINE}",
        number(0),
        to=(Child.SHARD, Child.ROUTER),
    ),
    Option(
        "restart",
        "replace shards and router that end, up to 5 times in 10 minutes; RESTART=false or "
        "--no-restart: the server ends with them",
        default="true",
        switch=True,
        modes=HTTP,
    ),
    Option(
        "no-restart",
        "end, with exit code 1, when a shard or the router ends",
        switch=True,
        has_environment=False,
        modes=HTTP,
    ),
    server_option(
        "resume-streams",
        "false: streams that have begun end with an error when shards are replaced; true: they "
        "continue after a pause (default true)",
        true_or_false,
    ),
    Option(
        "shard-uds-path",
        "prefix of the shards' unix sockets, -<rank> is appended; by default they are in a new "
        "folder that only this user can open, in XDG_RUNTIME_DIR or TMPDIR",
    ),
    shard_option(
        "cuda-memory-fraction",
        "share of the GPU's memory that a shard may use",
        number(0, maximum=1),
    ),
    shard_option(
        "cuda-graphs",
        "on a GPU, numbers of tokens, separated by commas, for which steps without prompts are "
        "recorded as CUDA graphs; 0: none; by default 1, 2, 4, 8 and every 8 up to "
        "--max-batch-size",
        sizes,
    ),
    without_effect(
        "disable-custom-kernels",
        "pytgi computes every model with its own kernels",
        switch=True,
    ),
    shard_option(
        "enable-reflection",
        "gRPC reflection on the shards' sockets, for tools like grpcurl",
        switch=True,
    ),
    shard_option(
        "watermark-gamma", "share of the vocabulary that the watermark favours", number(0, 1)
    ),
    shard_option("watermark-delta", "added to the scores of these tokens", not_negative),
    without_effect(
        "enable-prefill-logprobs",
        "requests can always ask for the log-probabilities of their prompt (decoder_input_details)",
        switch=True,
    ),
)

PROCESS = (
    Option(
        "input",
        "file with the requests, in OpenAI's batch format",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "output",
        "file for the results, one per line; an existing file is continued",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "end-with-stdin",
        "stop when standard input ends, for example because the parent process is gone",
        switch=True,
        has_environment=False,
        modes=(Mode.SHARDS,),
    ),
    Option("json-output", "log one JSON object per line", switch=True),
    Option(
        "otlp-endpoint",
        "gRPC address of an OpenTelemetry collector that gets the traces of requests, like "
        "http://127.0.0.1:4317",
        collector,
        to=(Child.SHARD, Child.ROUTER),
        modes=HTTP,
    ),
    Option(
        "otlp-service-name",
        "name of the router and its shards in traces, by default "
        f"{defaults.ROUTER_SERVICE_NAME} and {defaults.SHARD_SERVICE_NAME}",
        to=(Child.SHARD, Child.ROUTER),
        modes=HTTP,
    ),
    without_effect(
        "usage-stats",
        "pytgi never sends usage statistics",
        parse=choice("on", "off", "no-stack"),
        plain=("off",),
    ),
    Option(
        "env",
        "print the runtime environment, then start",
        switch=True,
        has_environment=False,
        short="-e",
    ),
    server_option(
        "graceful-termination-timeout",
        "seconds that running requests have to end when the server stops",
        not_negative,
        default=f"{defaults.TERMINATION_TIMEOUT_S:g}",
        short="-g",
    ),
)


LIMITS = (
    router_option("validation-workers", "tokenizer threads of the router", whole(1)),
    router_option("max-concurrent-requests", "maximum concurrent requests; more get 429", whole(1)),
    server_option(
        "request-timeout",
        "maximum seconds from a request's arrival to the end of its answer; then it gets 504",
        number(0),
    ),
    server_option(
        "max-queue-wait",
        "maximum seconds that a request waits in the queue; then it gets 503",
        number(0),
    ),
    router_option("max-best-of", "maximum best_of of a request", whole(1)),
    router_option("max-stop-sequences", "maximum stop sequences of a request", whole(0)),
    router_option("max-top-n-tokens", "maximum top_n_tokens of a request", whole(0)),
    router_option("max-input-tokens", "maximum tokens of a prompt", whole(1)),
    Option("max-input-length", "the old name of --max-input-tokens", whole(1), modes=WITH_ROUTER),
    router_option("max-total-tokens", "maximum tokens of a prompt and its answer", whole(1)),
    router_option(
        "waiting-served-ratio",
        "ratio of waiting to running requests above which waiting ones are admitted; without "
        "prefill chunking only",
        not_negative,
        default=str(defaults.LAUNCHER_WAITING_SERVED_RATIO),
    ),
    router_option("max-batch-prefill-tokens", "maximum prompt tokens in one step", whole(1)),
    router_option(
        "disable-prefix-caching",
        "compute every prompt from its first token; PREFIX_CACHING=false does the same",
        switch=True,
    ),
    router_option(
        "disable-prefill-chunking",
        "compute each prompt in one step if it fits; PREFILL_CHUNKING=0 does the same",
        switch=True,
    ),
    router_option(
        "inter-token-latency-target-ms",
        "target duration of a step that carries parts of prompts, in milliseconds",
        whole(1),
    ),
    router_option("max-batch-total-tokens", "maximum tokens of all running requests", whole(1)),
    router_option(
        "max-waiting-tokens",
        "maximum steps that a waiting request waits; without prefill chunking only",
        whole(0),
    ),
    router_option("max-batch-size", "maximum running requests", whole(1)),
    router_option(
        "max-client-batch-size",
        "TGI's maximum of prompts in one request: /info reports it, no request is limited by it",
        whole(1),
    ),
    router_option("payload-limit", "maximum bytes of a request body", whole(1)),
    router_option("disable-grammar-support", "refuse grammars", switch=True),
    router_option(
        "pooling",
        "which hidden state /v1/embeddings answers: of the last token, or the mean; by default as "
        "the model's 1_Pooling/config.json says, else last",
        choice("last", "mean"),
    ),
    server_option(
        "reranker",
        "serve /score and /rerank in the form of Qwen3-Reranker; by default if the model is one",
        switch=True,
    ),
)

HTTP_SIDE = (
    router_option(
        "served-model-name",
        "name of the model on OpenAI's and Anthropic's routes; may be repeated, answers have the "
        "first; by default the model's id",
        repeat=True,
    ),
    router_option(
        "any-model-name",
        "false: OpenAI's and Anthropic's routes answer 404 to any other name (default true)",
        true_or_false,
    ),
    server_option(
        "hostname",
        "address to listen on (HOSTNAME counts only if it is an address: containers set it to "
        "their own name)",
        default=defaults.HOSTNAME,
        environment_applies=is_address,
    ),
    server_option("port", "port to listen on", PORT, default=str(defaults.PORT), short="-p"),
    server_option("prometheus-port", "second port for /metrics", PORT),
    server_option(
        "api-key",
        "key that requests must send as a bearer token; may be repeated, then each key is valid",
        repeat=True,
        secret=True,
    ),
    server_option(
        "api-key-file",
        "file with more keys, one per line; it is read again when it changes",
        guards=True,
    ),
    server_option(
        "max-concurrent-requests-per-key",
        "maximum concurrent requests of one API key; more get 429",
        whole(1),
    ),
    server_option(
        "max-tokens-per-minute-per-key",
        "maximum prompt and generated tokens of one API key per minute; more get 429",
        whole(1),
    ),
    server_option("public-docs", "show /docs and the OpenAPI file without an API key", switch=True),
    server_option("ssl-certfile", "certificate for TLS (PEM)"),
    server_option("ssl-keyfile", "private key of the certificate (PEM)"),
    server_option(
        "cors-allow-origin",
        "origin that browsers may send requests from; may be repeated; by default every origin",
        repeat=True,
    ),
    refused("ngrok", "tunnels", "put a tunnel in front", switch=True),
    refused("ngrok-authtoken", "tunnels", "put a tunnel in front", secret=True),
    refused("ngrok-edge", "tunnels", "put a tunnel in front"),
    router_option(
        "tokenizer-config-path", "a tokenizer_config.json or .jinja with the chat template"
    ),
    router_option(
        "chat-format",
        "how the model writes tool calls; by default found from the chat template",
        choice(
            *("auto", "hermes", "llama3", "mistral", "mistral-args", "deepseek"),
            *("deepseek-json", "granite", "nemotron", "glm", "qwen-xml", "lfm2"),
            *("gemma", "functiongemma", "harmony", "generic"),
        ),
    ),
    # Google's Vertex AI sets these.
    Option("aip-http-port", "port to listen on, overrides --port", PORT, modes=HTTP),
    server_option("aip-predict-route", "path that answers like /vertex", path),
    server_option("aip-health-route", "path that answers like /health", path),
)


OPTIONS: tuple[Option, ...] = (*MODEL, *SHARDS, *LIMITS, *HTTP_SIDE, *PROCESS)
