"""Flags of the HTTP server: names, addresses, keys, TLS, chat templates, Vertex AI."""

from text_generation_process import defaults

from text_generation_launcher.option import HTTP, ROUTER, Option, refused
from text_generation_launcher.values import PORT, choice, is_address, path, true_or_false, whole

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
        true_or_false,
        ROUTER,
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
        "how the model writes tool calls; by default found from the chat template",
        choice("auto", "hermes", "llama3", "mistral", "mistral-args", "generic"),
        ROUTER,
    ),
    # Google's Vertex AI sets these.
    Option("aip-http-port", "port to listen on, overrides --port", PORT, modes=HTTP),
    Option("aip-predict-route", "path that answers like /vertex", path, ROUTER, modes=HTTP),
    Option("aip-health-route", "path that answers like /health", path, ROUTER, modes=HTTP),
)
