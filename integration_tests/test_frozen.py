"""The surfaces people build on: flags, HTTP schema, wire contract. Changing one is a decision.

`UPDATE_FROZEN=1 pytest integration_tests/test_frozen.py` rewrites the copies; the difference then
belongs into the change that makes it.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from text_generation_process.flags import OPTIONS
from text_generation_process.option import Child
from text_generation_proto import pb
from text_generation_router.cli import create_parser
from text_generation_shard.cli import build_parser

from integration_tests.server import SCRIPTS

FROZEN = Path(__file__).parent / "frozen"


def assert_frozen(name: str, content: str) -> None:
    """The content equals the checked-in copy."""
    path = FROZEN / name
    if os.environ.get("UPDATE_FROZEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    assert content == path.read_text(), f"{path} differs; see this module's docstring"


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Flag or positional → what it takes."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        name = " ".join(action.option_strings) or action.dest
        takes = "switch" if action.nargs == 0 else f"default {action.default!r}"
        if action.choices is not None:
            takes += f", one of {' '.join(map(str, action.choices))}"
        if "Append" in type(action).__name__:
            takes += ", repeatable"
        found[name] = takes
    return found


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of its subcommands."""
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_flags_of_the_launcher() -> None:
    lines = {
        option.flag: " ".join(
            part
            for part in (
                option.short,
                option.variable and f"[{option.variable}]",
                "switch" if option.switch else "",
                "repeatable" if option.repeat else "",
                "" if option.default is None else f"default {option.default}",
                "refused" if option.refusal and not option.plain else "",
                f"refused but {' '.join(option.plain)}" if option.refusal and option.plain else "",
            )
            if part
        )
        for option in OPTIONS
    }
    assert_frozen("launcher_flags.json", json.dumps(lines, indent=2) + "\n")


def test_flags_of_the_router() -> None:
    assert_frozen("router_flags.json", json.dumps(flags_of(create_parser()), indent=2) + "\n")


def test_flags_of_the_shard() -> None:
    flags = {name: flags_of(parser) for name, parser in commands_of(build_parser()).items()}
    assert_frozen("shard_flags.json", json.dumps(flags, indent=2) + "\n")


def test_openapi() -> None:
    script = str(SCRIPTS / "text-generation-router")
    done = subprocess.run(
        [script, "print-schema"], capture_output=True, text=True, timeout=60, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    del document["info"]["version"]
    assert_frozen("openapi.json", json.dumps(document, indent=2) + "\n")


def test_wire_contract() -> None:
    descriptor = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(descriptor)
    assert_frozen("generate.descriptor.txt", text_format.MessageToString(descriptor))


@pytest.mark.parametrize(
    ("option", "child"),
    [
        pytest.param(option, child, id=f"{option.name}-{child.name}")
        for option in OPTIONS
        for child in option.to
    ],
)
def test_children_know_what_the_launcher_forwards(option: Any, child: Child) -> None:
    commands = commands_of(build_parser())
    parser = {
        Child.ROUTER: create_parser(),
        Child.SHARD: commands["serve"],
        Child.DOWNLOAD: commands["download-weights"],
    }[child]
    actions = [action for action in parser._actions if option.flag in action.option_strings]
    assert len(actions) == 1, f"{child} does not know {option.flag}"
    assert (actions[0].nargs == 0) == option.switch
