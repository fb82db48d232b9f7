"""The words of the glossary, where a banned one cannot be meant well: names of classes, functions and tables."""

import ast
import re
from collections.abc import Iterator

from tests.tidy.sources import DOCS, SRC, place, python_files, tree_of

# A class is a noun that owns something; these say only that somebody needed a place.
BANNED_IN_CLASSES = re.compile(r"(?:Manager|Helper|Util|Utils)(?![a-z])")

# Banned as a whole word of a name ("job", "job_id", "open_job"), never as a part of one ("adjoin").
BANNED_WORDS = {
    "job": "input, turn or step",
    "jobs": "inputs, turns or steps",
    "conversation": "session",
    "conversations": "sessions",
    "epoch": "incarnation",
    "hitl": "required action",
    "subsession": "thread",
    "helper": "the thing that it does",
    "helpers": "the thing that it does",
    "util": "the thing that it does",
    "utils": "the thing that it does",
}
TABLE = re.compile(
    r"\b(?:create\s+table|alter\s+table)\s+(?:if\s+(?:not\s+)?exists\s+)?(?:only\s+)?([\w.\"]+)", re.IGNORECASE
)


def words_of(name: str) -> list[str]:
    """`openJobId`, `open_job_id` and `OpenJobId` all have the word `job`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def names_in(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line, name, and whether it is a class: all that the code names itself, not what it imports."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                yield node.lineno, node.name, True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name, False
            case ast.arg():
                yield node.lineno, node.arg, False
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id, False
            case _:
                pass


def faults_in(tree: ast.Module) -> list[tuple[int, str]]:
    faults: list[tuple[int, str]] = []
    for line, name, is_class in names_in(tree):
        if is_class and BANNED_IN_CLASSES.search(name):
            faults.append((line, f"class {name}: name it after what it owns"))
        faults += [(line, f"{name}: say {BANNED_WORDS[word]}") for word in words_of(name) if word in BANNED_WORDS]
    return faults


def table_faults(sql: str) -> list[str]:
    """Tables with a banned word or in the plural."""
    names = [match.group(1).replace('"', "").rpartition(".")[2] for match in TABLE.finditer(sql)]
    banned = [name for name in names if any(word in BANNED_WORDS for word in words_of(name))]
    return banned + [name for name in names if name.endswith("s") and not name.endswith(("ss", "us", "is", "as"))]


def test_code_uses_the_words_of_the_glossary() -> None:
    faults = [
        f"{place(path, line)} {fault}" for path in python_files("src") for line, fault in faults_in(tree_of(path))
    ]
    assert faults == [], "see docs/glossary.md"


def test_tables_use_the_words_of_the_glossary_in_the_singular() -> None:
    faults = [
        f"{place(path)} {name}"
        for path in sorted(SRC.rglob("*.sql"))
        for name in table_faults(path.read_text(encoding="utf-8"))
    ]
    assert faults == [], "see docs/glossary.md; tables are singular"


def test_banned_words_stand_in_the_glossary() -> None:
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8").lower()
    singular = {"job", "conversation", "epoch", "hitl"}
    assert [word for word in sorted(singular) if word not in glossary] == []


def test_the_checks_see_a_planted_fault() -> None:
    assert [line for line, _ in faults_in(ast.parse("class TurnManager: ...\nopen_job = 1\ndef f(epoch): ...\n"))] == [
        1,
        2,
        3,
    ]
    assert faults_in(ast.parse("class Utility: ...\nadjoin = 1\nclass Turn: ...\n")) == []
    assert table_faults("create table if not exists conversation (id uuid);") == ["conversation"]
    assert table_faults("CREATE TABLE public.turns (id uuid);") == ["turns"]
    assert table_faults("create table session (id uuid); create table agent_alias (id uuid);") == []
