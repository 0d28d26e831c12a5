"""A tokenizer with chat templates."""

from surogate_testing.fixtures import templated  # noqa: F401
