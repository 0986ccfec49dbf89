"""`penstock replay`: runs the recorded steps of an engine in new workers, or lists them."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.failures import readable_errors
from penstock.cli.options import parse_options
from penstock.cli.output import standard_output, write
from penstock.observability.logging import configure_logging

if TYPE_CHECKING:
    from penstock.engine.replay import ReplayReport
    from penstock.executor.recording.entries import Entry, Recording


def replay(
    file: Annotated[Path, typer.Argument(help="A recording, of the engine option `record`")],
    model: Annotated[str | None, typer.Option(help="Model, if it has another name here")] = None,
    show: Annotated[bool, typer.Option("--show", help="List the recorded steps instead of running them")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Engine option that replaces the recorded one; repeatable"),
    ] = None,
    trust_imports: Annotated[
        bool, typer.Option("--trust-imports", help="Import the Python classes that the recording names")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Verbose log, and tracebacks")] = False,
) -> None:
    """Run recorded steps in new workers, compare the tokens, and show the time of each phase.

    Works on another machine, with another commit and other ranks (--option tensor_parallel_size=2). Exit code 1 means
    that tokens differ, or that the recording cannot be replayed.
    """
    with readable_errors(debug=debug):
        configure_logging("debug" if debug else None)
        if show:
            from penstock.executor.recording.entries import read_recording

            for line in described(read_recording(file)):
                write(standard_output(as_json=False), f"{line}\n")
            return
        from penstock.engine.replay import replay as run

        report = run(file, model, trust_imports=trust_imports, **parse_options(option))
        text = json_module.dumps(report.to_dict(), indent=2) if json else as_text(report)
        write(standard_output(as_json=json), f"{text}\n")
    if not report.is_equal:
        raise typer.Exit(1)


def as_text(report: ReplayReport) -> str:
    """Format a report as a table of phases and a sentence on the tokens."""
    lines = [f"{report.num_steps:,} steps, {report.num_compared:,} tokens", "", "phase     recorded   replayed"]
    for phase, recorded_s in report.recorded_s.items():
        lines.append(f"{phase:<9}{recorded_s:7.3f} s  {report.replayed_s[phase]:7.3f} s")
    if report.num_filled_tokens:
        lines += ["", f"Computed before their steps, and not timed: {report.num_filled_tokens:,} cached positions"]
    lines += ["", "All tokens are equal." if report.is_equal else f"{report.num_different:,} results differ:"]
    lines += [
        f"  step {one.step_id}, request {one.req_id}: {one.recorded} recorded, {one.replayed} replayed"
        for one in report.differences
    ]
    if report.unlike and not report.is_equal:
        lines += ["Other workers than the recorded ones:", *(f"  {one}" for one in report.unlike)]
    return "\n".join([*lines, *([report.end] if report.end else [])])


def described(recording: Recording) -> Iterator[str]:
    """Describe a recording in lines, one per entry, without tokens."""
    start = recording.start
    yield f"{start.model}, {start.options}"
    yield f"{len(start.requests)} requests run when the recording begins"
    begin_s: float | None = None
    for entry in recording.entries:
        line, at_s = _described(entry)
        if at_s is not None and begin_s is None:
            begin_s = at_s
        yield f"{'' if at_s is None or begin_s is None else f'{at_s - begin_s:9.4f} s':<12}{line}"
    if recording.is_cut:
        yield "The recording was cut: its process ended while it wrote."


def _described(entry: Entry) -> tuple[str, float | None]:
    """Line of an entry, and its time."""
    from penstock.executor.recording.entries import Called, Executed, Failed, Read, Sampled

    if isinstance(entry, Executed):
        return f"execute {entry.step.anon_repr()}", entry.begin_s
    if isinstance(entry, Sampled):
        return f"sample {entry.sampling.anon_repr()}", entry.begin_s
    if isinstance(entry, Read):
        result = entry.result
        counts = [len(ids) for ids in getattr(result, "sampled_token_ids", [])]
        errors = f", errors {sorted(result.errors)}" if result.errors else ""
        return (
            f"result of step {result.step_id}: {sum(counts)} tokens of {len(result.req_ids)} requests{errors}",
            entry.end_s,
        )
    if isinstance(entry, Called):
        return f"call {entry.method}", None
    return (f"failed: {entry.reason}", entry.at_s) if isinstance(entry, Failed) else (str(entry), None)
