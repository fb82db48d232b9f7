"""Engines decide when a thread is looked at; they hold no policy."""
