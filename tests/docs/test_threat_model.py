"""THREAT_MODEL.md claims nothing without a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "THREAT_MODEL.md").read_text()


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_it_names_is_there() -> None:
    named = re.findall(r"`(tests/[a-z_/]+\.py)`|`(test_[a-z0-9_]+)`", TEXT)
    assert len(named) > 50
    module, known = None, set[str]()
    for path, name in named:
        if path:
            module, known = path, functions_of(ROOT / path)
        else:
            assert name in known, f"{module} has no {name}"


def test_every_part_says_what_shows_it() -> None:
    parts = {part.splitlines()[0]: part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}
    for title, part in parts.items():
        assert "Shown by" in part or title in {"What is worth protecting", "Who is there"}, title
