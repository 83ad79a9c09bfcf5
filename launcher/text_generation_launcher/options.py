"""All command line flags of the launcher, how they are read, and what is done with their values.

The flag `--max-best-of` can also be given as the environment variable `MAX_BEST_OF`; the flag wins.
An empty variable counts as not set, because container files write it so. The variable of a flag
that repeats holds its values separated by commas. No flag has the default of a child: a flag that
is not given is not passed on. A mode knows only the flags and variables that it can use: `shards`
has none of the router's, and only `serve` has those of the HTTP server.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from text_generation_process.flags import OPTIONS
from text_generation_process.option import (
    Child,
    InvalidOptions,
    Mode,
    Option,
    Values,
    true_or_false,
)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors, without the usage of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Looks up the version only on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        print(f"text-generation-launcher (pytgi) {metadata.version('pytgi')}")
        parser.exit(0)


_ABOUT = {
    Mode.SERVE: "Serve a language model over HTTP. Other modes, each with a --help of its own: "
    "`shards` runs the model's shards alone, `batch` answers the requests in a file.",
    Mode.SHARDS: "Run the shards alone, for a router or a benchmark that is started separately.",
    Mode.BATCH: "Answer the requests in a file: --input and --output in OpenAI's batch format.",
}


def _create_parser(mode: Mode) -> _Parser:
    name = "text-generation-launcher"
    parser = _Parser(
        prog=name if mode is Mode.SERVE else f"{name} {mode.value}",
        usage="%(prog)s [--model-id MODEL_ID] [flags]",
        description=_ABOUT[mode],
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action=_Version, nargs=0, help="print the version")
    for option in OPTIONS:
        if not option.applies_in(mode):
            continue
        names = (option.flag, option.short) if option.short else (option.flag,)
        default = "" if option.default is None else f" (default {option.default})"
        text = option.help + default + (f" [{option.variable}]" if option.variable else "")
        kind: dict[str, Any] = {"action": "append", "metavar": "VALUE"}
        if option.switch:
            kind = {"action": "store_const", "const": ["true"]}
        parser.add_argument(*names, dest=option.name, help=text, **kind)
    return parser


def split_mode(argv: Sequence[str]) -> tuple[Mode, Sequence[str]]:
    """The mode that the first argument names, and the remaining arguments."""
    if argv and argv[0] in {mode.value for mode in Mode}:
        return Mode(argv[0]), argv[1:]
    return Mode.SERVE, argv


def read_options(
    argv: Sequence[str], environment: Mapping[str, str], mode: Mode = Mode.SERVE
) -> Values:
    """The options of the mode that were given, checked one by one, and the launcher's defaults.

    A value that can't be read ends the process with one line on stderr and exit code 2.
    """
    parser = _create_parser(mode)
    given: dict[str, list[str]] = vars(parser.parse_args(argv))
    values: dict[str, str] = {}
    for option in OPTIONS:
        if not option.applies_in(mode):
            continue
        raw, source = given.get(option.name), f"argument {option.flag}"
        if raw is None and option.variable in environment:
            variable = environment[option.variable]
            if option.secret or option.environment_applies(variable):
                raw = variable.split(",") if option.repeat else [variable]
                source = f"environment variable {option.variable}"
        if raw is not None:
            if len(raw) > 1 and not option.repeat:
                parser.error(f"{source}: expected once, got {len(raw)} times")
            try:
                parse = true_or_false if option.switch else option.parse
                parsed = "\n".join(map(parse, raw))
            except ValueError as error:
                got = "" if option.secret else f", got {', '.join(map(repr, raw))}"
                parser.error(f"{source}: expected {error}{got}")
            if not (option.switch and parsed == "false"):
                values[option.name] = parsed
        elif option.default is not None:
            values[option.name] = option.default
    return values


def _given(values: Values) -> Iterator[tuple[Option, str]]:
    """Each value with its option."""
    for option in OPTIONS:
        if option.name in values:
            value = values[option.name]
            yield from ((option, one) for one in (value.split("\n") if option.repeat else [value]))


def refuse(values: Values) -> None:
    """Raises InvalidOptions for the first option that is known but not supported."""
    for option, value in _given(values):
        if option.refusal and value not in option.plain:
            raise InvalidOptions(option.refusal)


def notes(values: Values) -> tuple[str, ...]:
    """The sentences about options that were given and have no effect."""
    return tuple(one.note for one, value in _given(values) if one.note and value not in one.plain)


def describe(values: Values) -> str:
    """The options in one line for the log, without secrets."""
    return " ".join(
        one.flag if one.switch else f"{one.flag} {'<hidden>' if one.secret else value}"
        for one, value in _given(values)
    )


def forward(values: Values, child: Child) -> tuple[str, ...]:
    """The arguments of one child: the options that it has under the same name."""
    return tuple(
        # `--flag=value`: otherwise a value that starts with a dash would be read as a flag
        one.flag if one.switch else f"{one.flag}={value}"
        for one, value in _given(values)
        if child in one.to and not one.secret
    )


def forward_secrets(values: Values, child: Child) -> dict[str, str]:
    """The variables of one child with its secret options: one value per line."""
    return {
        option.variable: values[option.name]
        for option in OPTIONS
        if option.secret and child in option.to and option.name in values
    }


def secrets(values: Values) -> tuple[str, ...]:
    """The values that no other user of the machine may see."""
    return tuple(value for option, value in _given(values) if option.secret)
