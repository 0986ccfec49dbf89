"""docs/operations.md, the alerts and the dashboard name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.server.metrics.table import SAME, TABLE

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "operations.md"
RULES = REPOSITORY / "examples" / "serving" / "prometheus_rules.yaml"
DASHBOARD = REPOSITORY / "examples" / "serving" / "grafana.json"
ENDS = {"counter": ("_total",), "info": ("_info",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def test_the_table_is_that_of_the_code() -> None:
    for name, described in TABLE.items():
        end = ENDS[described.kind][0] if described.kind in ("counter", "info") else ""
        vllm = "same" if described.vllm == SAME else f"`{described.vllm}`" if described.vllm else ""
        assert f"\n| `{name}{end}` | {described.kind} | {vllm} | {described.help} |\n" in PAGE.read_text()


@pytest.mark.parametrize("path", [PAGE, RULES, DASHBOARD], ids=lambda path: path.name)
def test_every_name_is_one_that_is_scraped(path: Path) -> None:
    scraped = {f"{name}{end}" for name, described in TABLE.items() for end in ENDS[described.kind]}
    named = set(re.findall(r"penstock:(\w+)", path.read_text()))
    assert named
    assert named - scraped == set()


def test_the_page_says_what_to_do_about_every_alert() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule["alert"] for rule in group["rules"]]
    assert re.findall(r"^\| (Penstock\w+) \|", PAGE.read_text(), re.MULTILINE) == alerts
    assert all(rule["expr"] and rule["annotations"]["summary"] for rule in group["rules"])


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval"}
    assert used == variables
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
