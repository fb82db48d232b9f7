"""The page of a long run says what its file of times says, and does not call a late turn held."""

import json
from pathlib import Path

import pytest

from perdure.testing.long_run import main, page


@pytest.mark.parametrize(("worst_s", "verdict"), [(2.99, "held"), (3.0, "**missed**")])
def test_the_worst_turn_decides(worst_s: float, verdict: str) -> None:
    text = page({"worker": [0.1, worst_s], "after_call.tool": [0.2]}, commit="1a2b3c4", closing="== 3 passed ==\n")
    assert "| `1a2b3c4` | 3 passed |" in text
    assert text.index("| `after_call.tool` | 1 | 0.20 | 0.20 |") < text.index("| worker | 2 | ")
    assert text.endswith(f"Worst of all: {worst_s:.2f} s; promised: 3 s after `/readyz`: {verdict}.\n")


def test_a_lost_host_is_told_apart(tmp_path: Path) -> None:
    times, out = tmp_path / "times.json", tmp_path / "page.md"
    times.write_text(json.dumps({"lost host": [10.9], "worker": [0.5]}))
    main(["--times", str(times), "--commit", "c", "--closing", "1 passed", "--out", str(out)])
    text = out.read_text()
    assert "| lost host" not in text
    assert "Worst of all: 0.50 s" in text
    assert "went on after 10.9 s, when its lease had lapsed." in text
