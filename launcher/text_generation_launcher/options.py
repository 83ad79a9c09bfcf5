"""All command line flags of the launcher, and what is done with the values of each.

The flag `--max-best-of` can also be given as the environment variable `MAX_BEST_OF`; the flag wins.
An empty variable counts as not set, because container files write it so. The variable of a flag
that repeats holds its values separated by commas. No flag has the default of a child: a flag that
is not given is not passed on. A mode knows only the flags and variables that it can use: `shards`
has none of the router's, and only `serve` has those of the HTTP server.
"""

from text_generation_launcher.flags.http import HTTP_SIDE
from text_generation_launcher.flags.limits import LIMITS
from text_generation_launcher.flags.model import MODEL
from text_generation_launcher.flags.process import PROCESS
from text_generation_launcher.flags.shards import SHARDS
from text_generation_launcher.option import Child, InvalidOptions, Option, Values

OPTIONS: tuple[Option, ...] = (*MODEL, *SHARDS, *LIMITS, *HTTP_SIDE, *PROCESS)


def refuse(values: Values) -> None:
    """Raises InvalidOptions for the first option that is known but not supported."""
    for option in OPTIONS:
        if option.refusal and any(
            value not in option.plain for value in values.get(option.name, ())
        ):
            raise InvalidOptions(option.refusal)


def notes(values: Values) -> tuple[str, ...]:
    """The sentences about options that were given and have no effect."""
    return tuple(
        option.note
        for option in OPTIONS
        if option.note and any(value not in option.plain for value in values.get(option.name, ()))
    )


def describe(values: Values) -> str:
    """The options in one line for the log, without secrets."""
    parts = []
    for option in OPTIONS:
        for value in values.get(option.name, ()):
            if option.switch:
                parts.append(option.flag)
            else:
                parts.append(f"{option.flag} {'<hidden>' if option.secret else value}")
    return " ".join(parts)


def forward(values: Values, child: Child) -> tuple[str, ...]:
    """The arguments of one child: the options that it has under the same name."""
    arguments: list[str] = []
    for option in OPTIONS:
        if child not in option.to or option.secret:
            continue
        for value in values.get(option.name, ()):
            # `--flag=value`: otherwise a value that starts with a dash would be read as a flag
            arguments.append(option.flag if option.switch else f"{option.flag}={value}")
    return tuple(arguments)


def forward_secrets(values: Values, child: Child) -> dict[str, str]:
    """The variables of one child with its secret options: one value per line."""
    return {
        option.variable: "\n".join(values[option.name])
        for option in OPTIONS
        if option.secret and child in option.to and option.name in values
    }


def secrets(values: Values) -> tuple[str, ...]:
    """The values that no other user of the machine may see."""
    return tuple(v for option in OPTIONS if option.secret for v in values.get(option.name, ()))
