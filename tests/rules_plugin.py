"""Writes which test proved which rule: a JSON file `{rule or case id: [{"nodeid", "outcome"}]}`.

Its path is in the environment as `PERDURE_RULES_OUT`; without it nothing is written. The ids come from the marks `rule`
and `case`. They travel in `user_properties`, which the reports of distributed workers carry home, so the session that
started the workers writes all.
"""

import json
import os
from pathlib import Path

import pytest

RULES_OUT_ENV = "PERDURE_RULES_OUT"
_PROPERTY = "perdure_rules"
# From best to worst: a test that passed and broke its teardown did not pass.
_OUTCOMES = ("passed", "skipped", "failed", "error")


class RuleOutcomes:
    """The outcomes of one session, gathered report by report."""

    def __init__(self) -> None:
        self._outcomes: dict[str, dict[str, str]] = {}

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase of one test; the worst phase decides."""
        outcome = str(report.outcome)
        if report.when != "call":
            outcome = {"failed": "error", "passed": "passed"}.get(outcome, outcome)
        for name, value in report.user_properties:
            if name != _PROPERTY:
                continue
            nodeid, *ids = json.loads(str(value))
            for rule_id in ids:
                tests = self._outcomes.setdefault(rule_id, {})
                tests[nodeid] = max(tests.get(nodeid, outcome), outcome, key=_OUTCOMES.index)

    def write(self, path: Path) -> None:
        """Write them in a stable order."""
        content = {
            rule_id: [{"nodeid": nodeid, "outcome": outcome} for nodeid, outcome in sorted(tests.items())]
            for rule_id, tests in sorted(self._outcomes.items())
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First of all, because distribution by group adds a suffix to the node ids."""
    for item in items:
        ids = sorted(
            {str(argument) for kind in ("rule", "case") for mark in item.iter_markers(kind) for argument in mark.args}
        )
        if ids:
            item.user_properties.append((_PROPERTY, json.dumps([item.nodeid, *ids])))


class _Recorder:
    """Registered only where the whole session is seen."""

    def __init__(self, outcomes: RuleOutcomes, path: Path) -> None:
        self._outcomes = outcomes
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.add(report)

    def pytest_sessionfinish(self) -> None:
        self._outcomes.write(self._path)


def pytest_configure(config: pytest.Config) -> None:
    """Record, unless this is a worker, whose reports arrive in the session that started it."""
    target = os.environ.get(RULES_OUT_ENV)
    if target and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(RuleOutcomes(), Path(target)), "perdure-rule-recorder")
