"""What one shard process was told on its command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ShardConfig:
    """Settings of one shard; made once by `cli`, passed to whoever needs it."""

    # Directory with config.json and *.safetensors.
    model_path: Path
    # The socket is `{uds_path}-{rank}`.
    uds_path: str = "/tmp/text-generation-server"
    # Place of this shard among `world_size`.
    rank: int = 0
    # Number of shards the model is split over.
    world_size: int = 1
    # Where rank 0 listens for the other ranks.
    master_addr: str = "localhost"
    master_port: int = 29500
    # Seconds that a rank waits for another one in a step before it gives up.
    step_deadline: float = 20.0
    # float32, float16 or bfloat16; None: float32 on cpu (bfloat16 when weights are quantised), the
    # checkpoint's own on cuda.
    dtype: str | None = None
    # int8, int4 or, on cuda, fp8: how the weights are held; None: in `dtype`.
    quantize: str | None = None
    # fp8_e4m3fn or fp8_e5m2: how keys and values are held; None: in `dtype`.
    kv_cache_dtype: str | None = None
    # cpu or cuda; None: cuda where there is one.
    device: str | None = None
    # Overrides the checkpoint's rope scaling: linear or dynamic.
    rope_scaling: str | None = None
    # Factor of `rope_scaling`.
    rope_factor: float | None = None
    # Share of the GPU's memory this process may fill.
    cuda_memory_fraction: float = 1.0
    # Sizes of steps that are recorded on a GPU; empty: none; None: those that suit it.
    cuda_graphs: tuple[int, ...] | None = None
    # Share of the vocabulary on a watermark's green list.
    watermark_gamma: float = 0.5
    # What a watermark adds to the logits of its green list.
    watermark_delta: float = 2.0
    # Compute every step so that a request's tokens do not depend on what runs beside it.
    deterministic: bool = False
    # Whether gRPC tells who asks which calls there are.
    enable_reflection: bool = False

    @property
    def socket_path(self) -> str:
        """Path of this shard's unix socket."""
        return f"{self.uds_path}-{self.rank}"

    @property
    def urls(self) -> list[str]:
        """Addresses of all shards, in rank order."""
        return [f"unix://{self.uds_path}-{rank}" for rank in range(self.world_size)]
