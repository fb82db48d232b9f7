"""A server in a thread: it ends whenever it is told to, also before it has begun."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from perdure.cli import background
from perdure.cli.background import BackgroundServer
from perdure.cli.starting import hang_up_signals
from perdure.settings import Settings


class Late(BackgroundServer):
    """Its thread comes to its loop only when it was told to end."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.go = threading.Event()
        self.ended = threading.Event()

    def _run(self) -> None:
        self.go.wait(10)
        super()._run()
        self.ended.set()


def test_ctrl_c_before_the_loop_runs_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process would wait for its server for ever, and nobody could tell it to stop."""
    server, real, calls = Late(Settings(data=tmp_path / "data")), background.wait, list[str]()

    def wait(*arguments: Any, **more: Any) -> Any:
        calls.append("wait")
        if len(calls) == 1:
            raise KeyboardInterrupt
        server.go.set()
        return real(*arguments, **more)

    monkeypatch.setattr(background, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    server.stop()
    assert server.ended.wait(10)
    assert not (tmp_path / "data").exists(), "it began nothing"


def test_a_closed_terminal_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert hang_up_signals() == (signal.SIGHUP,)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert hang_up_signals() == ()
    finally:
        signal.signal(signal.SIGHUP, before)
