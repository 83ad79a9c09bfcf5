"""The training text of the embedded model: the standard library of the running Python.

Two things are read from it, in a fixed order so that two runs see the same corpus:

* `build_entries`: every public module, class, function and method that has a docstring, as a
  name, a signature and the first paragraph of its docstring;
* `source_files`: the text of the modules themselves.

Modules written in Python are parsed with `ast`, never imported, since importing some of them
has effects (a browser window, a poem). Only the modules of `INSPECTED` are imported: they are
written in C, or fill their namespace at run time, so that a parser would miss their names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

Kind = Literal["module", "class", "function", "method"]

INSPECTED = (
    "array",
    "binascii",
    "builtins",
    "cmath",
    "collections",
    "csv",
    "errno",
    "fcntl",
    "functools",
    "gc",
    "hashlib",
    "io",
    "itertools",
    "marshal",
    "math",
    "operator",
    "os",
    "pickle",
    "random",
    "re",
    "select",
    "signal",
    "socket",
    "sqlite3",
    "struct",
    "sys",
    "threading",
    "time",
    "unicodedata",
    "warnings",
    "weakref",
    "zlib",
)
"""Imported and inspected, because a parser of their source would miss names."""

SKIPPED_PACKAGES = frozenset(
    {"test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "pydoc_data"}
    | {"__pycache__", "__phello__", "distutils", "lib-dynload", "tkinter"}
)
"""Tests, applications, bundled third-party code, and the 700 names of a GUI toolkit."""

SKIPPED_MODULES = frozenset(
    [
        *("antigravity", "this", "turtle", "ntpath", "sre_compile", "pydoc"),
        # Removed in Python 3.13, so not worth the capacity of a small model.
        *("aifc", "asynchat", "asyncore", "cgi", "cgitb", "chunk", "crypt", "imghdr", "imp"),
        *("mailcap", "msilib", "nntplib", "pipes", "smtpd", "sndhdr", "sunau", "telnetlib"),
        *("uu", "xdrlib"),
    ]
)
"""Jokes, paths of another system, internals, and deprecated modules."""

HELD_OUT_MODULES = (
    "modulefinder",
    "pyclbr",
    "quopri",
    "rlcompleter",
    "sched",
    "stringprep",
    "symtable",
    "tabnanny",
    "trace",
    "wsgiref.validate",
    "xmlrpc.server",
    "zipapp",
)
"""Not in the training, neither source nor docstrings: they are for the held-out loss."""

MODULE_ALIASES = {"genericpath": "os.path", "posixpath": "os.path"}
"""The common name of a module, if it is not the name of its file."""

SIGNATURE_LIMIT = 120
SUMMARY_LIMIT = 230
SOURCE_SIZE_LIMIT = 120_000

_CALL_LINE = re.compile(r"^(?:\w+ = )?([\w.]+\(.*?\))\s*(?:-+>|--|:|=>)?\s*(.*)$")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_TEXT_ONLY = re.compile(r"[\x20-\x7e]+")


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A documented name of the standard library.

    `name` is what a question uses (`os.path.join`), `signature` what the answer starts with
    (`join(a, *p)`), and `summary` the first paragraph of the docstring on one line.
    """

    name: str
    signature: str
    summary: str
    kind: Kind

    @property
    def answer(self) -> str:
        """The expected answer to every question about this name."""
        return f"`{self.signature}`: {self.summary}"


def library_folder() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def python_files() -> list[tuple[str, Path]]:
    """Every Python module of the library that isn't skipped, as (dotted name, file)."""
    root = library_folder()
    found: list[tuple[str, Path]] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part in SKIPPED_PACKAGES or part.startswith("config-") for part in parts):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        name = ".".join(parts)
        if name not in SKIPPED_MODULES and not name.startswith("_sysconfigdata"):
            found.append((name, path))
    return found


def source_files() -> list[tuple[str, str]]:
    """The text of the modules to train on, as (dotted name, source)."""
    return [
        (name, text)
        for name, path in python_files()
        if name not in HELD_OUT_MODULES
        # Tables of characters: long, and useless as training text.
        and not name.startswith("encodings.")
        and 200 < len(text := path.read_text("utf-8", errors="replace")) <= SOURCE_SIZE_LIMIT
    ]


def held_out_files() -> list[tuple[str, str]]:
    """The text of the modules that are never trained on."""
    return [
        (name, path.read_text("utf-8", errors="replace"))
        for name, path in python_files()
        if name in HELD_OUT_MODULES
    ]


def summarise(docstring: str) -> tuple[str, str]:
    """The call that a docstring opens with, if any, and its first paragraph on one line."""
    call = spare = ""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring).strip()):
        text = " ".join(paragraph.split())
        match = _CALL_LINE.match(text)
        if match and "(" in text.split(" ")[0]:
            call = call or match[1]
            text = match[2]
            # The rest of `dict() -> new empty dictionary dict(mapping) -> ...` is not a sentence.
            if "->" in text or len(text) < 15:
                continue
            # The next paragraph is better than `time() -> floating point number`.
            if "->" in match[0] and not spare:
                spare = text
                continue
        if text.startswith(("-", "=", "*", ">>>", "+")) or not any(map(str.isalpha, text)):
            continue
        return call, shorten(text[0].upper() + text[1:])
    return call, shorten(spare[:1].upper() + spare[1:])


def shorten(text: str) -> str:
    """`text` cut after the last sentence that fits the limit, or at a word."""
    if len(text) <= SUMMARY_LIMIT:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text[:SUMMARY_LIMIT])]
    if ends and ends[-1] > 40:
        return text[: ends[-1]]
    return text[:SUMMARY_LIMIT].rsplit(" ", 1)[0].rstrip(",;:") + " ..."


def shorten_signature(name: str, parameters: list[str]) -> str:
    """`name(parameters)` with as many parameters as fit the limit, then an ellipsis."""
    signature = f"{name}({', '.join(parameters)})"
    while len(signature) > SIGNATURE_LIMIT and parameters:
        parameters = parameters[:-1]
        signature = f"{name}({', '.join([*parameters, '...'])})"
    return signature


def make_entry(
    module: str, qualified: str, signature: str, docstring: object, kind: Kind
) -> Entry | None:
    """The entry for a name, or None where its docstring says nothing that can be used."""
    if not isinstance(docstring, str):
        return None
    call, summary = summarise(docstring)
    if kind != "module" and "(" not in signature and call and len(call) <= SIGNATURE_LIMIT:
        owner = qualified.rpartition(".")[0]
        signature = f"{owner}.{call.rpartition('.')[2]}" if owner else call
    if len(summary) < 12 or not _TEXT_ONLY.fullmatch(signature + summary):
        return None
    prefix = "" if module == "builtins" else MODULE_ALIASES.get(module, module)
    name = ".".join(part for part in (prefix, qualified) if part)
    return Entry(name, signature, summary, kind)


# Parsed modules


def parsed_parameters(arguments: ast.arguments, bound: bool) -> list[str]:
    """The parameters of a parsed function, without annotations, and without a method's self."""
    positional = [*arguments.posonlyargs, *arguments.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    shown = [
        argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
        for argument, default in zip(positional, [*padding, *arguments.defaults], strict=True)
    ]
    if arguments.posonlyargs:
        shown.insert(len(arguments.posonlyargs), "/")
    if bound and positional:
        shown = shown[2 if shown[1:2] == ["/"] else 1 :]
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shown.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}")
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    return shown


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def parsed_class_entries(module: str, node: ast.ClassDef) -> Iterator[Entry | None]:
    """The class itself, with the signature of its constructor, and its public methods."""
    functions = [
        child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    parameters: list[str] | None = None
    docstring = ast.get_docstring(node)
    for function in functions:
        if function.name in ("__init__", "__new__") and parameters is None:
            parameters = parsed_parameters(function.args, bound=True)
            docstring = docstring or ast.get_docstring(function)
    signature = node.name if parameters is None else shorten_signature(node.name, parameters)
    yield make_entry(module, node.name, signature, docstring, "class")
    for function in functions:
        decorators = _decorators(function)
        if not _is_public(function.name) or decorators & {"setter", "deleter", "overload"}:
            continue
        qualified = f"{node.name}.{function.name}"
        signature = qualified
        if not decorators & {"property", "cached_property"}:
            bound = "staticmethod" not in decorators
            signature = shorten_signature(qualified, parsed_parameters(function.args, bound))
        yield make_entry(module, qualified, signature, ast.get_docstring(function), "method")


def _definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under `if` and `try` included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _definitions(statement.body)
            yield from _definitions(statement.orelse)


def parsed_entries(module: str, tree: ast.Module) -> Iterator[Entry | None]:
    """The entries of a parsed module."""
    shown = MODULE_ALIASES.get(module, module)
    yield make_entry(module, "", shown, ast.get_docstring(tree), "module")
    for node in _definitions(tree.body):
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield from parsed_class_entries(module, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            signature = shorten_signature(node.name, parsed_parameters(node.args, bound=False))
            yield make_entry(module, node.name, signature, ast.get_docstring(node), "function")


def _exported_names(tree: ast.Module) -> set[str]:
    """The names in a literal `__all__`."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List | ast.Tuple)
        ):
            return {
                element.value
                for element in node.value.elts
                if isinstance(element, ast.Constant) and isinstance(element.value, str)
            }
    return set()


def reexports(trees: dict[str, ast.Module]) -> dict[tuple[str, str], str]:
    """(submodule, name) to the package that re-exports it: `asyncio.run`, not
    `asyncio.runners.run`, is the common name."""
    found: dict[tuple[str, str], str] = {}
    for package, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            source = f"{package}.{node.module}" if node.level == 1 else node.module
            if source not in trees or not source.startswith(f"{package}."):
                continue
            names = {alias.name for alias in node.names if alias.asname in (None, alias.name)}
            if names == {"*"}:
                names = _exported_names(trees[source])
            for name in names:
                found.setdefault((source, name), package)
    return found


# Imported modules


def inspected_signature(qualified: str, value: object, bound: bool) -> str:
    """The signature of a live object, or only its name if there is none."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return qualified
    parameters = list(signature.parameters.values())
    if bound and parameters:
        parameters = parameters[1:]
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    try:
        text = str(inspect.Signature(bare))
    except ValueError:
        return qualified
    # An address differs from run to run, and an enum's repr is not Python.
    if "<" in text:
        return shorten_signature(qualified, [parameter.name for parameter in bare])
    inner = text[1:-1]
    return shorten_signature(qualified, inner.split(", ") if inner else [])


def inspected_class_entries(module: str, value: type) -> Iterator[Entry | None]:
    """A live class, with the signature of its constructor, and its public methods."""
    signature = inspected_signature(value.__name__, value, bound=False)
    yield make_entry(module, value.__name__, signature, vars(value).get("__doc__"), "class")
    for name, member in sorted(vars(value).items()):
        if not _is_public(name):
            continue
        qualified = f"{value.__name__}.{name}"
        if isinstance(member, classmethod | staticmethod):
            signature = inspected_signature(qualified, getattr(value, name), bound=False)
        elif callable(member):
            signature = inspected_signature(qualified, member, bound=True)
        else:
            signature = qualified
        documented = callable(member) or isinstance(member, classmethod | staticmethod | property)
        docstring = getattr(member, "__doc__", None) if documented else None
        yield make_entry(module, qualified, signature, docstring, "method")


def inspected_entries(module: ModuleType) -> Iterator[Entry | None]:
    """The entries of an imported module."""
    name = module.__name__
    yield make_entry("", name, name, module.__doc__, "module")
    for attribute in sorted(getattr(module, "__all__", dir(module))):
        value = getattr(module, attribute, None)
        if not _is_public(attribute) or isinstance(value, ModuleType):
            continue
        if isinstance(value, type):
            # An alias such as OSError's IOError would repeat the class under another name.
            if value.__name__ == attribute:
                yield from inspected_class_entries(name, value)
        elif inspect.isroutine(value):
            signature = inspected_signature(attribute, value, bound=False)
            yield make_entry(name, attribute, signature, value.__doc__, "function")


def build_entries() -> list[Entry]:
    """Every documented public name of the standard library, sorted by name."""
    entries: dict[str, Entry] = {}
    for module in INSPECTED:
        for entry in inspected_entries(importlib.import_module(module)):
            if entry is not None and entry.name not in entries:
                entries[entry.name] = entry
    trees = {name: ast.parse(path.read_bytes()) for name, path in python_files()}
    packages = reexports(trees)
    for module, tree in trees.items():
        # The names of a private module belong to the package that re-exports them.
        private = any(part.startswith("_") for part in module.split("."))
        if module in HELD_OUT_MODULES or module.startswith("encodings."):
            continue
        for entry in parsed_entries(module, tree):
            if entry is None:
                continue
            first = entry.name.removeprefix(f"{module}.").split(".")[0]
            package = packages.get((module, first))
            if package:
                renamed = package + entry.name.removeprefix(module)
                entry = Entry(renamed, entry.signature, entry.summary, entry.kind)
            elif private:
                continue
            entries.setdefault(entry.name, entry)
    return sorted(entries.values())
