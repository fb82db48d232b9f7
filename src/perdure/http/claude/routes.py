"""All routes of this face, and the methods of the SDK that they serve."""

from typing import Final

from perdure.http.claude import agents, environments, routes_sessions
from perdure.http.requests import AnyRoute

ROUTES: Final[tuple[AnyRoute, ...]] = (
    *agents.ROUTES,
    *environments.ROUTES,
    *routes_sessions.ROUTES,
)

CLIENT_SIDE: Final = ("sessions.events.tool_runner",)
"""Methods of the SDK that only call others, all of them served."""

SERVED_METHODS: Final[tuple[str, ...]] = (*sorted(route.sdk_method for route in ROUTES), *CLIENT_SIDE)
