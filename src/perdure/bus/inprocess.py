"""The live plane of a single process: previews to whoever watches; hints have nobody else to go to."""

from collections.abc import Callable

from perdure.ports.bus import Hint, Preview


class InProcessBus:
    """See `perdure.ports.bus.Bus`."""

    def __init__(self) -> None:
        self._previews: list[Callable[[Preview], None]] = []

    def publish(self, hint: Hint) -> None:
        """Nobody else is there to hear it."""

    def preview(self, preview: Preview) -> None:
        """Show a piece of text to this process's readers."""
        for receive in self._previews:
            receive(preview)

    def on_hint(self, receive: Callable[[Hint], None]) -> None:
        """No hint will come."""

    def on_preview(self, receive: Callable[[Preview], None]) -> None:
        """Call `receive` for every preview."""
        self._previews.append(receive)
