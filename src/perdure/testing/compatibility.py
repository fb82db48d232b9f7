"""The compatibility page: which SDK methods are served, which contract rules are proved, and by which tests.

Three sources, none of them written by hand: the methods are read from the source of the installed `anthropic` SDK (it
is parsed, never imported), the rules from the tables in `docs/contracts/*.md`, and the proofs from the outcomes that a
test run wrote as JSON: `{rule id: [{"nodeid": ..., "outcome": "passed" | ...}]}`. A test claims a rule by
`@pytest.mark.rule("MA-G1")` and a method by `@pytest.mark.rule("SDK:sessions.create")`. The same inputs give the same
page, byte for byte.

    python -m perdure.testing.compatibility --rules FILE --out docs/compatibility.md [--check]
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

RULES_OUT_ENV: Final = "PERDURE_RULES_OUT"
SDK_MARK: Final = "SDK:"
CLIENT_SIDE: Final = "client side"

# What the Claude face serves today. Every other method answers 501 and names itself.
SERVED: Final = (
    "agents.create",
    "agents.retrieve",
    "agents.list",
    "agents.update",
    "agents.archive",
    "agents.versions.list",
    "environments.create",
    "environments.retrieve",
    "environments.list",
    "environments.update",
    "environments.archive",
    "environments.delete",
    "sessions.create",
    "sessions.retrieve",
    "sessions.list",
    "sessions.update",
    "sessions.archive",
    "sessions.delete",
    "sessions.events.list",
    "sessions.events.send",
    "sessions.events.stream",
    "sessions.events.tool_runner",
    "sessions.threads.list",
    "sessions.threads.retrieve",
    "sessions.threads.events.list",
    "sessions.threads.events.stream",
)

# The SDK sends this header on exactly the methods of managed agents; its version moves, so only the stem is matched.
_BETA_STEM: Final = "managed-agents-"
# Sent without that header, and yet part of what a managed agent uses.
_COMPANIONS: Final = ("files", "skills")
_HTTP_CALLS: Final = {
    "_get": "GET",
    "_get_api_list": "GET",
    "_post": "POST",
    "_put": "PUT",
    "_patch": "PATCH",
    "_delete": "DELETE",
}
_RULE_ROW: Final = re.compile(r"^\| (?P<id>[A-Z]{2}-[A-Z]?\d+(?:\.\d+)?) \| (?P<text>[^|]+) \| (?P<status>[^|]+) \|$")
_RULE_CLAIM: Final = re.compile(r"\b(?:MA|OA|SC|CG)-[A-Z]?\d+(?:\.\d+)?\b")


class SdkMethod(NamedTuple):
    """One public method below `client.beta`. `route` is None when it sends no request of its own."""

    name: str
    verb: str | None
    route: str | None


class Rule(NamedTuple):
    """One row of a contract page. `owner` is the module of an owned or core rule, `reason` that of an excused one."""

    id: str
    text: str
    kind: Literal["owned", "core", "face", "excused"]
    owner: str
    reason: str
    page: str


class Proof(msgspec.Struct, frozen=True):
    """What one test that carries a rule's mark came to."""

    nodeid: str
    outcome: str


Proofs: TypeAlias = Mapping[str, Sequence[Proof]]


class Malformed(Exception):
    """A source of the page cannot be read; the message says where and what is expected."""


# --- the SDK ---------------------------------------------------------------------------------------------------------


def read_sdk_methods() -> list[SdkMethod]:
    """Every public method of the resources that a managed agent uses, in order of name."""
    root = _sdk_root() / "resources" / "beta"
    methods: dict[str, SdkMethod] = {}
    for file in sorted(root.rglob("*.py")):
        resource = _resource_name(file.relative_to(root))
        if resource is None:
            continue
        source = file.read_text(encoding="utf-8")
        if _BETA_STEM in source or resource.split(".")[0] in _COMPANIONS:
            for method in _methods_of(ast.parse(source), resource):
                methods.setdefault(method.name, method)
    return [methods[name] for name in sorted(methods)]


def _sdk_root() -> Path:
    spec = importlib.util.find_spec("anthropic")
    if spec is None or not spec.submodule_search_locations:
        raise Malformed("the package 'anthropic' is not installed: run `make setup`")
    return Path(next(iter(spec.submodule_search_locations)))


def _resource_name(path: Path) -> str | None:
    """`sessions/threads/threads.py` is `sessions.threads`; package markers and the root resource are none."""
    parts = list(path.with_suffix("").parts)
    if parts[-1] in ("__init__", "beta"):
        return None
    if len(parts) > 1 and parts[-1] == parts[-2]:
        parts.pop()
    return ".".join(parts)


def _methods_of(module: ast.Module, resource: str) -> Iterable[SdkMethod]:
    """The methods of the synchronous class and those that only the asynchronous one has."""
    for node in module.body:
        if not isinstance(node, ast.ClassDef) or not _is_resource_class(node):
            continue
        for member in node.body:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public_method(member):
                verb, route = _request_of(member)
                yield SdkMethod(f"{resource}.{member.name}", verb, route)


def _is_resource_class(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ("SyncAPIResource", "AsyncAPIResource") for base in node.bases)


def _is_public_method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    properties = ("property", "cached_property")
    return not node.name.startswith("_") and not any(
        isinstance(decorator, ast.Name) and decorator.id in properties for decorator in node.decorator_list
    )


def _request_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str | None, str | None]:
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        verb = _HTTP_CALLS.get(call.func.attr)
        if verb is not None and call.args:
            return verb, _route_of(call.args[0])
    return None, None


def _route_of(node: ast.expr) -> str | None:
    """A literal path, or the template given to the SDK's `path_template`."""
    target = node.args[0] if isinstance(node, ast.Call) and node.args else node
    if isinstance(target, ast.Constant) and isinstance(target.value, str):
        return target.value.removesuffix("?beta=true")
    return None


# --- the rules -------------------------------------------------------------------------------------------------------


def read_rules(contracts: Path) -> list[Rule]:
    """The rules of every contract page, in page order. Raises `Malformed` for a bad status or a repeated id."""
    rules: list[Rule] = []
    seen: set[str] = set()
    for page in sorted(contracts.glob("*.md")):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            if not re.match(r"\| [A-Z]{2}-", line):
                continue
            rule = _rule_of(line, where=f"{page.name}:{number}", page=page.stem)
            if rule.id in seen:
                raise Malformed(
                    f"{page.name}:{number}: rule id {rule.id!r} is used twice; ids are unique and never reused"
                )
            seen.add(rule.id)
            rules.append(rule)
    return rules


def _rule_of(line: str, *, where: str, page: str) -> Rule:
    row = _RULE_ROW.match(line)
    if row is None:
        raise Malformed(f"{where}: a rule row is `| MA-A1.1 | text | status |`, got {line!r}")
    kind, _, detail = row["status"].strip().partition(": ")
    match kind:
        case "owned" if re.fullmatch(r"domain/[a-z_]+", detail):
            return Rule(row["id"], row["text"].strip(), "owned", detail, "", page)
        case "core" if re.fullmatch(r"core/[a-z_]+", detail):
            return Rule(row["id"], row["text"].strip(), "core", detail, "", page)
        case "face" if not detail:
            return Rule(row["id"], row["text"].strip(), "face", "", "", page)
        case "excused" if detail:
            return Rule(row["id"], row["text"].strip(), "excused", "", detail, page)
        case _:
            raise Malformed(
                f"{where}: status {row['status']!r} is none of `owned: domain/module`, `core: core/module`, `face`, "
                "`excused: reason`"
            )


def read_claims(*folders: Path) -> dict[str, list[str]]:
    """Rule id -> the docstrings below these folders that name it, as `folder/module:object`, once for each time they do."""
    claims: dict[str, list[str]] = {}
    for root, file in ((folder, file) for folder in folders for file in sorted(folder.rglob("*.py"))):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = "" if isinstance(node, ast.Module) else node.name
            where = f"{file.relative_to(root.parent).with_suffix('').as_posix()}:{name}"
            for rule_id in sorted(_RULE_CLAIM.findall(ast.get_docstring(node) or "")):
                claims.setdefault(rule_id, []).append(where)
    return claims


# --- the page --------------------------------------------------------------------------------------------------------


class Page(NamedTuple):
    """Everything the page is made of."""

    sdk_version: str
    methods: Sequence[SdkMethod]
    served: frozenset[str]
    rules: Sequence[Rule]
    claims: Mapping[str, Sequence[str]]
    proofs: Proofs


def render(page: Page) -> str:
    """The whole Markdown text, ending with one newline."""
    unknown = page.served - {method.name for method in page.methods}
    if unknown:
        raise Malformed(f"served methods that the SDK does not have: {', '.join(sorted(unknown))}")
    method_cells = [(method, _method_state(method, page)) for method in page.methods]
    rule_cells = [(rule, _rule_state(rule, page.proofs)) for rule in page.rules]
    lines = [
        "# Compatibility",
        "",
        "Generated by `python -m perdure.testing.compatibility` from the installed SDK, the contract pages and the",
        "outcomes of a test run. Do not edit.",
        "",
        f"Client: `anthropic` {page.sdk_version}. Methods are those below `client.beta` that send the managed-agents",
        "beta header, and the files and skills that an agent uses.",
        "",
        "| | proved | failing | open | not built / excused | all |",
        "|---|---|---|---|---|---|",
        _count_row("SDK methods", [state for _, (state, _) in method_cells]),
        _count_row("Contract rules", [state for _, (state, _) in rule_cells]),
        "",
        "*proved*: served, and every test that claims it passed. *failing*: a test that claims it did not pass.",
        "*open*: served or ruled, and no test claims it yet. *not built*: answers an error that names the method.",
        "",
        "## SDK methods",
        "",
        "| Method | Request | State | Proved by |",
        "|---|---|---|---|",
        *(
            f"| `{method.name}` | {_request_cell(method)} | {state} | {proof} |"
            for method, (state, proof) in method_cells
        ),
    ]
    for name in dict.fromkeys(rule.page for rule in page.rules):
        lines += ["", f"## Rules: [{name}](contracts/{name}.md)", "", "| Rule | State | Proved by | Kept by |"]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| {rule.id} | {state} | {proof} | {_claim_cell(page.claims.get(rule.id, ()))} |"
            for rule, (state, proof) in rule_cells
            if rule.page == name
        ]
    return "\n".join(lines) + "\n"


def _method_state(method: SdkMethod, page: Page) -> tuple[str, str]:
    if method.name not in page.served:
        return "not built", ""
    return _proof_state(page.proofs.get(SDK_MARK + method.name, ()))


def _rule_state(rule: Rule, proofs: Proofs) -> tuple[str, str]:
    if rule.kind == "excused":
        return f"excused: {rule.reason}", ""
    return _proof_state(proofs.get(rule.id, ()))


def _proof_state(proofs: Sequence[Proof]) -> tuple[str, str]:
    if not proofs:
        return "open", ""
    bad = [proof for proof in proofs if proof.outcome != "passed"]
    return ("failing" if bad else "proved"), _test_names(bad or proofs)


def _test_names(proofs: Iterable[Proof]) -> str:
    """Each test once: parameters and the leading folder are left out, so that the page does not move with them."""
    names = {proof.nodeid.partition("[")[0].removeprefix("tests/") for proof in proofs}
    return "<br>".join(f"`{name}`" for name in sorted(names))


def _request_cell(method: SdkMethod) -> str:
    if method.verb is None:
        return CLIENT_SIDE
    return f"`{method.verb} {method.route or '(computed)'}`"


def _claim_cell(claims: Sequence[str]) -> str:
    return "<br>".join(f"`{claim.removesuffix(':')}`" for claim in claims)


def _count_row(title: str, states: Sequence[str]) -> str:
    proved, failing, still_open = (states.count(state) for state in ("proved", "failing", "open"))
    rest = len(states) - proved - failing - still_open
    return f"| {title} | {proved} | {failing} | {still_open} | {rest} | {len(states)} |"


# --- the command -----------------------------------------------------------------------------------------------------


def read_proofs(path: Path | None) -> Proofs:
    """The outcomes of a test run; no path means that nothing has been proved."""
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[Proof]])
    except FileNotFoundError:
        raise Malformed(
            f"{str(path)!r} does not exist: run the tests with {RULES_OUT_ENV} set to that path first"
        ) from None
    except msgspec.DecodeError as error:
        raise Malformed(f"{str(path)!r} is not a rules file: {error}") from error


def build_page(root: Path, *, proofs: Proofs, served: Iterable[str] = SERVED) -> str:
    """The page for the checkout at `root`."""
    return render(
        Page(
            sdk_version=importlib.metadata.version("anthropic"),
            methods=read_sdk_methods(),
            served=frozenset(served),
            rules=read_rules(root / "docs" / "contracts"),
            claims=read_claims(*(root / "src" / "perdure" / folder for folder in ("domain", "core"))),
            proofs=proofs,
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or with `--check` say whether the one on disk is current. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perdure.testing.compatibility", description="The compatibility page"
    )
    _ = parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: here)")
    _ = parser.add_argument("--rules", type=Path, help=f"outcomes of a test run (default: ${RULES_OUT_ENV})")
    _ = parser.add_argument("--served", type=Path, help="JSON list of served methods (default: the built-in list)")
    _ = parser.add_argument("--out", type=Path, help="the page (default: docs/compatibility.md of the checkout)")
    _ = parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    options = parser.parse_args(argv, namespace=_Options())
    from_env = os.environ.get(RULES_OUT_ENV)
    rules = options.rules or (Path(from_env) if from_env else None)
    out = options.out or options.root / "docs" / "compatibility.md"
    try:
        served = msgspec.json.decode(options.served.read_bytes(), type=list[str]) if options.served else SERVED
        text = build_page(options.root, proofs=read_proofs(rules), served=served)
    except (Malformed, OSError, msgspec.DecodeError) as error:
        _ = sys.stderr.write(f"compatibility: {error}\n")
        return 2
    if not options.check:
        _ = out.write_text(text, encoding="utf-8")
        return 0
    if out.exists() and out.read_text(encoding="utf-8") == text:
        return 0
    _ = sys.stderr.write(f"compatibility: {str(out)!r} is stale; run this command again without --check\n")
    return 1


class _Options(argparse.Namespace):
    root: Path = Path()
    rules: Path | None = None
    served: Path | None = None
    out: Path | None = None
    check: bool = False


if __name__ == "__main__":
    sys.exit(main())
