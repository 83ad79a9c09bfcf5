"""The documents: no long line, no broken link, and commands and flags that exist."""

import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

import pytest
from text_generation_process.flags import OPTIONS, RouterFlags, ShardConfig
from text_generation_process.option import Option, flags_of
from text_generation_router.app import create_app
from text_generation_router.config import RouterConfig
from text_generation_router.edge.keys import NEEDS_KEY

from integration_tests.conformance.run_clients import clients, version_of

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    ROOT / "docker" / "MIGRATION.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "shard").rglob("README.md")),
    ROOT / "integration_tests" / "README.md",
)
MOST_CHARACTERS = 220
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
of_each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)


def prose(document: Path) -> str:
    """The document without its blocks of code."""
    return _FENCE.sub("", document.read_text("utf-8"))


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """File and anchor of each link that stays in the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield (document.parent / path).resolve() if path else document, anchor


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_each_document
def test_no_line_is_long(document: Path) -> None:
    lines = enumerate(document.read_text("utf-8").splitlines(), 1)
    assert [number for number, line in lines if len(line) > MOST_CHARACTERS] == []


@of_each_document
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = [
        f"{path.name}#{anchor}"
        for path, anchor in links(document)
        if not path.exists() or (anchor and anchor not in anchors(path))
    ]
    assert broken == []


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached, waiting = {README}, [README]
    while waiting:
        found = {path for path, _ in links(waiting.pop()) if path.suffix == ".md"} - reached
        reached |= found
        waiting += found
    assert set(DOCUMENTS) - reached == set()


@of_each_document
def test_every_make_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    fenced = "".join(_FENCE.findall(document.read_text("utf-8")))
    named = set(re.findall(r"^make ([a-z-]+)", fenced, re.MULTILINE))
    named |= set(re.findall(r"`make ([a-z-]+)", prose(document)))
    assert named - targets == set()


def test_every_client_is_listed_with_its_version() -> None:
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+)` \| ([0-9.]+) \|", text, re.MULTILINE)
    assert sorted(rows) == [(client, version_of(client)) for client in clients()]


def default_of(option: Option) -> str:
    """As a user writes it; empty: there is none, or the help tells it."""
    fields = (field for flags in (RouterFlags, ShardConfig) for field in flags_of(flags))
    defaults = [field.default for field, own in fields if own.name == option.name]
    default = option.default or next(iter(defaults), None)
    is_told = option.switch or "default" in option.help
    return "" if is_told or default in (None, (), "", MISSING) else str(default)


def entry_of(option: Option) -> str:
    """What docs/flags.md says of a flag."""
    names = ", ".join(f"`{name}`" for name in (option.flag, option.short) if name)
    default = f" Default: {default}." if (default := default_of(option)) else ""
    variable = "" if option.variable else " No environment variable."
    text = f"{names}: {option.help}.{default}{variable}"
    return textwrap.fill(
        f"- {text}", 118, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def test_the_list_of_all_flags_is_made_from_the_table() -> None:
    """UPDATE_FROZEN=1 writes it."""
    path, heading = ROOT / "docs" / "flags.md", "\n## All flags\n"
    text = path.read_text("utf-8")
    entries = "\n".join(entry_of(option) for option in sorted(OPTIONS, key=lambda one: one.name))
    made = f"{text.partition(heading)[0]}{heading}\n{entries}\n"
    if os.environ.get("UPDATE_FROZEN") == "1":
        path.write_text(made, "utf-8")
        text = made
    assert text == made
    named = set(re.findall(r"`--([a-z-]+)`", text))
    assert named - {option.name for option in OPTIONS} - {"help"} == set()


def test_security_names_every_route_without_a_key() -> None:
    (paragraph,) = re.findall(
        r"^- \*\*Routes without a key\.\*\*(.*?)\n\n", prose(ROOT / "SECURITY.md"), re.M | re.S
    )
    named = [re.sub(r"\{.*?\}", "{}", path) for path in re.findall(r"`(/[^`]*)`", paragraph)]
    app = create_app(RouterConfig(tokenizer_name="model", api_key=("key",)))
    routes = [route for router in app.state.routers for route in router.routes]
    needs_none = [
        route for route in routes if all(one not in route.dependencies for one in NEEDS_KEY)
    ]
    assert set(named) == {re.sub(r"\{.*?\}", "{}", route.path) for route in needs_none}
    assert len(routes) > 2 * len(needs_none), "most routes need one"
    assert {method for route in needs_none for method in route.methods} == {"GET", "HEAD"}


def test_the_readme_fits_on_a_screen() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 80


def test_contributing_can_be_read_at_once() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()) <= 120


def test_every_fault_has_a_test() -> None:
    entries = re.findall(
        r"^- \*\*.*(?:\n .*)*", (ROOT / "docs" / "faults.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(entries) > 30
    for entry in entries:
        named = re.findall(r"`(\w[\w/]*\.py)(?:::(\w+))?`", entry)
        assert named, entry
        for file, function in named:
            source = (ROOT / file).read_text("utf-8")
            assert f"def {function or 'test_'}" in source, entry
