"""Perdure: a self-hosted server for durable agent sessions."""
