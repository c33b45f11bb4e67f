"""docs/operations.md tells every metric, and no other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from hurray_server.config import load_config
from hurray_server.metrics import NodeCollector
from hurray_server.node import Node
from hurray_wire.errors import all_reasons

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/operations.md").read_text()


async def families() -> dict[str, set[str]]:
    """Labels by the name that is asked for."""
    node = Node(load_config(None, {}), on_ready=lambda _: None)
    found = {}
    for family in NodeCollector(node, "1").collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    return found


def test_the_table_has_every_metric_with_its_labels() -> None:
    told: dict[str, set[str]] = {}
    table = TEXT.partition("## Four")[2].partition("## What")[0]
    for names, labels in re.findall(r"^\| (`hurray_[^|]*) \|([^|]*)\|", table, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            told[name] = {label.strip() for label in labels.split(",") if label.strip()}
    found = asyncio.run(families())
    assert told.keys() == found.keys()
    for name, labels in found.items():
        assert labels <= told[name], name


def test_every_cause_that_it_names_is_one() -> None:
    named = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", TEXT))
    assert named
    assert named <= set(all_reasons())
