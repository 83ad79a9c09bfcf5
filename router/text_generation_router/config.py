"""What the router is told at start-up. Each default exists here and nowhere else."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any

from text_generation_router.chat.format import AUTO, FORMATS

VERSION = version("pytgi")
LOGGER_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _option(default: Any, text: str, minimum: int | None = None, **argparse: Any) -> Any:
    """A field with its help text, its smallest legal value and what argparse needs besides."""
    metadata = {"help": text, "minimum": minimum, "argparse": argparse}
    return field(default=default, metadata=metadata)


def _true_or_false(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(value)
    return value == "true"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All settings of the router; the names are TGI's flags with underscores.

    Raises ValueError with one sentence when a value can not be used.
    """

    tokenizer_name: str = field(
        metadata={"help": "Directory that holds the model's tokenizer.json.", "argparse": {}}
    )
    model_id: str | None = _option(None, "Name shown by /info; default: the tokenizer name.")
    served_model_name: tuple[str, ...] = _option(
        (),
        "Name of the model on OpenAI's and Anthropic's routes; repeatable, the first is told; "
        "default: its id.",
    )
    any_model_name: bool = _option(
        True,
        "Serve it whatever name OpenAI's and Anthropic's routes are asked for: true, or false for "
        "404.",
        action="store",
        type=_true_or_false,
    )
    revision: str | None = _option(None, "Revision of the model, shown by /info as model_sha.")
    master_shard_uds_path: str = _option(
        "/tmp/text-generation-server-0", "Unix socket of the shard with rank 0."
    )
    await_shards: bool = _option(
        False, "Wait for that socket without limit: for whoever starts both, and watches the shard."
    )
    step_deadline: float = _option(
        20.0,
        "Seconds to wait, while starting, for a shard that listens; later for the others when one "
        "has answered.",
        0,
    )
    hostname: str = _option("0.0.0.0", "Address to listen on.")
    port: int = _option(3000, "Port to listen on; 0 takes a free one.", 0)
    prometheus_port: int | None = _option(None, "Serve /metrics on this port as well.", 0)
    max_concurrent_requests: int = _option(
        128, "Requests in the house at once; one more is answered 429.", 1
    )
    max_best_of: int = _option(2, "Largest `best_of` a request can ask for.", 1)
    max_stop_sequences: int = _option(4, "Most `stop` strings a request can carry.", 0)
    max_top_n_tokens: int = _option(5, "Largest `top_n_tokens` a request can ask for.", 0)
    max_input_tokens: int | None = _option(
        None, "Longest prompt in tokens; default: the shard decides.", 1
    )
    max_total_tokens: int | None = _option(
        None, "Longest prompt plus answer in tokens; default: the shard decides.", 2
    )
    waiting_served_ratio: float = _option(
        1.2,
        "Others join when this many times the running are waiting; without prefill chunking only.",
        0,
    )
    max_batch_prefill_tokens: int = _option(4096, "Prompt tokens computed in one prefill.", 1)
    max_batch_total_tokens: int | None = _option(
        None, "Tokens of KV cache for all running requests; default: as many as fit.", 1
    )
    max_waiting_tokens: int = _option(
        20, "Steps after which they join, whatever the ratio; without prefill chunking only.", 0
    )
    max_batch_size: int | None = _option(
        None, "Requests computed at once; default: --max-concurrent-requests.", 1
    )
    disable_prefix_caching: bool = _option(False, "Compute every prompt anew, however it begins.")
    disable_prefill_chunking: bool = _option(
        False, "Compute a prompt in one step where it fits, however long others wait meanwhile."
    )
    inter_token_latency_target_ms: int | None = _option(
        None,
        "Milliseconds from one token to the next that steps with parts of prompts may take; "
        "default: twice a step without.",
        1,
    )
    speculate: int = _option(0, "Tokens guessed per request and step; 0: none.", 0)
    validation_workers: int = _option(2, "Threads that tokenize prompts.", 1)
    max_client_batch_size: int = _option(4, "Most prompts in one client request.", 1)
    payload_limit: int = _option(2_000_000, "Largest request body in bytes.", 1)
    api_key: tuple[str, ...] = _option(
        (),
        "Ask for this key, or one of several, on all routes but health and metrics; "
        "default: those in the variable API_KEY, one a line.",
    )
    api_key_file: str | None = _option(
        None, "File with more of them, one a line; it is read again when it changes."
    )
    max_concurrent_requests_per_key: int | None = _option(
        None, "Requests that each key may have under way; default: no limit of its own.", 1
    )
    max_tokens_per_minute_per_key: int | None = _option(
        None, "Prompt and generated tokens of each key in a minute; default: no limit.", 1
    )
    public_docs: bool = _option(False, "Show /docs and the OpenAPI file without a key.")
    graceful_termination_timeout: float = _option(
        90.0, "Seconds that running requests have to end after SIGTERM.", 0
    )
    ssl_certfile: str | None = _option(
        None, "Speak TLS with this PEM file of certificates; read again when it changes."
    )
    ssl_keyfile: str | None = _option(None, "The PEM file of the certificate's private key.")
    cors_allow_origin: tuple[str, ...] = _option(
        (), "Origin that browsers may call from; repeatable; default: any."
    )
    aip_predict_route: str | None = _option(None, "Path that answers as /vertex does.")
    aip_health_route: str | None = _option(None, "Path that answers as /health does.")
    tokenizer_config_path: str | None = _option(
        None, "A tokenizer_config.json or .jinja file to take the chat template from."
    )
    chat_format: str = _option(
        AUTO,
        "How the model writes tool calls; default: as its chat template shows.",
        choices=(AUTO, *FORMATS),
    )
    pooling: str | None = _option(
        None,
        "Which hidden state /v1/embeddings answers: of the last token, or the mean over all; "
        "default: as the model's 1_Pooling/config.json says, else last.",
        choices=("last", "mean"),
    )
    reranker: bool = _option(
        False,
        "Serve /score and /rerank in the form of Qwen3-Reranker; default: if the model's "
        "config.json or its name says that it is one.",
    )
    disable_grammar_support: bool = _option(False, "Refuse requests that carry a `grammar`.")
    json_output: bool = _option(False, "Write log lines as JSON objects.")
    logger_level: str = _option(
        "INFO", "Least severe log lines shown.", type=str.upper, choices=LOGGER_LEVELS
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, minimum = getattr(self, option.name), option.metadata.get("minimum")
            # `not (a >= b)` refuses NaN as well.
            if minimum is not None and value is not None and not (value >= minimum):
                raise ValueError(f"`{flag(option.name)}` must be >= {minimum}. Given: {value}")
        for name in ("port", "prometheus_port"):
            if (value := getattr(self, name)) is not None and value > 65535:
                raise ValueError(f"`{flag(name)}` must be <= 65535. Given: {value}")
        if self.port and self.port == self.prometheus_port:
            raise ValueError(
                "`--prometheus-port` must be another port than `--port`; "
                "leave it out to have /metrics on that one only"
            )
        if (
            self.max_input_tokens is not None
            and self.max_total_tokens is not None
            and self.max_input_tokens >= self.max_total_tokens
        ):
            raise ValueError(
                "`max_input_tokens` must be < `max_total_tokens`. "
                f"Given: {self.max_input_tokens} and {self.max_total_tokens}"
            )
        if "" in self.served_model_name:
            raise ValueError("`--served-model-name` must not be empty; leave it out for the id")
        if "" in self.api_key:
            raise ValueError("`--api-key` must not be empty; leave it out to ask for no key")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError(
                "`--ssl-certfile` and `--ssl-keyfile` belong together; give both or neither"
            )
        if self.api_key_file == "":
            raise ValueError("`--api-key-file` must not be empty; leave it out to have none")
        for name in ("max_concurrent_requests_per_key", "max_tokens_per_minute_per_key"):
            if getattr(self, name) is not None and not self.api_key and self.api_key_file is None:
                raise ValueError(f"`{flag(name)}` needs keys: add `--api-key` or `--api-key-file`")
        for name in ("aip_predict_route", "aip_health_route"):
            if (path := getattr(self, name)) is not None and not path.startswith("/"):
                raise ValueError(f"`{flag(name)}` must be a path like /predict. Given: {path}")
        if self.aip_predict_route is not None and self.aip_predict_route == self.aip_health_route:
            raise ValueError("`--aip-predict-route` and `--aip-health-route` must be two paths")

    @property
    def served_model_id(self) -> str:
        """Its id, as TGI's routes tell it."""
        return self.model_id or self.tokenizer_name

    @property
    def model_names(self) -> tuple[str, ...]:
        """What it is called on OpenAI's routes, which tell the first."""
        return self.served_model_name or (self.served_model_id,)

    @property
    def batch_rows(self) -> int:
        """How many requests can be computed at once."""
        return self.max_batch_size or self.max_concurrent_requests


def flag(name: str) -> str:
    """The command line spelling of a field."""
    return "--" + name.replace("_", "-")


def flags() -> Iterable[tuple[str, Any, str, dict[str, Any]]]:
    """(field name, default, help, argparse keywords) of every option, in order."""
    for option in fields(RouterConfig):
        yield option.name, option.default, option.metadata["help"], option.metadata["argparse"]
