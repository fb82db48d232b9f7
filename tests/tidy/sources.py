"""What the tidy tests read: the files of the checkout and their syntax trees."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "perdure"
DOMAIN = SRC / "domain"
CORE = SRC / "core"
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"


def python_files(*folders: str) -> list[Path]:
    """Every Python file below these folders of the checkout; a folder that does not exist has none."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, line: int | None = None) -> str:
    """How a finding names its file: relative to the checkout, with the line if there is one."""
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


def dotted(node: ast.expr) -> str:
    """`pytest.mark.skip` for that attribute chain; an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def rule_marks(path: Path) -> Iterator[tuple[int, str]]:
    """Each id that a `pytest.mark.rule(...)` of this file names, with its line."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and dotted(node.func) in ("pytest.mark.rule", "mark.rule"):
            for argument in node.args:
                value = argument.value if isinstance(argument, ast.Constant) else None
                yield node.lineno, value if isinstance(value, str) else "(not a literal)"
