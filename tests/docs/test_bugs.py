"""docs/bugs.md claims no test, and no planted mistake, that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/bugs.md").read_text().splitlines() if line.startswith("| ")]


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_it_names_is_there() -> None:
    named = re.findall(r"`(tests/[a-z_/]+\.py)(?:::(\w+))?", "\n".join(ROWS))
    assert len(named) > 15
    for path, name in named:
        assert not name or name in functions_of(ROOT / path), f"{path} has no {name}"
        assert (ROOT / path).is_file()


def test_every_planted_mistake_that_it_names_is_there() -> None:
    planted = functions_of(ROOT / "tests/simulation/planted.py")
    named = [name for row in ROWS for name in re.findall(r"`([a-z_]{20,})`", row.rsplit("|", 2)[-2])]
    assert named
    assert set(named) <= planted
