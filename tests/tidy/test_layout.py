"""Files and functions stay small, carry names that say something, and live in a room that says what it is for."""

import ast
from pathlib import Path

from tests.tidy.sources import SRC, place, python_files, tree_of

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LONG_REASON_CHARS_MIN = 20

FORBIDDEN_STEMS = frozenset(
    {"util", "utils", "helper", "helpers", "common", "base", "misc", "manager", "managers", "type", "types"}
)
# Rooms laid out ahead of their furniture: empty markers without a docstring. Only ever remove a name here.
BARE_ROOMS = frozenset(
    {
        "bus",
        "cli",
        "engines",
        "environments",
        "harnesses",
        "http",
        "http/claude",
        "http/openai",
        "models",
        "postgres",
        "testing",
    }
)


def says_why_it_is_long(text: str) -> bool:
    """A module over the limit starts with a comment that gives the reason."""
    first = text.split("\n", 1)[0]
    return first.startswith("#") and len(first) >= LONG_REASON_CHARS_MIN


def room_fault(text: str, *, bare: bool) -> str | None:
    """What is wrong with a package marker, or None."""
    docstring = ast.get_docstring(ast.parse(text))
    if docstring is None:
        return None if bare and not text.strip() else "has no docstring"
    sentence = docstring.strip()
    return None if "." in sentence and len(sentence.split()) >= 4 else "has a docstring that is not a sentence"


def function_lines(tree: ast.Module) -> list[tuple[str, int, int]]:
    """Name, first line and length of every function, docstring included."""
    return [
        (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_modules_are_short_or_say_why_not() -> None:
    long: list[str] = []
    for path in python_files("src"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MODULE_LINES_MAX and not says_why_it_is_long(text):
            long.append(place(path))
    assert long == [], (
        f"over {MODULE_LINES_MAX} lines: split by what each part owns, or begin with a comment saying why"
    )


def test_functions_are_short() -> None:
    long = [
        f"{place(path, line)} {name} has {length} lines"
        for path in python_files("src")
        for name, line, length in function_lines(tree_of(path))
        if length > FUNCTION_LINES_MAX
    ]
    assert long == [], f"over {FUNCTION_LINES_MAX} lines: branch in the parent, compute in leaves"


def test_file_names_say_what_is_inside() -> None:
    bad = [place(path) for path in python_files("src", "tests", "bench") if path.stem in FORBIDDEN_STEMS]
    assert bad == [], "name the file after the thing that it owns"


def test_every_package_says_what_may_live_there() -> None:
    faults: list[str] = []
    for marker in sorted(SRC.rglob("__init__.py")):
        room = marker.parent.relative_to(SRC).as_posix()
        fault = room_fault(marker.read_text(encoding="utf-8"), bare=room in BARE_ROOMS)
        if fault:
            faults.append(f"{place(marker)} {fault}")
    assert faults == [], "say in one sentence or more what may live in the package"


def test_every_folder_with_modules_is_a_package() -> None:
    folders: set[Path] = {path.parent for path in python_files("src")} - {SRC.parent}
    assert [place(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_checks_see_a_planted_fault() -> None:
    long_function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
    assert function_lines(ast.parse(long_function)) == [("f", 1, FUNCTION_LINES_MAX + 1)]
    assert not says_why_it_is_long('"""A docstring."""\n')
    assert says_why_it_is_long("# One table of wire types, kept in one place so that it can be compared.\n")
    assert room_fault("", bare=False) == "has no docstring"
    assert room_fault("import os\n", bare=True) == "has no docstring"
    assert room_fault('"""Things."""\n', bare=True) == "has a docstring that is not a sentence"
    assert room_fault('"""Pure rules live here, and nothing else."""\n', bare=False) is None
