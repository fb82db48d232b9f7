"""Measurements of the running server against floors on the same machine. Never tests: nothing here passes or fails a build."""
