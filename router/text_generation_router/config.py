"""The settings of the router: its flags, which fit each other."""

from dataclasses import dataclass
from importlib.metadata import version

from text_generation_process import defaults
from text_generation_process.flags import RouterFlags, contradictions
from text_generation_process.option import check_flags

VERSION = version("pytgi")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(RouterFlags):
    """The settings of the router. Raises ValueError, one sentence, if a value can not be used."""

    def __post_init__(self) -> None:
        check_flags(self)
        if self.restart and self.launcher_fd is None:
            raise ValueError(
                "`--restart` needs `--launcher-fd`: the launcher starts the new shards"
            )
        for sentence in contradictions(lambda name: getattr(self, name.replace("-", "_"))):
            raise ValueError(sentence)

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
