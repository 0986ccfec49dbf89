"""`penstock cache ls`, `rm`, `export` and `import`: folders of KV cache blocks (`kv_offload_dir`)."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.failures import readable_errors
from penstock.cli.output import standard_output, write
from penstock.errors import ConfigError, PenstockError
from penstock.observability import printable

if TYPE_CHECKING:
    from penstock.features.kv_files.folder import Blocks

_Folder = Annotated[Path, typer.Argument(help="Folder of the option kv_offload_dir")]
_Model = Annotated[str | None, typer.Option("--model", help="Only blocks of models with this in their name")]
_Unused = Annotated[float | None, typer.Option("--unused-days", min=0.0, help="Only blocks unused for so many days")]
_COLUMNS = ("model", "rank", "made", "blocks", "size", "last used")


def cache_ls(
    folder: _Folder,
    model: _Model = None,
    unused_days: _Unused = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON instead of a table")] = False,
) -> None:
    """List blocks of the KV cache in a folder, by model and rank."""
    with readable_errors():
        blocks = _chosen(folder, model, unused_days)
        if json:
            text = json_module.dumps([_as_json(one) for one in blocks], indent=1) + "\n"
        else:
            rows = [_COLUMNS, *map(_row, blocks)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
            text = "".join(f"{line}\n" for line in lines)
        write(standard_output(as_json=json), text)


def cache_rm(
    folder: _Folder,
    model: _Model = None,
    unused_days: _Unused = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all blocks")] = False,
) -> None:
    """Remove blocks of the KV cache from a folder; engines compute again what they do not find."""
    with readable_errors():
        from penstock.features.kv_files.folder import remove

        if everything is (model is not None or unused_days is not None):
            raise ConfigError("Name what to remove: --model NAME, --unused-days DAYS, or --all.")
        blocks = _chosen(folder, model, unused_days)
        if failures := remove(folder, blocks):
            raise PenstockError(f"{len(failures):,} files of {folder} are not removed: {failures[0]}.")
        _say(f"Removed {_described(blocks)} from {folder}.")


def cache_export(
    folder: _Folder,
    archive: Annotated[Path, typer.Argument(help="File to write, such as prefixes.tar")],
    model: _Model = None,
) -> None:
    """Write blocks of the KV cache to an archive, for `penstock cache import` on another machine."""
    with readable_errors():
        from penstock.features.kv_files.folder import export_blocks

        blocks = _chosen(folder, model, None)
        if not any(one.num_blocks for one in blocks):
            raise ConfigError(f"{folder} has no such blocks. Type `penstock cache ls {folder}`.")
        count = export_blocks(folder, blocks, archive)
        _say(f"Wrote {count:,} blocks to {archive}.")


def cache_import(
    folder: _Folder,
    archive: Annotated[Path, typer.Argument(help="Archive of `penstock cache export`", dir_okay=False)],
) -> None:
    """Add the blocks of an archive to a folder. Engines of the same model, options and kernels find them."""
    with readable_errors():
        from penstock.features.kv_files.folder import import_blocks

        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder. Create it first.")
        _say(f"Added {import_blocks(folder, archive):,} blocks to {folder}.")


def _chosen(folder: Path, model: str | None, unused_days: float | None) -> list[Blocks]:
    from penstock.features.kv_files.folder import blocks_in, chosen

    return chosen(blocks_in(folder), model, unused_days)


def _row(one: Blocks) -> tuple[str, ...]:
    from penstock.observability.units import format_bytes

    about = one.about
    used = "never" if one.last_used is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(one.last_used))
    rank = f"{about.get('rank', '?')} of {about.get('ranks', '?')}"
    size = format_bytes(one.num_bytes)
    content = about.get("content")
    model = one.model if content is None else f"{one.model} ({content})"
    shown = (model, rank, str(about.get("made", "?")), f"{one.num_blocks:,}", size, used)
    return tuple(map(printable.one_line, shown))


def _as_json(one: Blocks) -> dict[str, Any]:
    counts = {"blocks": one.num_blocks, "bytes": one.num_bytes, "last_used": one.last_used}
    return {"digest": one.digest, **one.about, **counts}


def _described(blocks: list[Blocks]) -> str:
    from penstock.observability.units import format_bytes

    return f"{sum(one.num_blocks for one in blocks):,} blocks ({format_bytes(sum(one.num_bytes for one in blocks))})"


def _say(text: str) -> None:
    write(standard_output(as_json=False), f"{text}\n")
