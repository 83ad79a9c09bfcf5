"""The options of `LLM`, and which of them go to the shards and to the router."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from text_generation_router.config import RouterConfig, flag
from text_generation_router.offline.shards_process import ShardsAddress

OptionValue = str | int | float | bool | Path | None

# Options of the router that are about HTTP, or set here.
_NOT_OFFLINE = frozenset(
    {
        *("tokenizer_name", "model_id", "master_shard_uds_path"),
        *("hostname", "port", "prometheus_port", "payload_limit", "cors_allow_origin"),
        *("api_key", "api_key_file", "public_docs"),
        *("request_timeout", "max_queue_wait"),
        *("max_concurrent_requests_per_key", "max_tokens_per_minute_per_key"),
        *("aip_predict_route", "aip_health_route", "graceful_termination_timeout"),
        *("max_concurrent_requests", "max_client_batch_size", "max_best_of"),
        *("json_output", "logger_level", "reranker", "otlp_endpoint", "otlp_service_name"),
        *("launcher_fd", "progress_fd", "restart", "resume_streams", "num_restarts"),
        *("ssl_certfile", "ssl_keyfile", "served_model_name", "any_model_name", "await_shards"),
    }
)
# No limits that protect a server from its clients.
_NO_LIMIT = 2**31 - 1
_OFFLINE_LIMITS = {"max_stop_sequences": _NO_LIMIT, "max_top_n_tokens": 100}
# Boolean flags of the launcher that take a value.
_WITH_A_VALUE = frozenset({"sharded"})
_ROUTER_FIELDS = frozenset(field.name for field in fields(RouterConfig))
# Options of `text-generation-launcher shards` (a test compares); it refuses some with an error.
SHARDS_OPTIONS = frozenset(
    {
        *("model_id", "revision", "dtype", "device", "quantize", "kv_cache_dtype"),
        *("huggingface_hub_cache", "weights_cache_override", "trust_remote_code"),
        *("num_shard", "sharded", "master_addr", "master_port", "step_deadline"),
        *("cuda_memory_fraction", "cuda_graphs", "disable_custom_kernels", "deterministic"),
        *("rope_scaling", "rope_factor", "lora_adapters", "enable_prefill_logprobs"),
        *("watermark_gamma", "watermark_delta", "enable_reflection", "usage_stats"),
        *("ngrok", "ngrok_authtoken", "ngrok_edge"),
    }
)
# Fields of RouterConfig that are also options of the shards.
_FOR_BOTH = frozenset({"model_id", "revision", "step_deadline"})


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one `LLM`."""

    shard_flags: tuple[str, ...]
    """For `text-generation-launcher shards`, which validates them."""
    router: Mapping[str, OptionValue]
    """Fields of RouterConfig."""

    def router_config(self, address: ShardsAddress) -> RouterConfig:
        """The configuration of the router's part. Raises ValueError."""
        given = {**_OFFLINE_LIMITS, **self.router}
        given.setdefault("max_batch_size", RouterConfig(tokenizer_name="").batch_rows)
        return RouterConfig(
            tokenizer_name=address.model_path,
            model_id=address.model_id,
            master_shard_uds_path=address.master_shard_uds_path,
            max_concurrent_requests=_NO_LIMIT,
            **given,  # type: ignore[arg-type]  # RouterConfig validates the types
        )


def sort_options(model: str | Path | None, given: Mapping[str, OptionValue]) -> Options:
    """Sorts the options; None means "not given".

    Raises TypeError for an unknown option, ValueError for one that has no effect without HTTP.
    """
    shard_flags: list[str] = []
    router: dict[str, OptionValue] = {}
    for name, value in {"model_id": model, **given}.items():
        _check_name(name)
        if value is None:
            continue
        if name in _NOT_OFFLINE and name != "model_id":
            raise ValueError(f"`{name}` is an option of the server; remove it")
        if name in _ROUTER_FIELDS and name != "model_id":
            router[name] = str(value) if isinstance(value, Path) else value
        if name not in _ROUTER_FIELDS or name in _FOR_BOTH:
            if name in _WITH_A_VALUE and isinstance(value, bool):
                shard_flags.append(f"{flag(name)}={str(value).lower()}")
            elif value is True:
                shard_flags.append(flag(name))
            elif value is not False:
                shard_flags.append(f"{flag(name)}={value}")
    options = Options(tuple(shard_flags), router)
    options.router_config(ShardsAddress("", "", ""))  # validates before the model is loaded
    return options


def _check_name(name: str) -> None:
    """Raises TypeError for an unknown option."""
    known = SHARDS_OPTIONS | _ROUTER_FIELDS
    if name in known:
        return
    near = [f"`{one}`" for one in get_close_matches(name, sorted(known - _NOT_OFFLINE), 3)]
    hint = f"did you mean {' or '.join(near)}?" if near else "see `help(LLM)`"
    raise TypeError(f"LLM has no option `{name}`; {hint}")
