"""Does every metric that a dashboard, an alert or a page names exist, with the labels that it is asked for?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwater.observability.metrics import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "dashboards" / "headwater.json"
NAMED = {metric.name: metric for metric in METRICS}
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


def test_names_are_used_once_and_say_what_they_count() -> None:
    assert len(NAMED) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"headwater_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.meaning


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_of_the_dashboard_asks_for_what_there_is(expression: str) -> None:
    used = [NAMED[name] for name in re.findall(r"headwater_\w+", expression)]
    assert used
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        assert all(set(labels.split(", ")) <= set(metric.labels) for metric in used), expression
    for name, matched in re.findall(r"(headwater_\w+)\{(\w+)=", expression):
        assert matched in NAMED[name].labels
    for name in re.findall(r"rate\((headwater_\w+)", expression):
        assert NAMED[name].kind == "counter"
    for metric in used:
        if metric.kind == "counter":
            assert f"rate({metric.name}" in expression, f"{metric.name} only ever grows"
    assert expression.count("(") == expression.count(")")


def test_the_panels_of_the_dashboard_lie_side_by_side() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("page", ["docs/how-to/monitor.md", "docs/how-to/operate.md"])
def test_every_metric_that_a_page_names_exists(page: str) -> None:
    names = set(re.findall(r"\bheadwater_\w+", (ROOT / page).read_text()))
    roles = {"headwater_publisher", "headwater_consumer", "headwater_admin", "headwater_filter"}
    assert names - set(NAMED) - roles == set()
