"""A tiny model on disk, one thread, and a log directory of the tests' own."""

from surogate_testing.fixtures import hf_dir, model_copy, one_thread, own_log_directory  # noqa: F401
