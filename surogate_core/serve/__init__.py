"""A server of the OpenAI API: requests and answers, a queue before the engine, and HTTP."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only programs of this machine reach."""
