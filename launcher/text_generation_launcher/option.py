"""What an option of the launcher is, and who gets it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from text_generation_launcher.values import always, text

Values = Mapping[str, tuple[str, ...]]
"""Option name to its values in canonical spelling: one, or several where the flag repeats."""


class InvalidOptions(ValueError):
    """One sentence: what was asked, why it can't be had, what to do. The launcher exits with 1."""


class Mode(Enum):
    """What the launcher is asked to do: the first word on its command line, or none for `serve`."""

    SERVE = "serve"
    SHARDS = "shards"
    BATCH = "batch"


class Child(Enum):
    """Who gets a flag."""

    DOWNLOAD = "download"
    SHARD = "shard"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Option:
    """One flag: its spelling, who gets it, and what is said when it is given."""

    name: str
    """Without the dashes; the environment variable is this in capitals, with underscores."""
    help: str
    parse: Callable[[str], str] = text
    """Returns the canonical spelling; its ValueError names what was expected."""
    to: tuple[Child, ...] = ()
    """The children that get the flag under the same name; the launcher's own have none."""
    default: str | None = None
    """Only for what the launcher itself owns or always passes on."""
    short: str = ""
    switch: bool = False
    """Takes no value on the command line; true or false in the environment."""
    repeat: bool = False
    secret: bool = False
    """Never printed, and handed to a child by its environment, since command lines are for all to
    see; and empty is an error, so that a lost secret can't open the server."""
    guards: bool = False
    """No secret, but empty is an error for the same reason."""
    has_environment: bool = True
    environment_applies: Callable[[str], bool] = always
    refusal: str = ""
    """The sentence with which every value outside `plain` is refused."""
    note: str = ""
    """The sentence that is logged for every value outside `plain`."""
    plain: tuple[str, ...] = ()
    modes: tuple[Mode, ...] | None = None
    """Where it is an option; None: where somebody is started who gets it."""

    @property
    def flag(self) -> str:
        """`--max-best-of`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """`MAX_BEST_OF`."""
        return self.name.upper().replace("-", "_") if self.has_environment else ""

    def applies_in(self, mode: Mode) -> bool:
        """Whether it is an option of this mode."""
        if self.modes is None:
            return mode is not Mode.SHARDS or self.to != (Child.ROUTER,)
        return mode in self.modes
