"""A node's metrics, as Prometheus reads them."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by name and labels."""


def read_page(address: str, path: str) -> tuple[int, str]:
    """Status and body of a page."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(address: str, *types: str) -> Series:
    """All series of these types."""
    status, text = read_page(address, "/metrics")
    assert status == 200, text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in types
        for sample in family.samples
    }


def series(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """The key of one."""
    return name, frozenset(labels.items())


def moved(before: Series, after: Series) -> Series:
    """What of the one is another in the other, and by how much."""
    assert before.keys() <= after.keys(), before.keys() - after.keys()
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
