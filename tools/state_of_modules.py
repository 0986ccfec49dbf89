"""State that is not an object's: what modules and classes keep, and values that are set around calls."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from syntax_trees import Function, House, is_container, own_nodes, parameters

_LOCALS = frozenset({"local", "ContextVar"})
_CHANGES = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove"}
_CHANGES |= {"discard", "appendleft", "popleft", "sort"}


def state_of_modules(house: House) -> dict[str, str]:
    """State that is not an object's: by "file: name", how it is kept.

    - containers and `itertools.count` of a module or a class that functions change, also those of another module;
    - `threading.local`, `ContextVar`, and names that functions rebind with `global`;
    - context managers that set an attribute of an object around their `yield`, so that calls within see it.

    Caches of functions without other effects (`functools.cache`) are none.
    """
    found: dict[str, str] = {}
    containers = dict(_containers(house))
    for file, nodes in house.nodes.items():
        here = house.module(file)
        known = {name: place for (module, name), place in containers.items() if module == here}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                imported = {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
                known |= {name: containers[place] for name, place in imported.items() if place in containers}
            elif isinstance(node, ast.Global):
                found |= dict.fromkeys((f"{file}: {name}" for name in node.names), "global")
            elif isinstance(node, ast.ClassDef | ast.Call) and _LOCALS.intersection(_bases_or_callee(node)):
                found[f"{file}: {getattr(node, 'name', ast.unparse(node))}"] = "a thread-local or context variable"
        functions = [node for node in nodes if isinstance(node, Function)]
        # Names that are changed somewhere in the file; each may be a local one of its function.
        if _changed(nodes).isdisjoint(known):
            functions = [node for node in functions if node.decorator_list]
        for function in functions:
            own = list(own_nodes(function))
            stored = {node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            changed = _changed(own) - stored - parameters(function)
            found |= {known[name]: "a container that functions change" for name in changed & known.keys()}
            for attribute in sorted(_set_around_yield(function, own)):
                found[f"{file}: {function.name}, {attribute}"] = "an attribute set around calls"
    return found


def _containers(house: House) -> Iterator[tuple[tuple[str, str], str]]:
    """Containers of modules and classes: module and name, and the place."""
    for file, nodes in house.nodes.items():
        for body in (node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef)):
            for statement in body:
                is_plain = isinstance(statement, ast.Assign)
                target = statement.targets[0] if is_plain else getattr(statement, "target", None)
                if isinstance(target, ast.Name) and is_container(getattr(statement, "value", None)):
                    yield (house.module(file), target.id), f"{file}: {target.id}"


def _bases_or_callee(node: ast.ClassDef | ast.Call) -> Iterator[str]:
    """Names of what a class inherits, or a call calls."""
    for one in node.bases if isinstance(node, ast.ClassDef) else [node.func]:
        yield one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "")


def _changed(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of containers, also as attributes of a class, that these nodes change."""
    found = set()
    for node in nodes:
        changed: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed = [node.func.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
            changed = [node.args[0]]
        elif isinstance(node, ast.Assign | ast.Delete):
            changed = [one.value for one in node.targets if isinstance(one, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            changed = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
        for one in changed:
            if isinstance(one, ast.Name):
                found.add(one.id)
            elif isinstance(one, ast.Attribute) and ast.unparse(one.value) in ("cls", "type(self)"):
                found.add(one.attr)
    return found


def _set_around_yield(function: Function, own: Sequence[ast.AST]) -> set[str]:
    """Attributes that a context manager sets both before and after it yields. own: its nodes."""
    if not any(ast.unparse(one).endswith("contextmanager") for one in function.decorator_list):
        return set()
    yields = [node.lineno for node in own if isinstance(node, ast.Yield)]
    set_at = [
        (ast.unparse(target), node.lineno)
        for node in own
        if isinstance(node, ast.Assign)
        for one in node.targets
        for target in (one.elts if isinstance(one, ast.Tuple) else [one])
        if isinstance(target, ast.Attribute)
    ]
    before = {name for name, line in set_at if yields and line < min(yields)}
    return before & {name for name, line in set_at if yields and line > min(yields)}
