"""Write docs/vllm.md from src/penstock/config/vllm.toml.

python tools/vllm_page.py
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src/penstock/config/vllm.toml"
PAGE = ROOT / "docs/vllm.md"

_HEAD = """\
# Coming from vLLM

<!-- Written by tools/vllm_page.py. -->

Programs written for vLLM 0.32 run with another import, as far as Penstock has the features that they use:

```python
from penstock import LLM, SamplingParams

with LLM("demo", gpu_memory_utilization=0.5, dtype="half", enforce_eager=True) as llm:
    outputs = llm.generate(["ROMEO:"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16), lora_request=None)
    print(outputs[0].outputs[0].text)
```

Every argument is one of three kinds:

- supported, perhaps by another name or with other values;
- accepted without an effect: the value is a default, or the option is in the list at the end;
- refused, with the name of the missing feature and what to do instead.

A refusal raises `UnsupportedFeature`, which is also the exception that a caller would catch there: options of engines
and commands raise a `ConfigError`, parameters of requests an `InvalidParameter`, methods an `AttributeError` (so
`hasattr` is false), and names of the package an `ImportError`. A name in no list here is refused as unknown
(`UnknownOption` for options of engines), with the closest known name.

`None`, and an empty text or collection, ask for no feature. On the command line, `max_num_seqs=4` is
`--max-num-seqs 4`, and `enable_lora=True` is `--enable-lora`. Sizes in bytes may be texts such as `1GiB`.

Options that take lists take several values behind `penstock serve MODEL`, or one as JSON:
`--cudagraph-capture-sizes 1 2 4`. Other commands take them repeated, since their words are prompts and texts.

Modules of vLLM's that scripts import are here too, such as `penstock.sampling_params`, `penstock.lora.request` and
`penstock.utils`: the list is below. `python -m penstock.entrypoints.openai.api_server` is `penstock serve`. All public
names are in `penstock` itself as well.

Two habits differ. Close an engine: use it in a `with` block, or call `close()`, or `shutdown()` of an `AsyncEngine`.
`AsyncLLM` is another name of `AsyncEngine`, and `EngineArgs(...)` gives an `EngineConfig`, for `from_engine_args`;
`EngineArgs.add_cli_args` and `from_cli_args` take an argument parser's flags.
"""


def render(table: Mapping[str, Any]) -> str:
    """Render the page."""
    features = table["features"]
    refused = [feature for feature in features if _asking(feature)]
    sections = [
        _HEAD,
        "## The same name\n",
        *_same(table["same"]),
        "## Another name or value\n",
        _rows(("vLLM", "Penstock"), _renamed(table)),
        "## Modules\n",
        _rows(("module", "names"), _modules(table)),
        "## Not built\n",
        _rows(("feature", "planned", "what asks for it", "instead"), map(_refused_row, refused)),
        "## Accepted without an effect\n",
        "Any value is accepted; the log names those that were given.\n",
        *_ignored(table["ignored"]),
    ]
    return "\n".join(sections)


def _same(same: Mapping[str, list[str]]) -> list[str]:
    titles = {
        "options": "Options of engines",
        "parameters": "`SamplingParams`",
        "methods": "Methods",
        "names": "Names of the package",
        "commands": "Commands",
    }
    return _paragraphs((titles[kind], names) for kind, names in same.items())


def _ignored(ignored: Mapping[str, list[str]]) -> list[str]:
    titles = {"parameters": "`SamplingParams`", "arguments": "Arguments of methods"}
    options = ("Options of engines", [*ignored["flags"], *ignored["options"]])
    return _paragraphs([options, *((title, ignored[kind]) for kind, title in titles.items())])


def _paragraphs(lists: Iterable[tuple[str, list[str]]]) -> list[str]:
    texts = (f"{title}: {_names(names)}." for title, names in lists)
    return [textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n" for text in texts]


def _renamed(table: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    prefixes = {"flags": "-", "commands": "penstock "}
    for kind, names in table["other_names"].items():
        for name, own in names.items():
            yield f"`{prefixes.get(kind, '')}{name}`", f"`{own}`"
    for option, values in table["values"].items():
        for value, own in values.items():
            is_plain = value.removeprefix("-").isdecimal() or value in ("True", "False")
            given = ast.literal_eval(value) if is_plain else value
            yield f"`{option}={given!r}`", f"`{option}={own or None!r}`"


def _modules(table: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield from ((f"`penstock.{path}`", _names(names)) for path, names in table["modules"].items())
    for path, command in table["programs"].items():
        yield f"`python -m penstock.{path}`", f"`penstock {command}`".replace(" `", "`")


def _refused_row(feature: Mapping[str, Any]) -> tuple[str, str, str, str]:
    planned = "yes" if feature["planned"] else "no"
    return feature["name"], planned, "; ".join(_asking(feature)), feature["instead"]


def _asking(feature: Mapping[str, Any]) -> list[str]:
    """Names that ask for a feature, each with the values that do not."""
    names = [*feature.get("options", ()), *(f"{name}=True" for name in feature.get("flags", ()))]
    asking = [_names(names)] if names else []
    for key in ("defaults", "parameters", "arguments"):
        for name, values in feature.get(key, {}).items():
            if name.startswith("_"):
                continue
            harmless = [repr(value) for value in (values if isinstance(values, list) else [values]) if value != ""]
            kind = "" if key == "defaults" else f"{key.removesuffix('s')} "
            asking.append(f"{kind}`{name}`" + (f" other than `{'`, `'.join(harmless)}`" if harmless else ""))
    for option, values in feature.get("values", {}).items():
        asking.append(_names(f"{option}={value!r}" for value in values))
    asking += [f"prompts with {_names(feature['fields'])}"] if "fields" in feature else []
    asking += [f"parts of messages of type {_names(feature['parts'])}"] if "parts" in feature else []
    asking += [_names(f"{name}()" for name in feature.get("methods", ()))] if feature.get("methods") else []
    asking += [_names(feature["names"])] if "names" in feature else []
    asking += [_names(f"penstock {name}" for name in feature["commands"])] if feature.get("commands") else []
    asking += [f"modules {_names(f'penstock.{name}' for name in feature['modules'])}"] if "modules" in feature else []
    return asking


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def main() -> None:
    PAGE.write_text(render(tomllib.loads(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
