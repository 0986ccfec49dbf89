"""Picture of a server benchmark."""

from __future__ import annotations

import itertools
import random
from xml.etree import ElementTree

import pytest

from penstock.bench.picture import axis_end
from penstock.bench.serving.outcome import Outcome, Status
from penstock.bench.serving.plot import as_svg

SVG = "{http://www.w3.org/2000/svg}"


def outcome(prompt_len: int, first_token: float, status: Status = Status.COMPLETED) -> Outcome:
    return Outcome(
        start=1.0,
        prompt_len=prompt_len,
        output_len=11,
        end=1.0 + first_token + 0.5,
        first_token=1.0 + first_token,
        chunk_times=[1.0 + first_token, 1.5 + first_token],
        status=status,
    )


def panels(svg: str) -> dict[str, ElementTree.Element]:
    """Panels by title."""
    found = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}g") if one.get("class") == "panel"]
    return {str(one.findtext(f"{SVG}text")): one for one in found}


def places(panel: ElementTree.Element) -> list[tuple[float, float]]:
    points = panel.findall(f"{SVG}polyline")[0].attrib["points"].split()
    return [(float(x), float(y)) for x, y in (point.split(",") for point in points)]


def test_each_metric_has_a_curve_of_its_sorted_values() -> None:
    outcomes = [outcome(8, seconds) for seconds in (0.4, 0.1, 0.2, 0.3)]
    found = panels(as_svg("a", "b", [*outcomes, outcome(8, 9.0, Status.FAILED)], ["ttft", "tpot"]))
    assert list(found) == [
        "Time to first token, ms",
        "Time per output token, ms",
        "End-to-end latency by requests at once, ms",
        "Time to first token by length of the prompt, ms",
    ]
    curve = places(found["Time to first token, ms"])
    assert len(curve) == 4
    # 100 ms more is as much higher each time, and 500 ms is the end of the axis.
    steps = [before[1] - after[1] for before, after in itertools.pairwise(curve)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.11)
    assert steps[0] > 20
    texts = [one.text for one in found["Time to first token, ms"].iter(f"{SVG}text")]
    assert "500" in texts
    assert "p50 300 ms" in texts


def test_latencies_are_drawn_by_the_requests_under_way() -> None:
    # The second request begins during the first one and a failed one, and the third one when all have ended.
    starts = [1.0, 1.2, 3.0]
    outcomes = [Outcome(start=at, end=at + 0.5, prompt_len=8, status=Status.COMPLETED) for at in starts]
    failed = Outcome(start=1.1, end=1.3, prompt_len=8, status=Status.FAILED)
    panel = panels(as_svg("a", "b", [*outcomes, failed], []))["End-to-end latency by requests at once, ms"]
    dots = [float(dot.attrib["cx"]) for dot in panel.findall(f"{SVG}circle")]
    left, right = 56, 708
    assert [5 * (x - left) / (right - left) for x in dots] == pytest.approx([1, 3, 1], abs=0.01)


def test_first_tokens_are_drawn_by_length_of_the_prompt() -> None:
    outcomes = [outcome(10, 0.01), outcome(100, 0.1), outcome(50, 0.05)]
    panel = panels(as_svg("a", "b", outcomes, []))["Time to first token by length of the prompt, ms"]
    dots = sorted((float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in panel.findall(f"{SVG}circle"))
    assert len(dots) == 3
    assert dots[0][1] > dots[1][1] > dots[2][1]


def test_a_picture_of_many_requests_stays_small_and_names_are_escaped() -> None:
    rng = random.Random(0)
    svg = as_svg("<model> & co", "b", [outcome(rng.randint(1, 99), rng.random()) for _ in range(50_000)], ["ttft"])
    assert len(svg) < 400_000
    assert ElementTree.fromstring(svg).findtext(f"{SVG}title") == "<model> & co"


def test_a_run_without_completed_requests_has_no_panel() -> None:
    assert panels(as_svg("a", "b", [outcome(1, 1.0, Status.FAILED)], ["ttft", "itl"])) == {}


@pytest.mark.parametrize(
    ("value", "end"), [(0.0, 1.0), (0.3, 0.5), (1.0, 1.0), (7.0, 10.0), (20.0, 20.0), (201.0, 500.0)]
)
def test_an_axis_ends_at_a_round_number(value: float, end: float) -> None:
    assert axis_end(value) == pytest.approx(end)
