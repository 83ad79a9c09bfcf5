"""The settings of the router. Defaults that other packages need, too, are in
`text_generation_process.defaults`."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any

from text_generation_process import defaults
from text_generation_process.flags import OPTIONS
from text_generation_process.option import Child
from text_generation_process.tracing import check_tracing

from text_generation_router.chat.format import AUTO, FORMATS

VERSION = version("pytgi")
LOGGER_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_OPTIONS = {option.name: option for option in OPTIONS if Child.ROUTER in option.to}


def _option(default: Any, help: str = "", **argparse: Any) -> Any:
    """A field with its help, unless the launcher's table of flags has it, and other arguments of
    argparse."""
    return field(default=default, metadata={"help": help, "argparse": argparse})


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
    model_id: str | None = _option(None, help="Name shown by /info; default: the tokenizer name.")
    served_model_name: tuple[str, ...] = _option(())
    any_model_name: bool = _option(True, action="store", type=_true_or_false)
    revision: str | None = _option(None)
    master_shard_uds_path: str = _option(
        f"{defaults.SHARD_UDS_PATH}-0", help="Unix socket of the shard with rank 0."
    )
    await_shards: bool = _option(
        False, help="Wait for that socket without limit: the launcher starts and watches the shard."
    )
    step_deadline: float | None = _option(None)
    hostname: str = _option(defaults.HOSTNAME)
    port: int = _option(defaults.PORT)
    prometheus_port: int | None = _option(None)
    max_concurrent_requests: int = _option(128)
    request_timeout: float | None = _option(None)
    max_queue_wait: float | None = _option(None)
    max_best_of: int = _option(2)
    max_stop_sequences: int = _option(4)
    max_top_n_tokens: int = _option(5)
    max_input_tokens: int | None = _option(None)
    max_total_tokens: int | None = _option(None)
    waiting_served_ratio: float = _option(1.2)
    max_batch_prefill_tokens: int = _option(4096)
    max_batch_total_tokens: int | None = _option(None)
    max_waiting_tokens: int = _option(20)
    max_batch_size: int | None = _option(None)
    disable_prefix_caching: bool = _option(False)
    disable_prefill_chunking: bool = _option(False)
    inter_token_latency_target_ms: int | None = _option(None)
    speculate: int = _option(0)
    validation_workers: int = _option(2)
    max_client_batch_size: int = _option(4)
    payload_limit: int = _option(2_000_000)
    api_key: tuple[str, ...] = _option(())
    api_key_file: str | None = _option(None)
    max_concurrent_requests_per_key: int | None = _option(None)
    max_tokens_per_minute_per_key: int | None = _option(None)
    public_docs: bool = _option(False)
    graceful_termination_timeout: float = _option(defaults.TERMINATION_TIMEOUT_S)
    ssl_certfile: str | None = _option(None)
    ssl_keyfile: str | None = _option(None)
    cors_allow_origin: tuple[str, ...] = _option(())
    aip_predict_route: str | None = _option(None)
    aip_health_route: str | None = _option(None)
    tokenizer_config_path: str | None = _option(None)
    chat_format: str = _option(AUTO, choices=(AUTO, *FORMATS))
    pooling: str | None = _option(None, choices=("last", "mean"))
    reranker: bool = _option(False)
    otlp_endpoint: str | None = _option(None)
    otlp_service_name: str = _option(defaults.ROUTER_SERVICE_NAME)
    disable_grammar_support: bool = _option(False)
    json_output: bool = _option(False, help="Write log lines as JSON objects.")
    logger_level: str = _option(
        defaults.LOGGER_LEVEL,
        type=str.upper,
        choices=LOGGER_LEVELS,
        help="Least severe log lines shown.",
    )
    restart: bool = _option(
        False, help="Wait for new shards when shards are lost; the launcher starts them."
    )
    resume_streams: bool = _option(True, action="store", type=_true_or_false)
    num_restarts: int = _option(0, help="How often the launcher has replaced this router already.")
    launcher_fd: int | None = _option(
        None, help="Pipe on which the router reports to the launcher, which opens it."
    )
    progress_fd: int | None = _option(
        None, help="Pipe on which the launcher, which opens it, reports what the shards do."
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, known = getattr(self, option.name), _OPTIONS.get(option.name.replace("_", "-"))
            if known is None or value is None or (option.name == "port" and value == 0):
                continue
            for given in value if isinstance(value, tuple) else (value,):
                try:
                    known.parse(str(given))
                except ValueError as error:
                    raise ValueError(
                        f"`{flag(option.name)}` must be {error}. Given: {given}"
                    ) from error
        check_tracing(self.otlp_endpoint)
        if self.restart and self.launcher_fd is None:
            raise ValueError(
                "`--restart` needs `--launcher-fd`: the launcher starts the new shards"
            )
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
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError(
                "`--ssl-certfile` and `--ssl-keyfile` belong together; give both or neither"
            )
        for name in ("max_concurrent_requests_per_key", "max_tokens_per_minute_per_key"):
            if getattr(self, name) is not None and not self.api_key and self.api_key_file is None:
                raise ValueError(f"`{flag(name)}` needs keys: add `--api-key` or `--api-key-file`")
        if self.aip_predict_route is not None and self.aip_predict_route == self.aip_health_route:
            raise ValueError("`--aip-predict-route` and `--aip-health-route` must be two paths")

    @property
    def served_model_id(self) -> str:
        """The model's id in TGI's routes."""
        return self.model_id or self.tokenizer_name

    @property
    def model_names(self) -> tuple[str, ...]:
        """Its names on OpenAI's and Anthropic's routes; answers have the first."""
        return self.served_model_name or (self.served_model_id,)

    @property
    def starting_deadline_s(self) -> float:
        """How long to wait for shards until warm-up is over."""
        return defaults.STARTING_DEADLINE_S if self.step_deadline is None else self.step_deadline

    @property
    def batch_rows(self) -> int:
        """Most rows in one step."""
        return self.max_batch_size or self.max_concurrent_requests


def flag(name: str) -> str:
    """The command line spelling of a field."""
    return "--" + name.replace("_", "-")


def flags() -> Iterable[tuple[str, Any, str, dict[str, Any]]]:
    """(field name, default, help, argparse keywords) of every option, in order."""
    for option in fields(RouterConfig):
        text = option.metadata["help"] or _OPTIONS[option.name.replace("_", "-")].help
        yield option.name, option.default, text, option.metadata["argparse"]
