"""The command line settings of one shard process."""

from dataclasses import dataclass
from pathlib import Path

from text_generation_process import defaults


@dataclass(frozen=True)
class ShardConfig:
    """Settings of one shard, made once by `cli`."""

    # Directory with config.json and *.safetensors.
    model_path: Path
    # The socket is `{uds_path}-{rank}`.
    uds_path: str = defaults.SHARD_UDS_PATH
    # The index of this shard, below `world_size`.
    rank: int = 0
    # Number of shards the model is split over.
    world_size: int = 1
    # Where rank 0 listens for the other ranks.
    master_addr: str = defaults.MASTER_ADDR
    master_port: int = 29500
    # Seconds that a rank waits for another one in a step; None: derived from warm-up's times.
    step_deadline: float | None = None
    # float32, float16 or bfloat16; None: float32 on cpu (bfloat16 when weights are quantized), the
    # checkpoint's own on cuda.
    dtype: str | None = None
    # Format of the weights: int8, int4 or, on cuda, fp8; None: `dtype`.
    quantize: str | None = None
    # Format of keys and values: fp8_e4m3fn or fp8_e5m2; None: `dtype`.
    kv_cache_dtype: str | None = None
    # cpu or cuda; None: cuda if there is a GPU.
    device: str | None = None
    # native: our own code; transformers: its modules; auto: our own code if it computes the model.
    model_impl: str = "auto"
    # Whether code from the checkpoint's folder may run.
    trust_remote_code: bool = False
    # Overrides the checkpoint's rope scaling: linear or dynamic.
    rope_scaling: str | None = None
    # Factor of `rope_scaling`.
    rope_factor: float | None = None
    # Share of the GPU's memory this process may fill.
    cuda_memory_fraction: float = 1.0
    # Batch sizes with a CUDA graph; empty: none; None: the device's own choice.
    cuda_graphs: tuple[int, ...] | None = None
    # Share of the vocabulary on a watermark's green list.
    watermark_gamma: float = 0.5
    # What a watermark adds to the logits of its green list.
    watermark_delta: float = 2.0
    # Compute every step so that a request's tokens do not depend on what runs beside it.
    deterministic: bool = False
    # gRPC address of an OpenTelemetry collector; None: no traces.
    otlp_endpoint: str | None = None
    # What this service is called in its traces.
    otlp_service_name: str = defaults.SHARD_SERVICE_NAME
    # Whether the gRPC server offers reflection.
    enable_reflection: bool = False

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
