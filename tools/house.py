"""Structure of the source in numbers: `python tools/house.py` prints them as Markdown.

The counts are made from syntax trees, and from a trace of one real step. `tests/architecture/test_house.py` bounds
them: a change may lower a count, and then the bound, but not raise it.

    python tools/house.py              the table
    python tools/house.py --places     also the places that were counted
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from state_of_modules import state_of_modules
from syntax_trees import SOURCE, Function, House, is_container, names, names_of, own_nodes, parameters


@dataclass(frozen=True)
class Count:
    """A count. wanted: its goal; None without one. places: what was counted, for `--places`."""

    name: str
    value: int
    wanted: int | None
    places: Sequence[str] = ()


# Knots of imports.


def knots(imports: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Strongly connected components of more than one file (Tarjan, 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(file: str) -> None:
        number[file] = low[file] = len(number)
        stack.append(file)
        for other in imports[file]:
            if other not in number:
                visit(other)
                low[file] = min(low[file], low[other])
            elif other in stack:
                low[file] = min(low[file], number[other])
        if low[file] == number[file]:
            at = stack.index(file)
            found.append(set(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for file in imports:
        if file not in number:
            visit(file)
    return [knot for knot in found if len(knot) > 1]


def count_knots(house: House) -> Iterator[Count]:
    found = knots(house.imports)
    of_step = [knot for knot in found if any(file.startswith(("runner/", "step/")) for file in knot)]
    files = [file for knot in of_step for file in sorted(knot)]
    yield Count("files in knots of imports around `runner/` and `step/`, types included", len(files), 0, files)
    everywhere = [", ".join(sorted(knot)) for knot in found]
    yield Count("files in knots of imports in all of `src`", sum(map(len, found)), 0, everywhere)


# Files of a step.


def files_of_step(num_steps: int = 8) -> dict[str, list[str]]:
    """Files that one repeated greedy decode step of one request calls, in the order of the first call: its functions.

    The request is one of the demo model, in an engine core in this process, on the CPU. The step begins no block.
    """
    from penstock.config import EngineConfig
    from penstock.contract import SamplingParams
    from penstock.engine.core.engine_core import EngineCore
    from penstock.engine.messages import EngineRequest

    files: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)):
            functions = files.setdefault(Path(path).relative_to(SOURCE).as_posix(), [])
            if frame.f_code.co_name not in functions:
                functions.append(frame.f_code.co_name)

    core = EngineCore(EngineConfig.create("demo", device="cpu", kv_cache_memory_bytes="8MiB"))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + 8, ignore_eos=True, seed=0)
        core.add_request(EngineRequest(req_id="traced", prompt_token_ids=[5, 6, 7, 8], sampling_params=params))
        for _ in range(num_steps):
            core.step()
        sys.setprofile(note)
        try:
            (output,) = core.step()
        finally:
            sys.setprofile(None)
        assert len(output.new_token_ids) == 1, "the traced step gives one token"
    finally:
        core.close()
    return files


def count_files_of_step(_: House) -> Iterator[Count]:
    files = [f"{file}: {', '.join(functions)}" for file, functions in files_of_step().items()]
    of_runner = [file for file in files if file.startswith(("runner/", "step/", "features/"))]
    of = "`runner/`, `step/` and features"
    yield Count(f"files of {of} that a repeated decode step calls", len(of_runner), 10, of_runner)
    yield Count("files that it calls from `EngineCore.step` to the token and back", len(files), 20, files)


# Decisions on fast paths.

# Names by which the code speaks of repeated steps, kept frames, and calls that take a shorter way for plain steps.
_FAST_PACKAGES = ("contract/", "engine/", "executor/", "features/", "runner/", "scheduler/", "step/", "worker/")
_DECISIONS = (
    r"is_repeated|repeats|repeats_step_id|repeated_id|(may|can)_(be_)?repeat(ed)?|is_plain_greedy|keeps_frames"
    r"|go_on_after|awaits_parts|awaiting_req_ids|ReadyOutput"
)
_FAST_NAMES = re.compile(rf"_?({_DECISIONS}|has_one_token_each|is_all_decodes)")
_DECIDING = re.compile(rf"_?({_DECISIONS})")


def count_decisions(house: House) -> Iterator[Count]:
    """Places that decide whether a step repeats, keeps its frame or takes a fast path.

    A function decides if it bears one of the names above and computes its answer (more than one expression that reads
    an attribute), or if it has a condition that joins such a name with something else: `and`, `or`, a comparison with
    another value than None, a call. A condition on the bare name (`if frame.is_repeated:`), or on a call of the
    function that decides (`if self._can_be_repeated(step):`), follows a decision that was made elsewhere, and is not
    counted. Nor is a function that tells the shape of a step (`is_all_decodes`): only a condition that joins the shape
    with something else decides. Names are the only way to see them, so a decision under a new name is seen once the
    name is in the list.
    """
    places = []
    for file, place, function in house.functions:
        if not file.startswith(_FAST_PACKAGES):
            continue
        own = [node for node in own_nodes(function) if isinstance(node, ast.expr)]
        conditions = [*_conditions(function), *(node for node in own if isinstance(node, ast.IfExp))]
        is_named = _DECIDING.fullmatch(function.name) and any(
            isinstance(node, ast.BoolOp | ast.Compare) for node in own
        )
        if is_named or any(_decides(condition) for condition in conditions):
            places.append(place)
    what = "whether a step repeats, keeps its frame or takes a fast path"
    yield Count(f"places that decide {what}", len(places), 3, places)


def _conditions(function: Function) -> Iterator[ast.expr]:
    for node in own_nodes(function):
        if isinstance(node, ast.If | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def _decides(condition: ast.expr) -> bool:
    """Whether a condition joins a name of fast paths with something else."""
    if isinstance(condition, ast.IfExp):
        # A choice between two calls, or between a value and its wrapper.
        arms = names(condition.body) | names(condition.orelse)
        return _decides(condition.test) or any(map(_FAST_NAMES.fullmatch, arms))
    if isinstance(condition, ast.UnaryOp):
        return _decides(condition.operand)
    if isinstance(condition, ast.Call) and any(map(_DECIDING.fullmatch, names_of(condition.func))):
        return any(map(_decides, condition.args))
    if isinstance(condition, ast.Compare) and all(_is_none(one) for one in condition.comparators):
        return False
    return not isinstance(condition, ast.Name | ast.Attribute) and any(map(_FAST_NAMES.fullmatch, names(condition)))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# LoRA.

# Sizes of latent attention, `q_lora_rank` and `kv_lora_rank`, have nothing to do with adapters.
_LORA = re.compile(r"(?<!q_)(?<!kv_)lora|adapter", re.IGNORECASE)
_OWN_LORA = ("lora/", "features/lora/")


def count_adapters(house: House) -> Iterator[Count]:
    """Registries of adapters, and the files that speak of them.

    A registry is a class with a mutable container on its objects where the class, or the container, has LoRA or adapter
    in its name. Messages and options, which are frozen, are none, nor are kernels and layers, which hold tensors.
    """
    registries = []
    for file, node in house.classes:
        if file.startswith(("kernels/", "layers/")):
            continue
        names = _containers_of(node)
        if not _LORA.search(node.name):
            names = [name for name in names if _LORA.search(name)]
        if names:
            registries.append(f"{file}:{node.lineno} {node.name}: {', '.join(names)}")
    yield Count("registries of LoRA's state", len(registries), 2, registries)
    lines: Counter[str] = Counter()
    for file in house.outside(*_OWN_LORA):
        nodes = house.nodes[file]
        lines[file] = len({getattr(node, "lineno", 0) for node in nodes if any(map(_LORA.search, names_of(node)))})
    spoken = [f"{file}: {number}" for file, number in lines.most_common() if number]
    yield Count("files that name LoRA or adapters outside of its folders", len(spoken), 35, spoken)
    yield Count("lines that do", sum(lines.values()), None)


def _containers_of(node: ast.ClassDef) -> list[str]:
    """Names of the containers that a class makes for each object, in its constructor or as a dataclass."""
    if any(isinstance(one, ast.Call) and any(k.arg == "frozen" for k in one.keywords) for one in node.decorator_list):
        return []
    if any(keyword.arg == "frozen" for keyword in node.keywords):
        return []
    found = []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and is_container(statement.value):
            found.append(ast.unparse(statement.target))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            for one in ast.walk(statement):
                targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                if isinstance(one, ast.Assign | ast.AnnAssign) and is_container(one.value):
                    found += [target.attr for target in targets if isinstance(target, ast.Attribute)]
    return found


# Tracing, executions, attention, calls.

_TRACING = frozenset(
    {"TracedTensor", "TracedRequests", "trace_opaque", "share_of_input", "have_same_shape", "Untraceable", "Trace"}
)
_TRACING_PLACES = ("kernels/native/", "runner/execute/")


def count_tracing(house: House) -> Iterator[Count]:
    files = [
        f"{file}: {', '.join(sorted(names))}"
        for file in house.outside(*_TRACING_PLACES)
        if (names := house.names(file) & _TRACING)
    ]
    yield Count("files with types of the tracer outside of native kernels and executions", len(files), 0, files)


def count_execution(house: House) -> Iterator[Count]:
    """Members of the interface of executions, and questions of which one an object is."""
    classes = {node.name: node for _, node in house.classes}
    interface = classes["Execution"]
    members = [
        getattr(one, "name", None) or ast.unparse(getattr(one, "target", one))
        for one in interface.body
        if isinstance(one, Function | ast.AnnAssign | ast.Assign)
    ]
    members = [name for name in members if not name.startswith("_")]
    yield Count("members of the interface of executions", len(members), 5, members)
    kinds = {"Execution"} | {name for name, node in classes.items() if "Execution" in map(ast.unparse, node.bases)}
    places = [
        f"{file}:{node.lineno}"
        for file, nodes in house.nodes.items()
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and names(node.args[1]) & kinds
    ]
    yield Count("`isinstance` of an execution", len(places), 0, places)


def count_attention(house: House) -> Iterator[Count]:
    """Signatures by which attention is entered: the cache and a step's metadata, with heads or their projection.

    The object that carries them counts as one.
    """
    rows = {"query", "key", "value", "qkv", "projected", "projection", "hidden", "heads"}
    places = [
        place
        for _, place, function in house.functions
        if {"kv_cache", "metadata"} <= parameters(function) and parameters(function) & rows
    ]
    for file, node in house.classes:
        fields = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
        if {"kv_cache", "metadata"} <= fields:
            places.append(f"{file}:{node.lineno} {node.name}")
    yield Count("signatures of the attention entry", len(places), 1, places)


def count_calls(house: House) -> Iterator[Count]:
    """Definitions of `collective_rpc`'s parameters, and switches over names of methods.

    A switch compares a value with literals that are names of methods of the workers, or with a constant of the module
    that has them, or maps two or more of them in a dictionary.
    """
    definitions = [
        place
        for _, place, function in house.functions
        if {"method", "args", "kwargs", "unique_reply_rank"} <= parameters(function)
    ]
    yield Count("definitions of `collective_rpc`'s parameters", len(definitions), 1, definitions)
    rpc, worker = (house.nodes[file] for file in ("contract/rpc.py", "worker/worker.py"))
    methods = {node.name for node in worker if isinstance(node, Function) and not _is_property(node)}
    methods |= set(_texts(*rpc))
    # Words that are also names of other things.
    methods -= {"profile", "execute_model", "load_model", "check_health"}
    places = []
    for file, nodes in house.nodes.items():
        constants = {
            ast.unparse(one.targets[0]): one.value for one in house.trees[file].body if isinstance(one, ast.Assign)
        }
        for node in nodes:
            if isinstance(node, ast.Compare):
                others = [constants.get(getattr(one, "id", ""), one) for one in node.comparators]
                named = methods.intersection(_texts(*chain.from_iterable(map(ast.walk, others))))
                is_switch = bool(named)
            elif isinstance(node, ast.Dict):
                named = methods.intersection(_texts(*(key for key in node.keys if key is not None)))
                is_switch = len(named) > 1
            else:
                continue
            if is_switch:
                places.append(f"{file}:{node.lineno} {', '.join(sorted(named))}")
    yield Count("switches over names of worker methods", len(places), 1, places)


def _is_property(function: Function) -> bool:
    return "property" in map(ast.unparse, function.decorator_list)


def _texts(*nodes: ast.AST) -> Iterator[str]:
    """The string literals among these nodes that are identifiers."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


# State of modules.


def count_state(house: House) -> Iterator[Count]:
    places = [f"{place} ({how})" for place, how in state_of_modules(house).items()]
    yield Count("state of modules and ambient values", len(places), None, places)


# Lines.

# Most that a feature may cost: what is more has a second subject, which is a package of its own.
_LINES_OF_FEATURE = 1500


def count_lines(house: House) -> Iterator[Count]:
    """Lines of Python of tracked files, as `git ls-files` lists them."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=house.source, capture_output=True, text=True, check=True)
    lines: Counter[str] = Counter()
    of_features: Counter[str] = Counter()
    for file in listed.stdout.split():
        num_lines = (house.source / file).read_bytes().count(b"\n")
        lines[file.partition("/")[0] if "/" in file else "."] += num_lines
        if file.startswith("features/"):
            of_features["/".join(file.split("/")[:2])] += num_lines
    large = [f"{name}: {n:,}" for name, n in of_features.items() if n > _LINES_OF_FEATURE]
    yield Count(f"features of more than {_LINES_OF_FEATURE:,} lines", len(large), 0, large)
    yield Count("lines of Python in `src`", lines.total(), None, [f"{name}: {n:,}" for name, n in lines.most_common()])


Counting: TypeAlias = Callable[[House], Iterator[Count]]
COUNTS: Sequence[Counting] = (
    count_knots,
    count_files_of_step,
    count_decisions,
    count_adapters,
    count_tracing,
    count_execution,
    count_attention,
    count_calls,
    count_state,
    count_lines,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", action="store_true", help="print the places that were counted")
    parser.add_argument("--json", action="store_true", help="print counts and places as JSON")
    arguments = parser.parse_args()
    # Nodes are many, and none is garbage, which the collector would look for again and again.
    gc.disable()
    house = House()
    counts = [count for function in COUNTS for count in function(house)]
    if arguments.json:
        print(json.dumps([*map(asdict, counts)]))
        return
    print("| | now | wanted |\n| --- | ---: | ---: |")
    for count in counts:
        wanted = "" if count.wanted is None else f"≤ {count.wanted}" if count.wanted else "0"
        print(f"| {count.name} | {count.value:,} | {wanted} |")
    for count in counts if arguments.places else ():
        print(f"\n{count.name}:", *count.places, sep="\n    ")


if __name__ == "__main__":
    main()
