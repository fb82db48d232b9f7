"""Rules, claims and proofs agree; tests are honest; nothing unfinished or local to a machine is in the tree."""

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tests.tidy.sources import CORE, DOCS, DOMAIN, ROOT, dotted, place, python_files, rule_marks, tree_of

from perdure.testing.compatibility import SDK_MARK, SERVED, Rule, read_claims, read_rules, read_sdk_methods

CONTRACTS = DOCS / "contracts"

DISHONEST = frozenset(
    {
        "pytest.skip",
        "pytest.xfail",
        "pytest.importorskip",
        "pytest.mark.skip",
        "pytest.mark.skipif",
        "pytest.mark.xfail",
        "mark.skip",
        "mark.skipif",
        "mark.xfail",
        "unittest.skip",
        "time.sleep",
        "anyio.sleep",
        "mock.Mock",
        "mock.MagicMock",
        "mock.AsyncMock",
        "mock.patch",
    }
)
DISHONEST_IMPORTS: dict[str, set[str] | None] = {
    "time": {"sleep"},
    "asyncio": {"sleep"},
    "anyio": {"sleep"},
    "unittest": {"mock"},
    "unittest.mock": None,
}
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")
# `/work/` is also a part of a route: there it follows a placeholder or a word.
MACHINE_PATH = re.compile(r"(?<![\w}>.])/(?:work|root)/")
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|registry\.npmjs\.org|registry\.yarnpkg\.com|proxy\.golang\.org|crates\.io"
    r"|artifactory[\w.-]*\.\w+|nexus[\w-]*\.\w+\.\w+)\b"
)


def test_rule_pages_are_well_formed() -> None:
    rules = read_rules(CONTRACTS)
    assert len(rules) > 100
    assert all(rule.id.startswith("MA-") for rule in rules if rule.page == "managed-agents")


def test_marks_name_rules_and_methods_that_exist() -> None:
    known = {rule.id for rule in read_rules(CONTRACTS)} | {SDK_MARK + method.name for method in read_sdk_methods()}
    faults = [
        f"{place(path, line)} {rule_id}"
        for path in python_files("tests")
        for line, rule_id in rule_marks(path)
        if rule_id not in known
    ]
    assert faults == [], "a mark names a rule of docs/contracts, or SDK: and a method of the SDK, as a literal"


def test_marks_claim_nothing_that_is_excused_or_not_served() -> None:
    excused = {rule.id for rule in read_rules(CONTRACTS) if rule.kind == "excused"}
    unserved = {SDK_MARK + method.name for method in read_sdk_methods() if method.name not in SERVED}
    faults = [
        f"{place(path, line)} {rule_id}"
        for path in python_files("tests")
        for line, rule_id in rule_marks(path)
        if rule_id in excused | unserved
    ]
    assert faults == [], (
        "what is proved is not excused: change the page, or the list of served methods, in the same change"
    )


def test_served_methods_are_methods_of_the_sdk() -> None:
    assert set(SERVED) - {method.name for method in read_sdk_methods()} == set()
    assert len(SERVED) == len(set(SERVED))


def ownership_faults(rules: Sequence[Rule], claims: Mapping[str, Sequence[str]]) -> list[str]:
    """Where the pages and the docstrings do not say the same. `claims` are those of `domain` and `core` together."""
    owners = {rule.id: rule.owner for rule in rules if rule.kind in ("owned", "core")}
    faults = [
        f"{rule_id} belongs to {owner}, and no docstring of domain or core names it"
        for rule_id, owner in owners.items()
        if rule_id not in claims
    ]
    for rule_id, places in claims.items():
        if rule_id not in owners:
            faults.append(f"{places[0]} claims {rule_id}, which the pages give to no module")
        elif len(places) > 1:
            faults.append(f"{rule_id} is claimed by {', '.join(places)}")
        elif places[0].partition(":")[0] != owners[rule_id]:
            faults.append(f"{rule_id} belongs to {owners[rule_id]} and is claimed by {places[0]}")
        elif places[0].endswith(":"):
            faults.append(f"{rule_id} is claimed by the whole of {owners[rule_id]}; name the function that keeps it")
    return faults


def test_each_owned_and_each_core_rule_is_claimed_where_the_page_says() -> None:
    faults = ownership_faults(read_rules(CONTRACTS), read_claims(DOMAIN, CORE))
    assert faults == [], "one rule, one owner: name its id once, in the docstring of the function that keeps it"


def test_wrong_claims_are_seen() -> None:
    def rule(rule_id: str, kind: Literal["owned", "core", "face"], owner: str) -> Rule:
        return Rule(rule_id, "", kind, owner, "", "p")

    rules = [
        rule("MA-A1.1", "owned", "domain/turn"),
        rule("MA-A1.2", "core", "core/settle"),
        rule("MA-A1.3", "owned", "domain/turn"),
        rule("MA-A1.4", "core", "core/settle"),
        rule("MA-A1.5", "face", ""),
        rule("MA-A1.6", "owned", "domain/turn"),
        rule("MA-A1.7", "core", "core/settle"),
    ]
    claims = {
        "MA-A1.1": ["domain/turn:holds"],
        "MA-A1.2": ["core/settle:end_turn"],
        "MA-A1.4": ["core/settle:end_turn", "core/settle:end_turn"],
        "MA-A1.5": ["core/settle:fail_turn"],
        "MA-A1.6": ["core/settle:end_turn"],
        "MA-A1.7": ["core/settle:"],
    }
    assert [fault.split(" claims ")[-1].split()[0].strip(",") for fault in ownership_faults(rules, claims)] == [
        "MA-A1.3",
        "MA-A1.4",
        "MA-A1.5",
        "MA-A1.6",
        "MA-A1.7",
    ]


def dishonest_lines(tree: ast.Module) -> list[tuple[int, str]]:
    """Uses of what lets a test pass without having proved anything, or makes it wait for a time instead of a fact."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="skipTest"):
                found.append((node.lineno, "skipTest"))
            case ast.Attribute() if dotted(node) in DISHONEST:
                found.append((node.lineno, dotted(node)))
            case ast.Call(func=ast.Attribute() as func) if dotted(func) == "asyncio.sleep" and not is_zero(node):
                found.append((node.lineno, "asyncio.sleep"))
            case ast.ImportFrom(module=str(module)) if module in DISHONEST_IMPORTS:
                banned = DISHONEST_IMPORTS[module]
                names = [alias.name for alias in node.names if banned is None or alias.name in banned]
                found += [(node.lineno, f"{module}.{name}") for name in names]
            case _:
                pass
    return found


def is_zero(call: ast.Call) -> bool:
    """`asyncio.sleep(0)` lets others run and waits for no time."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def test_tests_neither_skip_nor_sleep_nor_mock() -> None:
    faults = [
        f"{place(path, line)} {name}" for path in python_files("tests") for line, name in dishonest_lines(tree_of(path))
    ]
    assert faults == [], (
        "wait on a signal with a deadline, use the fakes of perdure.testing, and prove it or leave it out"
    )


def lines_matching(paths: list[Path], pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{place(path, number)} {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def text_files(folder: Path) -> list[Path]:
    kinds = {".py", ".md", ".sql", ".toml", ".json", ".txt", ".html", ".js", ".css", ".yaml", ".yml"}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in kinds)


def test_nothing_in_src_is_left_unfinished() -> None:
    assert lines_matching(text_files(ROOT / "src"), UNFINISHED) == [], "finish it, or refuse it with a clear error"


def test_docs_and_src_name_no_machine() -> None:
    paths = [*text_files(ROOT / "src"), *text_files(DOCS), *sorted(ROOT.glob("*.md"))]
    assert lines_matching(paths, MACHINE_PATH) == []
    assert lines_matching(paths, REGISTRY_HOST) == []


def test_the_checks_see_a_planted_fault() -> None:
    planted = (
        "import asyncio, pytest, time\nfrom unittest.mock import MagicMock\n"
        "@pytest.mark.skip\ndef test_a(): time.sleep(1)\nasync def test_b(): await asyncio.sleep(0.1)\n"
        "async def test_c(): await asyncio.sleep(0)\n"
    )
    assert [line for line, _ in sorted(dishonest_lines(ast.parse(planted)))] == [2, 3, 4, 5]
    assert MACHINE_PATH.search("see /" + "work/main")
    assert MACHINE_PATH.search("`/" + "root/.cache`")
    assert not MACHINE_PATH.search("GET /v1/environments/{environment_id}/work/poll")
    assert REGISTRY_HOST.search("https://files.python" + "hosted.org/x")
    assert UNFINISHED.search("# " + "TO" + "DO: later")
