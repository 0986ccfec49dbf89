"""Description of the machine for the head of a table, and saving of tables."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any


def machine(threads: int) -> dict[str, Any]:
    """Date, CPU, kernels, threads and versions of the measuring process."""
    import torch
    import transformers

    from penstock.kernels.native import describe_kernels  # which checkouts of long ago lack

    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "kernels": describe_kernels().removesuffix(" kernels"),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def described(facts: dict[str, Any]) -> str:
    """Format the facts in one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def processor() -> str:
    return cpuinfo("model name") or platform.processor()


def cpuinfo(field: str) -> str:
    """The first value of a field of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith(field):
            return line.split(":", 1)[1].strip()
    return ""


def save(folder: Path, kind: str, *, report: dict[str, Any] | None = None, page: str | None = None) -> None:
    """Write a report as JSON and a page as Markdown, named by today's date and the kind; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}-cpu-{kind}"
    if report is not None:
        path.with_suffix(".json").write_text(json.dumps(report, indent=1))
    if page is not None:
        path.with_suffix(".md").write_text(page)
