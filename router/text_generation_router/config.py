"""The settings of the router: its flags, which fit each other."""

from dataclasses import dataclass
from importlib.metadata import version

from text_generation_process import defaults
from text_generation_process.flags import RouterFlags
from text_generation_process.option import check_flags
from text_generation_process.tracing import check_tracing

VERSION = version("pytgi")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(RouterFlags):
    """The settings of the router. Raises ValueError, one sentence, if a value can not be used."""

    def __post_init__(self) -> None:
        check_flags(self)
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
                raise ValueError(
                    f"`--{name.replace('_', '-')}` needs keys: add `--api-key` or `--api-key-file`"
                )
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
