"""Syntax trees of the source, and what `house.py` asks of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "penstock"
Function = ast.FunctionDef | ast.AsyncFunctionDef
CONTAINERS = frozenset(
    {"dict", "list", "set", "deque", "Counter", "defaultdict", "OrderedDict", "WeakSet", "WeakValueDictionary", "count"}
)


class House:
    """Syntax trees of a source folder. trees: by module file, relative to the folder."""

    def __init__(self, source: Path = SOURCE) -> None:
        self.source = source
        files = {path.relative_to(source).as_posix(): path for path in sorted(source.rglob("*.py"))}
        self.trees: dict[str, ast.Module] = {file: ast.parse(path.read_text()) for file, path in files.items()}

    def outside(self, *folders: str) -> Iterator[str]:
        """Files that are in none of the folders."""
        return (file for file in self.trees if not file.startswith(folders))

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        """Nodes by file, each after those around it."""
        return {file: list(ast.walk(tree)) for file, tree in self.trees.items()}

    def names(self, file: str) -> set[str]:
        """Identifiers of a file."""
        return {name for node in self.nodes[file] for name in names_of(node)}

    @cached_property
    def functions(self) -> list[tuple[str, str, Function]]:
        """All functions, with their file, and the line where they are defined."""
        return [
            (file, f"{file}:{node.lineno} {node.name}", node)
            for file, nodes in self.nodes.items()
            for node in nodes
            if isinstance(node, Function)
        ]

    @cached_property
    def classes(self) -> list[tuple[str, ast.ClassDef]]:
        """All classes, with their file."""
        return [(file, node) for file, nodes in self.nodes.items() for node in nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Files that each file imports: in functions and for types, too."""
        files = {self.module(file): file for file in self.trees}
        return {
            file: {files[name] for node in nodes for name in imported(node, files)} - {file}
            for file, nodes in self.nodes.items()
        }

    def module(self, file: str) -> str:
        """Name by which a file is imported."""
        return ".".join((self.source.name, *Path(file).with_suffix("").parts)).removesuffix(".__init__")


def imported(node: ast.AST, modules: Container[str]) -> Iterator[str]:
    """Modules that a statement imports names of; `from package import module` imports none of the package's names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if name in modules or node.module in modules:
                yield name if name in modules else node.module


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions and classes in it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            pending += ast.iter_child_nodes(node)


def names(node: ast.AST) -> set[str]:
    """Identifiers in a piece of code."""
    return {name for one in ast.walk(node) for name in names_of(one)}


def names_of(node: ast.AST) -> Iterator[str]:
    """Identifiers of a node itself."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias | Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""
    elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
        yield node.arg


def parameters(function: Function) -> set[str]:
    """Names of a function's parameters without the suffixes of shapes."""
    arguments = function.args
    names = chain(arguments.posonlyargs, arguments.args, arguments.kwonlyargs)
    return {re.sub(r"_[A-Z0-9]+$", "", one.arg) for one in names}


def is_container(value: ast.expr | None) -> bool:
    """Whether an expression makes a mutable container."""
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        is_field = name == "field" and any(
            given.arg == "default_factory" and getattr(given.value, "id", "") in CONTAINERS for given in value.keywords
        )
        return name in CONTAINERS or is_field
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
