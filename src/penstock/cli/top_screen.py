"""Screen of `penstock top`: the numbers of `/live` as bars and sparklines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.observability.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

# Decoded answer of `/live`.
Sample: TypeAlias = "dict[str, Any]"
_Read: TypeAlias = Callable[[Sample], float]

_LEVELS = "▁▂▃▄▅▆▇█"
# Windows of rates and of mean latencies, and the number of samples that a sparkline may show.
_RATE_S, _LATENCY_S = 3.0, 30.0
_NUM_SAMPLES, _NUM_STEPS = 400, 500
_LABEL_WIDTH = 22
# Time without a token, in seconds, after which a core with requests is shown as stalled.
_STALLED_S = 5.0
_LANES = (("prefill", "blue"), ("decode", "cyan"), ("draft", "yellow"))
_BLOCKS = (("used", "cyan", "█"), ("cached", "cyan", "▒"), ("free", "bright_black", "░"))


class History:
    """Answers of `/live` so far, and the steps that they had. Needs one answer at least."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_NUM_SAMPLES)
        self.steps: deque[Sample] = deque(maxlen=_NUM_STEPS)

    def add(self, sample: Sample) -> None:
        self.steps.extend(sample["steps"])
        self.samples.append(sample)

    @property
    def last_step_at(self) -> float:
        """End of the newest step, in Unix seconds; 0 before the first."""
        return float(self.steps[-1]["ended_at"]) if self.steps else 0.0

    def rates(self, read: _Read) -> list[float]:
        """Increase of a counter per second at each sample, over the seconds before it."""
        found, first, samples = [], 0, list(self.samples)
        for index, sample in enumerate(samples):
            while samples[first]["time"] < sample["time"] - _RATE_S and first < index - 1:
                first += 1
            seconds = sample["time"] - samples[first]["time"]
            found.append(max(0.0, read(sample) - read(samples[first])) / seconds if seconds else 0.0)
        return found

    def mean_s(self, name: str) -> float | None:
        """Mean of a latency over the last half minute, or since the server's start where nothing was observed in it."""
        last = self.samples[-1]
        first = next(one for one in self.samples if one["time"] >= last["time"] - _LATENCY_S)
        count = last[name]["count"] - first[name]["count"]
        total = last[name]["sum"] - first[name]["sum"]
        if count <= 0:
            count, total = last[name]["count"], last[name]["sum"]
        return total / count if count else None


def screen(history: History, url: str, width: int) -> RenderableType:
    """The screen of the newest sample, for a terminal of this many columns."""
    from rich.console import Group

    sample, room = history.samples[-1], max(10, width - _LABEL_WIDTH - 12)
    return Group(
        _head(sample, url),
        "",
        _requests(sample, room),
        _throughput(history, room),
        "",
        _steps(history, room),
        "",
        _caches(sample["kv_cache"], sample["encoder_cache"], room),
        "",
        _foot(history, width),
    )


def sparkline(values: Sequence[float], width: int, most: float | None = None) -> str:
    """The last values as a row of bars. most: value of a whole bar; None takes the largest."""
    shown = list(values)[-width:]
    top = max([*shown, 1e-9]) if most is None else most
    bars = (_LEVELS[min(7, int(8 * value / top))] if value > 0 else " " for value in shown)
    return "".join(bars).rjust(width)


def _head(sample: Sample, url: str) -> Text:
    from rich.text import Text

    cores, state = sample["cores"], sample["not_ready"]
    if state is None and cores["recovering"]:
        state = f"{cores['recovering']} of {cores['all']} cores recover from a lost process"
    elif state is None and cores["stalled_s"] > _STALLED_S:
        state = "a core computes no tokens"
    text = Text.assemble((sample["model"], "bold"), "  ")
    ready = "ready" if cores["state"] == "running" else f"ready, {cores['state']}"
    text.append(f"● {state or ready}", "red" if state else "green")
    up = "" if sample["started_at"] is None else f"  up {_duration(sample['time'] - sample['started_at'])}"
    return text.append(f"  {url}  version {sample['version']}{up}", "bright_black")


def _requests(sample: Sample, room: int) -> Table:
    requests = sample["requests"]
    most, running = max(1, requests["max_running"]), requests["running"]
    filled = min(room, round(room * running / most))
    bar = [("█" * filled, "cyan"), ("░" * (room - filled), "bright_black")]
    waiting = max(0, requests["unfinished"] - running)
    return _rows([("requests", bar, f"{running} of {most}"), ("waiting", [], f"{waiting}")])


def _throughput(history: History, room: int) -> Table:
    generated = history.rates(lambda sample: float(sample["counters"]["generated_tokens"]))
    of_prompts = history.rates(lambda sample: float(sample["counters"]["prompt_tokens"]))
    lanes = (("generated tokens/s", generated, "cyan"), ("prompt tokens/s", of_prompts, "blue"))
    return _rows((label, [(sparkline(rates, room), style)], f"{rates[-1]:,.0f}") for label, rates, style in lanes)


def _steps(history: History, room: int) -> Table:
    """Lanes of the last steps: tokens by kind, and milliseconds."""
    steps = list(history.steps)
    lanes = [(f"{name} tokens", [float(step[name]) for step in steps], style) for name, style in _LANES]
    lanes.append(("ms of a step", [1000.0 * step["seconds"] for step in steps], "bright_black"))
    rows = []
    for label, values, style in lanes:
        shown = values[-room:]
        rows.append((label, [(sparkline(values, room), style)], f"max {max(shown):,.0f}" if shown else "no step"))
    return _rows(rows)


def _caches(kv_cache: dict[str, int], encoder_cache: dict[str, int], room: int) -> Table:
    number, used = kv_cache["num_blocks"], kv_cache["used"]
    legend, bar = _parts_of_bar(number, used, kv_cache["cached"], room)
    rows = [("KV cache", bar, f"{100 * used / max(1, number):.0f} %"), ("", [(legend, "bright_black")], "")]
    if num_states := kv_cache["num_states"]:
        states = f"{num_states}, {kv_cache['used_states']} used, {kv_cache['snapshots']} snapshots"
        rows.append(("states", [(states, "bright_black")], f"{100 * kv_cache['used_states'] / num_states:.0f} %"))
    if num_tokens := encoder_cache["num_tokens"]:
        used, cached = encoder_cache["used"], encoder_cache["cached"]
        legend, bar = _parts_of_bar(num_tokens, used, cached, room)
        legend += f" tokens; items found {_share(encoder_cache['hits'], encoder_cache['queries'])}"
        rows.append(("encoder cache", bar, f"{100 * (used + cached) / num_tokens:.0f} %"))
        rows.append(("", [(legend, "bright_black")], ""))
    return _rows(rows)


def _parts_of_bar(number: int, used: int, cached: int, room: int) -> tuple[str, list[tuple[str, str]]]:
    """Legend and coloured parts of a bar of what is used, cached and free."""
    counts = {"used": used, "cached": cached, "free": number - used - cached}
    whole = max(1, number)
    ends = [round(room * used / whole), round(room * (used + cached) / whole), room]
    widths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    bar = [(sign * width, style) for (_, style, sign), width in zip(_BLOCKS, widths, strict=True)]
    return ", ".join(f"{count} {name}" for name, count in counts.items()), bar


def _foot(history: History, width: int) -> Text:
    from rich.text import Text

    sample = history.samples[-1]
    counters, restarts = sample["counters"], sample["restarts"]
    parts = [
        f"first token {_latency(history.mean_s('time_to_first_token'))}",
        f"between tokens {_latency(history.mean_s('inter_token_latency'))}",
        f"prefix hits {_share(counters['cached_prompt_tokens'], counters['prompt_tokens'])}",
        f"drafts accepted {_share(counters['accepted_tokens'], counters['draft_tokens'])}",
        f"preemptions {counters['preemptions']}",
    ]
    again = ", ".join(f"{kind} {number}" for kind, number in restarts.items() if number)
    lines = _wrapped(parts, width)
    if sample["figures"]:
        lines += ["", *_wrapped([f"{one['label']} {_figure(one)}" for one in sample["figures"]], width), ""]
    text = Text("\n".join(lines))
    return text.append(f"\nstarted again: {again or 'nothing'}", "red" if again else "bright_black")


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Lines of these parts, none of which is broken."""
    lines = [parts[0]]
    for part in parts[1:]:
        joined = f"{lines[-1]}   {part}"
        lines[-1:] = [joined] if len(joined) <= width else [lines[-1], part]
    return lines


def _figure(one: dict[str, Any]) -> str:
    """Value of a `LiveFigure`."""
    if one["of"] is not None:
        return _share(one["value"], one["of"])
    return format_bytes(int(one["value"])) if one["unit"] == "bytes" else f"{one['value']:,.0f}"


def _rows(rows: Iterable[tuple[str, Sequence[tuple[str, str]], str]]) -> Table:
    """Rows of a label, coloured parts of a bar, and a number."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH - 1)
    table.add_column()
    table.add_column(justify="right")
    for label, bar, number in rows:
        table.add_row(Text(label, "bright_black"), Text.assemble(*bar), number)
    return table


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
