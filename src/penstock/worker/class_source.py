"""What Transformers says of a class, read from its source as text: to import it would take seconds."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.config import ModelConfig

_SCALED_EMBEDDING = re.compile(r"^class \w*ScaledWordEmbedding\(nn\.Embedding\)", re.MULTILINE)
_IGNORABLE = re.compile(r"_keys_to_ignore_on_load_unexpected = (\[[^\]]*\])")
# What rules for `layer_types` call.
_BUILTINS_OF_RULES = {"bool": bool, "int": int, "len": len, "range": range}
_EXPERTS_OR_SHARED = re.compile(r"self\.(experts|shared_\w+)\(")


@dataclass(frozen=True, slots=True)
class ClassSource:
    """defaults: what fields of the configuration mean where they are absent, None among it. names: of fields, by what
    the code calls them, where that differs. layer_types_rule: the statements that make `layer_types` where they are
    absent, if no others do. scales_embedding: the embedding does more than to look its rows up. has_rotary: heads turn.
    shares_last: what all tokens go through beside experts runs after them. has_transposed: linear layers keep their
    weights as [inputs, outputs], and multiply by them themselves. ignorable: expressions for names that
    checkpoints may hold although the model has no such tensor, such as layers that predict further tokens.
    """

    defaults: Mapping[str, Any]
    names: Mapping[str, str]
    layer_types_rule: list[ast.stmt] | None
    scales_embedding: bool
    has_rotary: bool
    shares_last: bool
    has_transposed: bool
    ignorable: tuple[str, ...]

    def complete(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """`config.json` with what it leaves out."""
        fields = {**self.defaults, **hf_config}
        return fields | {called: fields[name] for called, name in self.names.items() if name in fields}

    def layer_types(self, completed: Mapping[str, Any]) -> list[str] | None:
        """What the class makes of a `config.json` without them; None where its rule cannot be told from the source."""
        if self.layer_types_rule is None:
            return None
        rule = compile(ast.Module(self.layer_types_rule, type_ignores=[]), "layer_types", "exec")
        config = SimpleNamespace(**completed)
        try:
            # Statements of the installed Transformers, which builds the model by them.
            exec(rule, {"__builtins__": _BUILTINS_OF_RULES, "self": config})
            kinds = config.layer_types
        except (ArithmeticError, AttributeError, LookupError, NameError, TypeError):
            return None
        return kinds if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds) else None


def read_class_source(model_config: ModelConfig) -> ClassSource | None:
    """None where Transformers lacks the class, or its attention does not go through the attention interface, or the
    source is not laid out as others are.
    """
    model_type, architecture = model_config.hf_config.get("model_type"), model_config.architecture
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None or not isinstance(model_type, str):
        return None
    models = Path(found.origin).parent / "models"
    parts = model_type.replace("-", "_").split("_")
    for count in range(len(parts), 0, -1):  # the part of a larger model that reads text has a type of its own
        name = "_".join(parts[:count])
        modeling = _text(models / name / f"modeling_{name}.py")
        if f"class {architecture}(" in modeling:
            if "ALL_ATTENTION_FUNCTIONS" not in modeling or "_is_stateful = True" in modeling:
                return None
            body = _configuration(_text(models / name / f"configuration_{name}.py"), model_type)
            return None if body is None else _class_source(body, modeling)
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _configuration(text: str, model_type: str) -> list[ast.stmt] | None:
    """The body of the class of this `model_type`."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and _literal_fields(node.body).get("model_type") == model_type:
            return node.body
    return None


def _class_source(body: list[ast.stmt], modeling: str) -> ClassSource:
    fields = _literal_fields(body)
    names = fields.pop("attribute_map", {})
    first = _EXPERTS_OR_SHARED.search(modeling)
    return ClassSource(
        fields,
        names,
        _layer_types_rule(body),
        scales_embedding=_SCALED_EMBEDDING.search(modeling) is not None,
        has_rotary="RotaryEmbedding" in modeling,
        shares_last=first is not None and first[1] == "experts",
        has_transposed="Conv1D(" in modeling,
        ignorable=tuple(name for names in _IGNORABLE.findall(modeling) for name in ast.literal_eval(names)),
    )


def _literal_fields(body: list[ast.stmt]) -> dict[str, Any]:
    fields = {}
    for node in body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and value is not None:
                try:
                    fields[target.id] = ast.literal_eval(value)
                except ValueError:  # made by a call
                    continue
    return fields


def _layer_types_rule(body: list[ast.stmt]) -> list[ast.stmt] | None:
    """What the class does under `if self.layer_types is None`, if it assigns them nowhere else."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    rules = [
        node.body for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "self.layer_types is None"
    ]
    if len(rules) != 1:
        return None
    inside = [node for statement in rules[0] for node in ast.walk(statement)]
    return rules[0] if sum(map(_assigns_layer_types, nodes)) == sum(map(_assigns_layer_types, inside)) else None


def _assigns_layer_types(node: ast.AST) -> bool:
    """To all of them, or to one."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(ast.unparse(target).startswith("self.layer_types") for target in targets)
