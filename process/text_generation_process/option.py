"""What a flag is, which processes have it, and how its values are read.

A parser returns the canonical spelling of a value; its ValueError names what was expected.
"""

import argparse
import ipaddress
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from typing import Any, get_args, get_type_hints

from text_generation_process import defaults

Values = Mapping[str, str]
"""Option name to its value in canonical spelling; where the flag repeats, one value per line."""


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


def text(value: str) -> str:
    """Any text that is not empty."""
    if not value:
        raise ValueError("a value that isn't empty")
    return value


def true_or_false(value: str) -> str:
    """`true` or `false`; also from `1` or `0`."""
    canonical = {"true": "true", "1": "true", "false": "false", "0": "false"}.get(value.lower())
    if canonical is None:
        raise ValueError("true or false")
    return canonical


def is_true(value: str) -> bool:
    """The value of a flag that takes `true` or `false`."""
    return true_or_false(value) == "true"


class Choice:
    """One of the names, as spelled here."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, value: str) -> str:
        if value not in self.names:
            raise ValueError(f"one of {', '.join(self.names)}")
        return value


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], str]:
    """A whole number between two limits, both allowed."""
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: str) -> str:
        is_plain = value.isascii() and value.isdigit() and len(value) < 19
        number = int(value) if is_plain else -1
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"a whole number {limits}")
        return str(number)

    return parse


PORT = whole(1, 65535)


def sizes(value: str) -> str:
    """Whole numbers from 1 to 1024 with commas between; or 0 alone, for none."""
    each = whole(1, 1024)
    try:
        return value if value == "0" else ",".join(each(item.strip()) for item in value.split(","))
    except ValueError as error:
        raise ValueError("whole numbers from 1 to 1024 with commas between, or 0") from error


def number(
    above: float, maximum: float = sys.float_info.max, or_equal: bool = False
) -> Callable[[str], str]:
    """A finite number that is larger than `above`, or equal to it, and at most `maximum`."""
    limit = "" if maximum == sys.float_info.max else f" and at most {maximum:g}"
    expected = f"a number of {above:g} or more" if or_equal else f"a number above {above:g}{limit}"

    def parse(value: str) -> str:
        with suppress(ValueError):
            given = float(value)
            if above < given <= maximum or (or_equal and given == above):
                return value
        raise ValueError(expected)

    return parse


not_negative = number(0, or_equal=True)


def path(value: str) -> str:
    """The path of a route."""
    if not value.startswith("/"):
        raise ValueError("a path that starts with /")
    return value


def is_address(value: str) -> bool:
    """Whether HOSTNAME is an address: containers set it to their own name."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return value == "localhost"
    return True


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
    """Takes no value on the command line; true or false in the environment, without a `parse`."""
    repeat: bool = False
    secret: bool = False
    """Never printed, and passed to a child in its environment, because every user can read command
    lines. Empty is an error, so that a lost secret can't open the server."""
    has_environment: bool = True
    environment_applies: Callable[[str], bool] = bool
    """Whether the variable counts, by its value; of a secret it always does."""
    refusal: str = ""
    """The sentence with which every value outside `plain` is refused."""
    note: str = ""
    """The sentence that is logged for every value outside `plain`."""
    plain: tuple[str, ...] = ()
    modes: tuple[Mode, ...] | None = None
    """The launcher's modes that have it; None: those that start a child that gets it."""

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


DOWNLOAD = (Child.DOWNLOAD,)
HTTP = (Mode.SERVE,)
WITH_ROUTER = (Mode.SERVE, Mode.BATCH)


def without_effect(name: str, why: str, **rest: object) -> Option:
    """An option of TGI that changes nothing here."""
    note = f"--{name} has no effect: {why}"
    return Option(name, f"no effect: {why}", note=note, **rest)  # type: ignore[arg-type]


def refused(name: str, what: str, instead: str, **rest: object) -> Option:
    """An option of TGI that is known here, but not supported."""
    sentence = f"--{name} is not supported yet ({what}): {instead}"
    return Option(name, f"not supported yet: {what}", refusal=sentence, **rest)  # type: ignore[arg-type]


def flag(
    value: Any,
    help: str,
    parse: Callable[[str], str] = text,
    type: Callable[[str], Any] | None = None,
    **rest: Any,
) -> Any:
    """A field that is a flag with the default `value`; `rest`: more of its `Option`. False makes a
    switch, () a flag that repeats. `type`: by default that of the field."""
    option = Option("", help, parse, switch=value is False, repeat=value == (), **rest)
    return field(default=value, metadata={"option": option, "type": type})


def flags_of(config: type[Any]) -> Iterator[tuple[Field[Any], Option]]:
    """The fields of a class that are flags."""
    for one in fields(config):
        if one.metadata:
            yield one, replace(one.metadata["option"], name=one.name.replace("_", "-"))


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Adds the flags of a class to the command line of its process."""
    hints = get_type_hints(config)
    for one, option in flags_of(config):
        kinds = get_args(hints[one.name]) or (hints[one.name],)
        [kind, *_] = [kind for kind in kinds if kind is not types.NoneType]
        how: dict[str, Any] = {"type": one.metadata["type"] or kind}
        if option.switch:
            how = {"action": "store_true"}
        elif option.repeat:
            how = {"action": _Append}
        elif isinstance(option.parse, Choice):
            how["choices"] = option.plain or option.parse.names
        default = None if one.default is MISSING else one.default
        parser.add_argument(option.flag, default=default, help=option.help, **how)


def check_flags(config: Any) -> None:
    """Raises ValueError, a sentence, for a value that a flag can not have."""
    for one, option in flags_of(type(config)):
        value = getattr(config, one.name)
        if value is None or option.modes == () or (one.name == "port" and value == 0):
            continue  # port 0: any free one
        for given in value if isinstance(value, tuple) else (value,):
            try:
                option.parse(str(given))
            except ValueError as error:
                raise ValueError(f"`{option.flag}` must be {error}. Given: {given}") from error


class _Append(argparse.Action):
    """Collects the values of a flag that is given several times."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


LAUNCHERS = (
    Option("model-id", "hub id or local directory; by default the embedded model"),
    Option("huggingface-hub-cache", "directory of the hub cache", to=DOWNLOAD),
    Option(
        "num-shard",
        "processes that the model is split over; by default one for each GPU that "
        "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES names, and one on a CPU",
        whole(1),
    ),
    Option(
        "sharded",
        "true: split over all GPUs, which must be at least two; false: one shard, unless "
        "--num-shard is given",
        true_or_false,
    ),
    Option(
        "master-addr",
        f"address of this machine where the shards meet (default {defaults.MASTER_ADDR})",
    ),
    Option("master-port", "port of --master-addr; by default a free one", PORT),
    Option(
        "restart",
        "replace shards and router that end, up to 5 times in 10 minutes; RESTART=false or "
        "--no-restart: the server ends with them",
        default="true",
        switch=True,
        modes=HTTP,
    ),
    Option(
        "no-restart",
        "end, with exit code 1, when a shard or the router ends",
        switch=True,
        has_environment=False,
        modes=HTTP,
    ),
    Option(
        "shard-uds-path",
        "prefix of the shards' unix sockets, -<rank> is appended; by default they are in a new "
        "folder that only this user can open, in XDG_RUNTIME_DIR or TMPDIR",
    ),
    Option("max-input-length", "the old name of --max-input-tokens", whole(1), modes=WITH_ROUTER),
    # Google's Vertex AI sets it.
    Option("aip-http-port", "port to listen on, overrides --port", PORT, modes=HTTP),
    Option(
        "input",
        "file with the requests, in OpenAI's batch format",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "output",
        "file for the results, one per line; an existing file is continued",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "end-with-stdin",
        "stop when standard input ends, for example because the parent process is gone",
        switch=True,
        has_environment=False,
        modes=(Mode.SHARDS,),
    ),
    Option("json-output", "log one JSON object per line", switch=True),
    Option(
        "env",
        "print the runtime environment, then start",
        switch=True,
        has_environment=False,
        short="-e",
    ),
)
"""The launcher's own options."""
OF_TGI = (
    without_effect(
        "disable-custom-kernels", "pytgi computes every model with its own kernels", switch=True
    ),
    without_effect(
        "enable-prefill-logprobs",
        "requests can always ask for the log-probabilities of their prompt (decoder_input_details)",
        switch=True,
    ),
    without_effect(
        "usage-stats",
        "pytgi never sends usage statistics",
        parse=Choice("on", "off", "no-stack"),
        plain=("off",),
    ),
    refused("weights-cache-override", "a separate weights folder", "give --model-id a directory"),
    refused("lora-adapters", "LoRA adapters", "merge the adapter into the weights first"),
    refused("ngrok", "tunnels", "put a tunnel in front", switch=True),
    refused("ngrok-authtoken", "tunnels", "put a tunnel in front", secret=True),
    refused("ngrok-edge", "tunnels", "put a tunnel in front"),
)
"""Options of TGI that change nothing here, or are refused."""
