"""The command starts cheaply: what `perdure --version` needs is not what a server needs."""

import ast
import subprocess
import sys

from tests.tidy.sources import SRC, tree_of

HEAVY = ("anthropic", "asyncpg", "starlette", "uvicorn", "xllamacpp")
DEADLINE_S = 60

PROBE = f"import sys, perdure.cli; print(' '.join(name for name in {HEAVY!r} if name in sys.modules))"


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def defines_main() -> bool:
    """Whether the command line has been laid: a function `main`, defined or imported."""
    for node in tree_of(SRC / "cli" / "__init__.py").body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == "main" for alias in node.names):
            return True
    return False


def test_importing_the_command_line_loads_no_server_and_no_model() -> None:
    done = run(sys.executable, "-c", PROBE)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_version_is_printed() -> None:
    if not defines_main():
        return
    done = run(sys.executable, "-c", "import sys; from perdure.cli import main; sys.exit(main())", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1][0].isdigit()
