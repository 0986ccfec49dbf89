"""`penstock env --capabilities`: refused combinations of options, as text and as JSON data."""

from __future__ import annotations

from penstock.worker.capabilities import ASYNC_REFUSALS, REFUSALS

# Keys of a row, in order.
COLUMNS = ("combination", "device", "why", "instead")


def rows() -> list[dict[str, str]]:
    """Return one row per refusal."""
    return [
        {
            "combination": " + ".join(option.name for option in refusal.options),
            "device": refusal.device or "all",
            "why": f"{refusal.why[0].upper()}{refusal.why[1:]}.",
            "instead": refusal.instead,
        }
        for refusal in (*ASYNC_REFUSALS, *REFUSALS)
    ]


def as_text() -> str:
    """Format the refusals for a terminal."""
    lines = [
        "All features work together, with any number of workers, except the following. CUDA was run on one",
        "H200; docs/internals/gpu.md lists what was not run on a GPU.",
        "",
    ]
    for row in rows():
        on = "" if row["device"] == "all" else f" on {row['device']}"
        lines.append(f"{row['combination']}{on}: {row['why']} {row['instead']}")
    return "\n".join(lines)
