"""The OpenAI face before it is built: every path of its API answers an error that names the route."""

from perdure.domain.errors import Refused


def refuse_unbuilt(method: str, path: str) -> Refused:
    """The answer to any route of this face."""
    return Refused(
        "not_built",
        "not_built",
        f"{method} {path} of the OpenAI API is not built in this version of Perdure; the same agents are served to the anthropic SDK. "
        "docs/compatibility.md lists what is built.",
    )
