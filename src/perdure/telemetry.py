"""Logs and metrics. No payloads, no session ids as labels; ids may stand in log fields."""

import contextlib
import logging
import sys
import traceback
from typing import Any, Final, TextIO, cast

from prometheus_client import CollectorRegistry, Counter, Histogram

REGISTRY: Final = CollectorRegistry()
"""What the parts below the HTTP layer count; one for the process, however many servers a test starts in it."""

invariant_violations: Final = Counter(
    "perdure_invariant_violations", "Bugs of ours that a supervised loop survived.", registry=REGISTRY
)
commits: Final = Counter("perdure_commits", "Sessions written, over all batches.", registry=REGISTRY)
step_seconds: Final = Histogram("perdure_step_seconds", "Duration of the calls of steps.", ["kind"], registry=REGISTRY)


FRAMES_MAX: Final = 8


def blame(error: BaseException) -> dict[str, Any]:
    """Log fields for a bug of ours: its kind and where it is, not its message, which may quote what people sent."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_MAX:]
    return {
        "error": type(error).__name__,
        "at": [f"{frame.filename.rpartition('/perdure/')[2]}:{frame.lineno} {frame.name}" for frame in frames],
    }


class LossyFile:
    """A file for lines that nobody must fail for: on a full disk or after its reader has gone, a line is lost."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Write if it can be."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        """Flush if it can be."""
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()


def logger(name: str) -> Any:
    """A structured logger; fields are keyword arguments."""
    import structlog

    return structlog.get_logger(name)


def configure(*, json: bool, level: int = logging.INFO) -> None:
    """Send logs to standard error, losing what can't be written: JSON lines for machines, coloured text for a terminal."""
    import structlog

    renderer: Any = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, LossyFile(sys.stderr))),
    )
