"""Pictures of `penstock bench`."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.bench.plot import as_svg
from penstock.bench.statistics import summary
from penstock.bench.workloads import make_settings, make_sweep
from penstock.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = {
    name: summary([0.01, 0.02, 0.04])
    for name in (
        *("requests_per_s", "input_tokens_per_s", "output_tokens_per_s"),
        *("latency_s", "time_to_first_token_s", "time_per_output_token_s"),
    )
}


def panels(workload: str, results: Any, model: str = "demo") -> dict[str, ElementTree.Element]:
    """Panels by title."""
    svg = ElementTree.fromstring(as_svg(model, [make_settings(workload, 0)], [results]))
    return {str(one.findtext(f"{SVG}text")): one for one in svg.iter(f"{SVG}g") if one.get("class") == "panel"}


def lines(panel: ElementTree.Element) -> list[list[tuple[float, float]]]:
    drawn = [line.attrib["points"].split() for line in panel.findall(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points)] for points in drawn]


@pytest.mark.parametrize(
    ("workload", "rates"),
    [
        ("latency", ["output, tok/s"]),
        ("throughput", ["requests, 1/s", "input, tok/s", "output, tok/s"]),
        ("prefill", ["input, tok/s"]),
    ],
)
def test_every_figure_has_a_panel_with_its_values_in_ascending_order(workload: str, rates: list[str]) -> None:
    drawn = panels(workload, FIGURES)
    times = ["all requests, s", "time to first token, ms", "time per output token, ms"]
    assert list(drawn) == [*rates, *times]
    for panel in drawn.values():
        ((line),) = lines(panel)
        xs, ys = zip(*line, strict=True)
        assert list(xs) == sorted(xs)
        assert list(ys) == sorted(ys, reverse=True), "larger values are higher"


def test_new_and_known_prefixes_share_a_panel() -> None:
    drawn = panels("prefix", {"new_prefix": FIGURES, "known_prefix": FIGURES})
    assert [len(lines(panel)) for panel in drawn.values()] == [2] * 4
    words = [text.text or "" for text in next(iter(drawn.values())).findall(f"{SVG}text")]
    assert any(word.startswith("new ") for word in words)
    assert any(word.startswith("known ") for word in words)


def test_the_start_has_a_panel_per_phase() -> None:
    results = {"startup_s": summary([3.0]), "phases_s": {"imports": summary([1.0]), "model": summary([2.0])}}
    assert list(panels("startup", results)) == [
        "process start to first token, s",
        "of which imports, s",
        "of which model, s",
    ]


def test_long_contexts_have_a_line_per_batch_size() -> None:
    rows = [
        {
            "context": context,
            "batch_size": batch_size,
            "prefill_tokens_per_s": summary([100.0]),
            "output_tokens_per_s": summary([10.0 * batch_size]),
            "step_s": summary([0.001 * context]),
        }
        for context in (8, 16)
        for batch_size in (1, 4)
    ]
    drawn = panels("long-context", rows)
    assert list(drawn) == ["prefill, tok/s", "output, tok/s", "decode step, ms"]
    steps = lines(drawn["decode step, ms"])
    assert [len(line) for line in steps] == [2, 2]
    assert steps[0][0][1] > steps[0][1][1], "a longer context takes longer"


def test_several_runs_have_their_medians_by_the_setting_that_differs() -> None:
    sweep = make_sweep("throughput", 0, num_prompts="1,16,4", input_len="8")
    assert [one.num_prompts for one in sweep] == [1, 4, 16]
    results = [{**FIGURES, "output_tokens_per_s": summary([10.0 * (one.num_prompts or 0)])} for one in sweep]
    svg = ElementTree.fromstring(as_svg("demo", sweep, results))
    assert svg.findtext(f"{SVG}title") == "demo: throughput by num prompts"
    drawn = {str(one.findtext(f"{SVG}text")): one for one in svg.iter(f"{SVG}g") if one.get("class") == "panel"}
    ((first, second, third),) = lines(drawn["output, tok/s"])
    assert second[0] - first[0] == pytest.approx((third[0] - first[0]) / 5, abs=0.2)
    assert first[1] - second[1] == pytest.approx((first[1] - third[1]) / 5, abs=0.2)


def test_only_one_setting_may_have_several_values() -> None:
    with pytest.raises(ConfigError, match="--batch-size and --input-len have several values|--input-len and --batch"):
        make_sweep("latency", 0, batch_size="1,2", input_len="1,2")
    with pytest.raises(ConfigError, match="--batch-size 1,x is not valid. Allowed: a number, or several as 1,4,16"):
        make_sweep("latency", 0, batch_size="1,x")


def test_names_are_escaped() -> None:
    assert panels("latency", FIGURES, model="</svg><script>")
