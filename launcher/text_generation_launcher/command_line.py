"""The launcher's command line and environment, read by the table of options."""

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from text_generation_launcher.option import Mode, Values
from text_generation_launcher.options import OPTIONS


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
        described = option.help
        if option.default is not None:
            described += f" (default {option.default})"
        if option.variable:
            described += f" [{option.variable}]"
        if option.switch:
            parser.add_argument(
                *names, dest=option.name, action="store_const", const=["true"], help=described
            )
        else:
            parser.add_argument(
                *names,
                dest=option.name,
                action="append",
                metavar="VALUE",
                help=described,
            )
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
    values: dict[str, tuple[str, ...]] = {}
    for option in OPTIONS:
        if not option.applies_in(mode):
            continue
        raw, source = given.get(option.name), f"argument {option.flag}"
        if raw is None and option.variable in environment:
            variable = environment[option.variable]
            counts = variable or option.secret or option.guards
            if counts and option.environment_applies(variable):
                raw = variable.split(",") if option.repeat else [variable]
                source = f"environment variable {option.variable}"
        if raw is not None:
            if len(raw) > 1 and not option.repeat:
                parser.error(f"{source}: expected once, got {len(raw)} times")
            try:
                parsed = tuple(option.parse(value) for value in raw)
            except ValueError as error:
                got = "" if option.secret else f", got {', '.join(map(repr, raw))}"
                parser.error(f"{source}: expected {error}{got}")
            if not (option.switch and parsed == ("false",)):
                values[option.name] = parsed
        elif option.default is not None:
            values[option.name] = (option.default,)
    return values
