"""Protocols: what the core needs from the outside, and nothing about how it is done."""
