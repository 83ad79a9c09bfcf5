"""The flags of all processes: name, type, default, help, limits.

A field of `ShardConfig` or `RouterFlags` is a flag of that process. The launcher has it, too, and
passes it on, unless it is made by `own`. A flag that both have is written in both.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from text_generation_process import defaults
from text_generation_process.option import (
    DOWNLOAD,
    HTTP,
    LAUNCHERS,
    OF_TGI,
    PORT,
    Child,
    Choice,
    Option,
    check_flags,
    flag,
    flags_of,
    is_address,
    is_true,
    not_negative,
    number,
    path,
    sizes,
    true_or_false,
    whole,
)
from text_generation_process.tracing import collector, missing_packages

# Prefix of the sockets of a shard that is started without a launcher.
_UDS_PATH = f"/tmp/{defaults.SOCKET_NAME}"
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
_CHAT_FORMATS = (
    "auto",
    "hermes",
    "llama3",
    "mistral",
    "mistral-args",
    "deepseek",
    "deepseek-json",
    "granite",
    "nemotron",
    "glm",
    "qwen-xml",
    "lfm2",
    "gemma",
    "functiongemma",
    "harmony",
    "generic",
)
_STEP_DEADLINE = (
    "seconds that a step may take, and that one shard waits for another in it, before they are "
    f"declared lost; by default {defaults.LEAST_STEP_DEADLINE_S:g} (on a GPU "
    f"{defaults.LEAST_STEP_DEADLINE_ON_GPU_S:g}), or {defaults.STEP_DEADLINE_FACTOR:g} times what "
    "warm-up expects of such a step"
)
_OTLP_ENDPOINT = (
    "gRPC address of an OpenTelemetry collector that gets the traces of requests, like "
    "http://127.0.0.1:4317"
)
_ROUTER_SERVICE = "text-generation-inference.router"
_SHARD_SERVICE = "text-generation-inference.server"
_OTLP_SERVICE_NAME = (
    "name of the router and its shards in traces, by default "
    f"{_ROUTER_SERVICE} and {_SHARD_SERVICE}"
)

http = partial(flag, modes=HTTP)
own = partial(flag, modes=())


@dataclass(frozen=True)
class ShardConfig:
    """The settings of one shard. Raises ValueError, one sentence, if a value can not be used."""

    model_path: Path
    """Directory with config.json and *.safetensors; no flag, but the first argument."""
    uds_path: str = own(_UDS_PATH, "the shard's unix socket without -<rank>")
    rank: int = own(0, "index of this shard")
    world_size: int = own(1, "number of shards that the model is split over")
    master_addr: str = own(defaults.MASTER_ADDR, "where rank 0 listens for the other ranks")
    master_port: int = own(29500, "port of --master-addr")
    step_deadline: float | None = flag(None, _STEP_DEADLINE, number(0))
    dtype: str | None = flag(
        None,
        "data type of the weights; by default float32 on a CPU (bfloat16 if they are quantized), "
        "on a GPU the checkpoint's own",
        Choice("float32", "float16", "bfloat16"),
    )
    quantize: str | None = flag(
        None,
        "quantize the weights to int8 or int4, or on cuda to fp8 (compute capability 8.9 or "
        "newer), while any float checkpoint loads",
        Choice("int8", "int4", "fp8", *_CHECKPOINT_QUANTIZATIONS),
        refusal=_ONLY_AT_LOAD,
        plain=("int8", "int4", "fp8"),
    )
    kv_cache_dtype: str | None = flag(
        None,
        "store keys and values in 8 bits, without scales, instead of the type of --dtype (CUDA)",
        Choice("fp8_e4m3fn", "fp8_e5m2"),
    )
    device: str | None = flag(
        None,
        "device that computes the model; by default cuda if there is a GPU",
        Choice("cpu", "cuda"),
    )
    model_impl: str = flag(
        "auto",
        "native: this server's own code, for the architectures that it knows; transformers: the "
        "modules of transformers, over this server's cache and batches; auto (the default): "
        "native where that is possible",
        Choice("auto", "native", "transformers"),
    )
    trust_remote_code: bool = flag(
        False,
        "let transformers run the Python files of the model's folder, if its architecture needs "
        "them",
    )
    rope_scaling: str | None = flag(
        None, "RoPE scaling, for a longer context", Choice("linear", "dynamic")
    )
    rope_factor: float | None = flag(
        None,
        f"factor of --rope-scaling, {defaults.ROPE_FACTOR} if only --rope-scaling is given",
        number(0),
    )
    cuda_memory_fraction: float = flag(
        1.0, "share of the GPU's memory that a shard may use", number(0, maximum=1)
    )
    cuda_graphs: tuple[int, ...] | None = flag(
        None,
        "on a GPU, numbers of tokens, separated by commas, for which steps without prompts are "
        "recorded as CUDA graphs; 0: none; by default 1, 2, 4, 8 and every 8 up to "
        "--max-batch-size",
        sizes,
        type=lambda given: tuple(int(size) for size in given.split(",") if size != "0"),
    )
    watermark_gamma: float = flag(
        0.5, "share of the vocabulary that the watermark favours", number(0, 1)
    )
    watermark_delta: float = flag(2.0, "added to the scores of these tokens", not_negative)
    deterministic: bool = flag(
        False, "start only if a request's tokens are the same in every batch, bit for bit"
    )
    enable_reflection: bool = flag(
        False, "gRPC reflection on the shards' sockets, for tools like grpcurl"
    )
    otlp_endpoint: str | None = http(None, _OTLP_ENDPOINT, collector)
    otlp_service_name: str = http(_SHARD_SERVICE, _OTLP_SERVICE_NAME)

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def starting_deadline_s(self) -> float:
        """Seconds to wait for another rank until warm-up is over."""
        return defaults.STARTING_DEADLINE_S if self.step_deadline is None else self.step_deadline

    @property
    def socket_path(self) -> str:
        """Path of this shard's unix socket."""
        return f"{self.uds_path}-{self.rank}"

    @property
    def urls(self) -> list[str]:
        """Addresses of all shards, in rank order."""
        return [f"unix://{self.uds_path}-{rank}" for rank in range(self.world_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFlags:
    """The flags of the router; the names are TGI's with underscores."""

    tokenizer_name: str = own(MISSING, "directory that holds the model's tokenizer.json")
    model_id: str | None = own(None, "name shown by /info; by default the tokenizer's name")
    served_model_name: tuple[str, ...] = flag(
        (),
        "name of the model on OpenAI's and Anthropic's routes; may be repeated, answers have the "
        "first; by default the model's id",
    )
    any_model_name: bool = flag(
        True,
        "false: OpenAI's and Anthropic's routes answer 404 to any other name (default true)",
        true_or_false,
        type=is_true,
    )
    revision: str | None = flag(None, "branch, commit or refs/pr/N on the hub", to=DOWNLOAD)
    master_shard_uds_path: str = own(f"{_UDS_PATH}-0", "unix socket of the shard with rank 0")
    await_shards: bool = own(
        False, "wait for that socket without limit: the launcher starts and watches the shard"
    )
    step_deadline: float | None = flag(None, _STEP_DEADLINE, number(0))
    hostname: str = http(
        defaults.HOSTNAME,
        "address to listen on (HOSTNAME counts only if it is an address: containers set it to "
        "their own name)",
        default=defaults.HOSTNAME,
        environment_applies=is_address,
    )
    port: int = http(
        defaults.PORT, "port to listen on", PORT, default=str(defaults.PORT), short="-p"
    )
    prometheus_port: int | None = http(None, "second port for /metrics", PORT)
    max_concurrent_requests: int = flag(128, "maximum concurrent requests; more get 429", whole(1))
    request_timeout: float | None = http(
        None,
        "maximum seconds from a request's arrival to the end of its answer; then it gets 504",
        number(0),
    )
    max_queue_wait: float | None = http(
        None, "maximum seconds that a request waits in the queue; then it gets 503", number(0)
    )
    max_best_of: int = flag(2, "maximum best_of of a request", whole(1))
    max_stop_sequences: int = flag(4, "maximum stop sequences of a request", whole(0))
    max_top_n_tokens: int = flag(5, "maximum top_n_tokens of a request", whole(0))
    max_input_tokens: int | None = flag(None, "maximum tokens of a prompt", whole(1))
    max_total_tokens: int | None = flag(None, "maximum tokens of a prompt and its answer", whole(1))
    waiting_served_ratio: float = flag(
        1.2,
        "ratio of waiting to running requests above which waiting ones are admitted; without "
        "prefill chunking only",
        not_negative,
        default=str(defaults.LAUNCHER_WAITING_SERVED_RATIO),
    )
    max_batch_prefill_tokens: int = flag(4096, "maximum prompt tokens in one step", whole(1))
    max_batch_total_tokens: int | None = flag(
        None, "maximum tokens of all running requests", whole(1)
    )
    max_waiting_tokens: int = flag(
        20, "maximum steps that a waiting request waits; without prefill chunking only", whole(0)
    )
    max_batch_size: int | None = flag(None, "maximum running requests", whole(1))
    disable_prefix_caching: bool = flag(
        False, "compute every prompt from its first token; PREFIX_CACHING=false does the same"
    )
    disable_prefill_chunking: bool = flag(
        False, "compute each prompt in one step if it fits; PREFILL_CHUNKING=0 does the same"
    )
    inter_token_latency_target_ms: int | None = flag(
        None, "target duration of a step that carries parts of prompts, in milliseconds", whole(1)
    )
    speculate: int = flag(0, "maximum tokens drafted per request and step; 0: none", whole(0))
    validation_workers: int = flag(2, "tokenizer threads of the router", whole(1))
    max_client_batch_size: int = flag(
        4,
        "TGI's maximum of prompts in one request: /info reports it, no request is limited by it",
        whole(1),
    )
    payload_limit: int = flag(2_000_000, "maximum bytes of a request body", whole(1))
    api_key: tuple[str, ...] = http(
        (),
        "key that requests must send as a bearer token; may be repeated, then each key is valid",
        secret=True,
    )
    api_key_file: str | None = http(
        None,
        "file with more keys, one per line; it is read again when it changes",
        environment_applies=lambda _: True,  # so that a lost secret can't open the server
    )
    max_concurrent_requests_per_key: int | None = http(
        None, "maximum concurrent requests of one API key; more get 429", whole(1)
    )
    max_tokens_per_minute_per_key: int | None = http(
        None,
        "maximum prompt and generated tokens of one API key per minute; more get 429",
        whole(1),
    )
    public_docs: bool = http(False, "show /docs and the OpenAPI file without an API key")
    graceful_termination_timeout: float = http(
        defaults.TERMINATION_TIMEOUT_S,
        "seconds that running requests have to end when the server stops",
        not_negative,
        default=f"{defaults.TERMINATION_TIMEOUT_S:g}",
        short="-g",
    )
    ssl_certfile: str | None = http(None, "certificate for TLS (PEM)")
    ssl_keyfile: str | None = http(None, "private key of the certificate (PEM)")
    cors_allow_origin: tuple[str, ...] = http(
        (),
        "origin that browsers may send requests from; may be repeated; by default every origin",
    )
    aip_predict_route: str | None = http(None, "path that answers like /vertex", path)
    aip_health_route: str | None = http(None, "path that answers like /health", path)
    tokenizer_config_path: str | None = flag(
        None, "a tokenizer_config.json or .jinja with the chat template"
    )
    chat_format: str = flag(
        "auto",
        "how the model writes tool calls; by default found from the chat template",
        Choice(*_CHAT_FORMATS),
    )
    pooling: str | None = flag(
        None,
        "which hidden state /v1/embeddings answers: of the last token, or the mean; by default as "
        "the model's 1_Pooling/config.json says, else last",
        Choice("last", "mean"),
    )
    reranker: bool = http(
        False,
        "serve /score and /rerank in the form of Qwen3-Reranker; by default if the model is one",
    )
    otlp_endpoint: str | None = http(None, _OTLP_ENDPOINT, collector)
    otlp_service_name: str = http(_ROUTER_SERVICE, _OTLP_SERVICE_NAME)
    disable_grammar_support: bool = flag(False, "refuse grammars")
    json_output: bool = own(False, "write log lines as JSON objects")
    logger_level: str = own(
        defaults.LOGGER_LEVEL,
        "least severe log lines shown",
        Choice("DEBUG", "INFO", "WARNING", "ERROR"),
        type=str.upper,
    )
    restart: bool = own(False, "wait for new shards when shards are lost; the launcher starts them")
    resume_streams: bool = http(
        True,
        "false: streams that have begun end with an error when shards are replaced; true: they "
        "continue after a pause (default true)",
        true_or_false,
        type=is_true,
    )
    num_restarts: int = own(0, "how often the launcher has replaced this router already")
    launcher_fd: int | None = own(
        None,
        "socket to the launcher, which opens it: the router reports, and hears what the shards do",
    )


def contradictions(given: Callable[[str], Any]) -> Iterator[str]:
    """The sentences about flags of the router that are wrong together. `given` returns the value of
    a flag; None: it has none."""
    limits = ("max-input-tokens", "max-total-tokens", "max-batch-total-tokens")
    longest_input, longest, batch = (int(given(name) or 0) for name in limits)
    if longest_input >= longest > 0:
        yield (
            f"--max-input-tokens {longest_input} must be less than --max-total-tokens {longest}, "
            "which counts the answer as well: lower the first or raise the second"
        )
    if longest > batch > 0:
        yield (
            f"--max-total-tokens {longest} must not be more than --max-batch-total-tokens {batch}: "
            "lower the first or raise the second"
        )
    if (port := given("port")) and port == given("prometheus-port"):
        yield (
            f"--prometheus-port and --port are both {port}: /metrics is on --port already, start "
            "without --prometheus-port or choose another"
        )
    has_keys = given("api-key") or given("api-key-file") is not None
    for name in ("max-concurrent-requests-per-key", "max-tokens-per-minute-per-key"):
        if given(name) is not None and not has_keys:
            yield f"--{name} is given, but there are no keys: add --api-key or --api-key-file"
    if (given("ssl-certfile") is None) != (given("ssl-keyfile") is None):
        yield "--ssl-certfile and --ssl-keyfile belong together: give both or neither"
    if (route := given("aip-predict-route")) and route == given("aip-health-route"):
        yield "--aip-predict-route and --aip-health-route must be two paths"
    yield from missing_packages(given("otlp-endpoint"))


def _options() -> tuple[Option, ...]:
    """The launcher's flags, in the order of --help, with the children that get them."""
    found = {option.name: option for option in LAUNCHERS}
    for child, flags in ((Child.SHARD, ShardConfig), (Child.ROUTER, RouterFlags)):
        for _, option in flags_of(flags):
            if option.modes != ():
                known = found.get(option.name, option)
                found[option.name] = replace(known, to=(*known.to, child))
    return (*found.values(), *OF_TGI)


OPTIONS = _options()
