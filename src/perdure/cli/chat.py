"""A conversation-like exchange with one session through the HTTP API: say something, see the turn, answer what it asks."""
