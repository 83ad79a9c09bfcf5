"""The command line settings of one shard process."""

from dataclasses import dataclass

from text_generation_process import defaults
from text_generation_process.flags import ShardFlags
from text_generation_process.option import check_flags


@dataclass(frozen=True)
class ShardConfig(ShardFlags):
    """Settings of one shard, made once by `cli`. ValueError, a sentence, if one can not be."""

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
