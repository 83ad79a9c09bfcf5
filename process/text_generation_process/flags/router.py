"""Flags of the router: the limits of a request, of the queue and of a batch; names, addresses,
keys, TLS and chat templates of the HTTP server."""

from text_generation_process import defaults
from text_generation_process.option import (
    HTTP,
    PORT,
    ROUTER,
    WITH_ROUTER,
    Option,
    choice,
    is_address,
    not_negative,
    number,
    path,
    refused,
    true_or_false,
    whole,
)

LIMITS = (
    Option("validation-workers", "tokenizer threads of the router", whole(1), ROUTER),
    Option(
        "max-concurrent-requests", "maximum concurrent requests; more get 429", whole(1), ROUTER
    ),
    Option(
        "request-timeout",
        "maximum seconds from a request's arrival to the end of its answer; then it gets 504",
        number(0),
        ROUTER,
        modes=HTTP,
    ),
    Option(
        "max-queue-wait",
        "maximum seconds that a request waits in the queue; then it gets 503",
        number(0),
        ROUTER,
        modes=HTTP,
    ),
    Option("max-best-of", "maximum best_of of a request", whole(1), ROUTER),
    Option("max-stop-sequences", "maximum stop sequences of a request", whole(0), ROUTER),
    Option("max-top-n-tokens", "maximum top_n_tokens of a request", whole(0), ROUTER),
    Option("max-input-tokens", "maximum tokens of a prompt", whole(1), ROUTER),
    Option("max-input-length", "the old name of --max-input-tokens", whole(1), modes=WITH_ROUTER),
    Option("max-total-tokens", "maximum tokens of a prompt and its answer", whole(1), ROUTER),
    Option(
        "waiting-served-ratio",
        "ratio of waiting to running requests above which waiting ones are admitted; without "
        "prefill chunking only",
        not_negative,
        ROUTER,
        default="0.3",  # the router's own differs; both are TGI's
    ),
    Option("max-batch-prefill-tokens", "maximum prompt tokens in one step", whole(1), ROUTER),
    Option(
        "disable-prefix-caching",
        "compute every prompt from its first token; PREFIX_CACHING=false does the same",
        to=ROUTER,
        switch=True,
    ),
    Option(
        "disable-prefill-chunking",
        "compute each prompt in one step if it fits; PREFILL_CHUNKING=0 does the same",
        to=ROUTER,
        switch=True,
    ),
    Option(
        "inter-token-latency-target-ms",
        "target duration of a step that carries parts of prompts, in milliseconds",
        whole(1),
        ROUTER,
    ),
    Option("max-batch-total-tokens", "maximum tokens of all running requests", whole(1), ROUTER),
    Option(
        "max-waiting-tokens",
        "maximum steps that a waiting request waits; without prefill chunking only",
        whole(0),
        ROUTER,
    ),
    Option("max-batch-size", "maximum running requests", whole(1), ROUTER),
    Option(
        "max-client-batch-size",
        "TGI's maximum of prompts in one request: /info reports it, no request is limited by it",
        whole(1),
        ROUTER,
    ),
    Option("payload-limit", "maximum bytes of a request body", whole(1), ROUTER),
    Option("disable-grammar-support", "refuse grammars", to=ROUTER, switch=True),
    Option(
        "pooling",
        "which hidden state /v1/embeddings answers: of the last token, or the mean; by default as "
        "the model's 1_Pooling/config.json says, else last",
        choice("last", "mean"),
        to=ROUTER,
    ),
    Option(
        "reranker",
        "serve /score and /rerank in the form of Qwen3-Reranker; by default if the model is one",
        to=ROUTER,
        switch=True,
        modes=HTTP,
    ),
)

HTTP_SIDE = (
    Option(
        "served-model-name",
        "name of the model on OpenAI's and Anthropic's routes; may be repeated, answers have the "
        "first; by default the model's id",
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
        "address to listen on (HOSTNAME counts only if it is an address: containers set it to "
        "their own name)",
        to=ROUTER,
        default=defaults.HOSTNAME,
        environment_applies=is_address,
        modes=HTTP,
    ),
    Option(
        "port",
        "port to listen on",
        PORT,
        ROUTER,
        default=str(defaults.PORT),
        short="-p",
        modes=HTTP,
    ),
    Option("prometheus-port", "second port for /metrics", PORT, ROUTER, modes=HTTP),
    Option(
        "api-key",
        "key that requests must send as a bearer token; may be repeated, then each key is valid",
        to=ROUTER,
        repeat=True,
        secret=True,
        modes=HTTP,
    ),
    Option(
        "api-key-file",
        "file with more keys, one per line; it is read again when it changes",
        to=ROUTER,
        guards=True,
        modes=HTTP,
    ),
    Option(
        "max-concurrent-requests-per-key",
        "maximum concurrent requests of one API key; more get 429",
        whole(1),
        ROUTER,
        modes=HTTP,
    ),
    Option(
        "max-tokens-per-minute-per-key",
        "maximum prompt and generated tokens of one API key per minute; more get 429",
        whole(1),
        ROUTER,
        modes=HTTP,
    ),
    Option(
        "public-docs",
        "show /docs and the OpenAPI file without an API key",
        to=ROUTER,
        switch=True,
        modes=HTTP,
    ),
    Option("ssl-certfile", "certificate for TLS (PEM)", to=ROUTER, modes=HTTP),
    Option("ssl-keyfile", "private key of the certificate (PEM)", to=ROUTER, modes=HTTP),
    Option(
        "cors-allow-origin",
        "origin that browsers may send requests from; may be repeated; by default every origin",
        to=ROUTER,
        repeat=True,
        modes=HTTP,
    ),
    refused("ngrok", "tunnels", "put a tunnel in front", switch=True),
    refused("ngrok-authtoken", "tunnels", "put a tunnel in front", secret=True),
    refused("ngrok-edge", "tunnels", "put a tunnel in front"),
    Option(
        "tokenizer-config-path",
        "a tokenizer_config.json or .jinja with the chat template",
        to=ROUTER,
    ),
    Option(
        "chat-format",
        "how the model writes tool calls; by default found from the chat template",
        choice("auto", "hermes", "llama3", "mistral", "mistral-args", "generic"),
        ROUTER,
    ),
    # Google's Vertex AI sets these.
    Option("aip-http-port", "port to listen on, overrides --port", PORT, modes=HTTP),
    Option("aip-predict-route", "path that answers like /vertex", path, ROUTER, modes=HTTP),
    Option("aip-health-route", "path that answers like /health", path, ROUTER, modes=HTTP),
)
