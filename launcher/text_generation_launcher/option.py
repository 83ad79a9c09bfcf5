"""What an option of the launcher is, and which child gets it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from text_generation_launcher.values import always, text

Values = Mapping[str, tuple[str, ...]]
"""Option name to its values in canonical spelling: one, or several where the flag repeats."""


class InvalidOptions(ValueError):
    """One sentence: what was asked, why it is not possible, what to do. The exit code is 1."""


class Mode(Enum):
    """What the launcher does: the first word on its command line, or none for `serve`."""

    SERVE = "serve"
    SHARDS = "shards"
    BATCH = "batch"


class Child(Enum):
    """A process that gets flags from the launcher."""

    DOWNLOAD = "download"
    SHARD = "shard"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Option:
    """One flag: its spelling, the children that get it, and what is logged when it is given."""

    name: str
    """Without the dashes; the environment variable is this in capitals, with underscores."""
    help: str
    parse: Callable[[str], str] = text
    """Returns the canonical spelling; its ValueError names what was expected."""
    to: tuple[Child, ...] = ()
    """The children that get the flag under the same name; the launcher's own have none."""
    default: str | None = None
    """Only of flags that the launcher itself owns or always passes on."""
    short: str = ""
    switch: bool = False
    """Takes no value on the command line; true or false in the environment."""
    repeat: bool = False
    secret: bool = False
    """Never printed, and passed to a child in its environment, because every user can read command
    lines. Empty is an error, so that a lost secret can't open the server."""
    guards: bool = False
    """Not a secret, but empty is an error for the same reason."""
    has_environment: bool = True
    environment_applies: Callable[[str], bool] = always
    refusal: str = ""
    """The sentence with which every value outside `plain` is refused."""
    note: str = ""
    """The sentence that is logged for every value outside `plain`."""
    plain: tuple[str, ...] = ()
    modes: tuple[Mode, ...] | None = None
    """The modes that have the option; None: those that start a child that gets it."""

    @property
    def flag(self) -> str:
        """`--max-best-of`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """`MAX_BEST_OF`."""
        return self.name.upper().replace("-", "_") if self.has_environment else ""

    def applies_in(self, mode: Mode) -> bool:
        """Whether this mode has the option."""
        if self.modes is None:
            return mode is not Mode.SHARDS or self.to != (Child.ROUTER,)
        return mode in self.modes


SHARD, ROUTER, DOWNLOAD = (Child.SHARD,), (Child.ROUTER,), (Child.DOWNLOAD,)
HTTP = (Mode.SERVE,)
WITH_ROUTER = (Mode.SERVE, Mode.BATCH)


def refused(name: str, what: str, instead: str, **rest: object) -> Option:
    """An option of TGI that is known here, but not supported."""
    sentence = f"--{name} is not supported yet ({what}): {instead}"
    return Option(name, f"not supported yet: {what}", refusal=sentence, **rest)  # type: ignore[arg-type]
