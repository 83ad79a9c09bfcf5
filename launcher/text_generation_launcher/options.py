"""Every command line flag of the launcher, in one table.

A flag `--max-best-of` is also read from the environment variable `MAX_BEST_OF`; the flag wins. A
variable that is set to nothing counts as not set, as container files write it; that of a flag which
repeats holds its values with commas between. The table holds no default for what a child owns: a
flag that isn't given isn't passed on.
"""

import argparse
import ipaddress
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

Values = Mapping[str, tuple[str, ...]]
"""Option name to its values in canonical spelling: one, or several where the flag repeats."""


class InvalidOptions(ValueError):
    """One sentence: what was asked, why it can't be had, what to do. The launcher exits with 1."""


class Child(Enum):
    """Who gets a flag."""

    DOWNLOAD = "download"
    SHARD = "shard"
    ROUTER = "router"


def text(value: str) -> str:
    """Any text but the empty one."""
    if not value:
        raise ValueError("a value that isn't empty")
    return value


def true_or_false(value: str) -> str:
    """`true` or `false`; `1` and `0` are taken for them."""
    canonical = {"true": "true", "1": "true", "false": "false", "0": "false"}.get(value.lower())
    if canonical is None:
        raise ValueError("true or false")
    return canonical


def choice(*names: str) -> Callable[[str], str]:
    """One of the names, as spelled here."""

    def parse(value: str) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return value

    return parse


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


def number(above: float, maximum: float = sys.float_info.max) -> Callable[[str], str]:
    """A finite number that is larger than `above` and at most `maximum`."""
    limit = "" if maximum == sys.float_info.max else f" and at most {maximum:g}"

    def parse(value: str) -> str:
        try:
            is_inside = above < float(value) <= maximum
        except ValueError:
            is_inside = False
        if not is_inside:
            raise ValueError(f"a number above {above:g}{limit}")
        return value

    return parse


def not_negative(value: str) -> str:
    """A finite number, 0 or more."""
    try:
        is_inside = 0 <= float(value) <= sys.float_info.max
    except ValueError:
        is_inside = False
    if not is_inside:
        raise ValueError("a number of 0 or more")
    return value


def path(value: str) -> str:
    """Where a route is."""
    if not value.startswith("/"):
        raise ValueError("a path that starts with /")
    return value


def is_address(value: str) -> bool:
    """Whether HOSTNAME says where to listen: containers set it to their own name instead."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return value == "localhost"
    return True


def always(value: str) -> bool:
    """For variables that mean what they say, whatever they say."""
    return True


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
    """Never printed; and empty is an error, so that a lost secret can't open the server."""
    has_environment: bool = True
    environment_applies: Callable[[str], bool] = always
    refusal: str = ""
    """The sentence with which every value outside `plain` is refused."""
    note: str = ""
    """The sentence that is logged for every value outside `plain`."""
    plain: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """`--max-best-of`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """`MAX_BEST_OF`."""
        return self.name.upper().replace("-", "_") if self.has_environment else ""


def refused(name: str, what: str, instead: str, **rest: object) -> Option:
    """An option of TGI that is known here, but not served yet."""
    sentence = f"--{name} is not supported yet ({what}): {instead}"
    return Option(name, f"not supported yet: {what}", refusal=sentence, **rest)  # type: ignore[arg-type]


SHARD, ROUTER, DOWNLOAD = (Child.SHARD,), (Child.ROUTER,), (Child.DOWNLOAD,)
ONE_SHARD = "start without it, one shard serves the whole model"
PORT = whole(1, 65535)
_NEVER_REMOTE_CODE = (
    "--trust-remote-code is refused: pytgi never runs code from a model repository; start without "
    "it and serve a model whose architecture is built in"
)

OPTIONS: tuple[Option, ...] = (
    # the model
    Option("model-id", "hub id or local directory; without it the embedded model is served"),
    Option(
        "revision",
        "branch, commit or refs/pr/N on the hub",
        to=(Child.DOWNLOAD, Child.ROUTER),
    ),
    Option("dtype", "type of the weights", choice("float32", "float16", "bfloat16"), SHARD),
    Option("device", "where the shard computes", choice("cpu", "cuda"), SHARD),
    Option("huggingface-hub-cache", "directory of the hub cache", to=DOWNLOAD),
    refused("quantize", "quantized weights", "serve the unquantized checkpoint with --dtype"),
    refused("speculate", "speculative decoding", "start without it", plain=("0",)),
    refused("kv-cache-dtype", "another type for the KV cache", "it is kept in the --dtype type"),
    Option(
        "trust-remote-code",
        "never: pytgi runs no code from a model repository",
        true_or_false,
        switch=True,
        refusal=_NEVER_REMOTE_CODE,
    ),
    refused("weights-cache-override", "a separate weights folder", "give --model-id a directory"),
    refused("lora-adapters", "LoRA adapters", "merge the adapter into the weights first"),
    Option("rope-scaling", "stretch the context", choice("linear", "dynamic"), SHARD),
    Option("rope-factor", "by how much, 1.0 when only --rope-scaling is given", number(0), SHARD),
    # the shards
    refused("num-shard", "more than one shard", ONE_SHARD, parse=whole(1), plain=("1",)),
    refused("sharded", "more than one shard", ONE_SHARD, parse=true_or_false, plain=("false",)),
    Option(
        "master-addr", "no effect with one shard", note="--master-addr has no effect with one shard"
    ),
    Option(
        "master-port",
        "no effect with one shard",
        PORT,
        note="--master-port has no effect with one shard",
    ),
    Option(
        "shard-uds-path",
        "prefix of the shards' unix sockets, -<rank> is appended",
        default="/tmp/text-generation-server",
    ),
    Option("cuda-memory-fraction", "of the card's memory", number(0, maximum=1), SHARD),
    refused("cuda-graphs", "CUDA graphs", "start without it or with 0", plain=("0",)),
    Option(
        "disable-custom-kernels",
        "no effect: there are none",
        true_or_false,
        switch=True,
        note="--disable-custom-kernels has no effect: there are no custom kernels",
    ),
    Option("watermark-gamma", "share of the vocabulary that is favoured", number(0, 1), SHARD),
    Option("watermark-delta", "by how much it is favoured", not_negative, SHARD),
    Option(
        "enable-prefill-logprobs",
        "no effect: always on",
        true_or_false,
        switch=True,
        note="--enable-prefill-logprobs has no effect: requests can always ask for the "
        "log-probabilities of their prompt (decoder_input_details)",
    ),
    # the limits
    Option("validation-workers", "tokenizer threads of the router", whole(1), ROUTER),
    Option("max-concurrent-requests", "more are answered with 429", whole(1), ROUTER),
    Option("max-best-of", "largest best_of of a request", whole(1), ROUTER),
    Option("max-stop-sequences", "most stop sequences of a request", whole(0), ROUTER),
    Option("max-top-n-tokens", "largest top_n_tokens of a request", whole(0), ROUTER),
    Option("max-input-tokens", "longest prompt in tokens", whole(1), ROUTER),
    Option("max-input-length", "the old name of --max-input-tokens", whole(1)),
    Option("max-total-tokens", "longest prompt and answer in tokens", whole(1), ROUTER),
    Option(
        "waiting-served-ratio",
        "of waiting to running requests, above which a prefill interrupts",
        not_negative,
        ROUTER,
        default="0.3",
    ),
    Option("max-batch-prefill-tokens", "tokens in one prefill", whole(1), ROUTER),
    Option("max-batch-total-tokens", "tokens of all running requests", whole(1), ROUTER),
    Option("max-waiting-tokens", "decode steps that a waiting request may wait", whole(0), ROUTER),
    Option("max-batch-size", "most running requests", whole(1), ROUTER),
    Option("max-client-batch-size", "most prompts in one request", whole(1), ROUTER),
    Option("payload-limit", "bytes of a request body", whole(1), ROUTER),
    Option("disable-grammar-support", "refuse grammars", true_or_false, ROUTER, switch=True),
    # the HTTP side
    Option(
        "hostname",
        "address to listen on (HOSTNAME counts only when it is an address: containers set it to "
        "their own name)",
        to=ROUTER,
        default="0.0.0.0",
        environment_applies=is_address,
    ),
    Option("port", "port to listen on", PORT, ROUTER, default="3000", short="-p"),
    Option("prometheus-port", "serves /metrics on this port as well", PORT, ROUTER),
    Option(
        "api-key",
        "requests must send it, or one of several, as a bearer token",
        to=ROUTER,
        repeat=True,
        secret=True,
    ),
    Option("cors-allow-origin", "may be given several times", to=ROUTER, repeat=True),
    refused("ngrok", "tunnels", "put a tunnel in front", parse=true_or_false, switch=True),
    refused("ngrok-authtoken", "tunnels", "put a tunnel in front", secret=True),
    refused("ngrok-edge", "tunnels", "put a tunnel in front"),
    Option(
        "tokenizer-config-path",
        "a tokenizer_config.json or .jinja with the chat template",
        to=ROUTER,
    ),
    Option(
        "chat-format",
        "how the model writes tool calls, found from the chat template by default",
        choice("auto", "hermes", "llama3", "mistral", "mistral-args", "generic"),
        ROUTER,
    ),
    # what Google's Vertex AI sets
    Option("aip-http-port", "port to listen on, wins over --port", PORT),
    Option("aip-predict-route", "path that answers as /vertex does", path, ROUTER),
    Option("aip-health-route", "path that answers as /health does", path, ROUTER),
    # what is told to whom
    Option(
        "json-output",
        "log one JSON object per line",
        true_or_false,
        switch=True,
    ),
    refused("otlp-endpoint", "traces", "use the metrics at /metrics"),
    refused("otlp-service-name", "traces", "use the metrics at /metrics"),
    Option(
        "usage-stats",
        "no effect: pytgi never sends usage statistics",
        choice("on", "off", "no-stack"),
        note="--usage-stats has no effect: pytgi never sends usage statistics",
        plain=("off",),
    ),
    Option(
        "env",
        "print what this runs on, then go on",
        switch=True,
        has_environment=False,
        short="-e",
    ),
    Option(
        "graceful-termination-timeout",
        "seconds that running requests have to end when the server is stopped",
        not_negative,
        ROUTER,
        default="90",
        short="-g",
    ),
)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors: fifty flags of usage would hide them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        print(f"text-generation-launcher (pytgi) {metadata.version('pytgi')}")
        parser.exit(0)


def _create_parser() -> _Parser:
    parser = _Parser(
        prog="text-generation-launcher",
        usage="%(prog)s [--model-id MODEL_ID] [flags]",
        description="Serve a language model over HTTP.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action=_Version, nargs=0, help="print the version")
    for option in OPTIONS:
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


def read_options(argv: Sequence[str], environment: Mapping[str, str]) -> Values:
    """The options that were given, checked one by one, and the launcher's defaults.

    A value that can't be read ends the process with one line on stderr and exit code 2.
    """
    parser = _create_parser()
    given: dict[str, list[str]] = vars(parser.parse_args(argv))
    values: dict[str, tuple[str, ...]] = {}
    for option in OPTIONS:
        raw, source = given.get(option.name), f"argument {option.flag}"
        if raw is None and option.variable in environment:
            variable = environment[option.variable]
            if (variable or option.secret) and option.environment_applies(variable):
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


def refuse(values: Values) -> None:
    """Raises InvalidOptions for the first option that is known but not supported."""
    for option in OPTIONS:
        if option.refusal and any(
            value not in option.plain for value in values.get(option.name, ())
        ):
            raise InvalidOptions(option.refusal)


def notes(values: Values) -> tuple[str, ...]:
    """The sentences about options that were given and change nothing."""
    return tuple(
        option.note
        for option in OPTIONS
        if option.note and any(value not in option.plain for value in values.get(option.name, ()))
    )


def describe(values: Values) -> str:
    """The options in one line for the log, secrets left out."""
    parts = []
    for option in OPTIONS:
        for value in values.get(option.name, ()):
            if option.switch:
                parts.append(option.flag)
            else:
                parts.append(f"{option.flag} {'<hidden>' if option.secret else value}")
    return " ".join(parts)


def forward(values: Values, child: Child) -> tuple[str, ...]:
    """The arguments of one child, for the options it gets under the same name."""
    arguments: list[str] = []
    for option in OPTIONS:
        if child not in option.to:
            continue
        for value in values.get(option.name, ()):
            # `--flag=value`, so that a value which starts with a dash stays a value
            arguments.append(option.flag if option.switch else f"{option.flag}={value}")
    return tuple(arguments)
