"""The conformance kit: checks that every plugin of a kind must pass, for its own tests and for `plugins check`.

In a test, by the pytest plugin `surogate_testing.pytest_plugin` (``pytest -p``, or `pytest_plugins` in a
``conftest.py``), which gives a test with the argument `surogate_check` every check of one plugin::

    SUROGATE_PLUGIN = "optimizer-lion"

    def test_conformance(surogate_check):
        surogate_check.run()

Without pytest: ``for check in checks("optimizer-lion"): check.run()``.

The kit also has helpers for the tests of plugins:

- `tiny`: models and micro-batches of a few dozen numbers, in an engine
- `parity`, `family_suite`: a model family against transformers' class of it, and the tests of a family's presets,
  refusals and parity
- `op_cases`, `attention_suite`: the ops by their definitions, and the tests of a pack's attention on a GPU
- `host_cuda`, `fake_gpu`: CUDA C++ compiled for the host, and a GPU as far as questions about it go
- `interpreter`: tests of Triton's kernels on a CPU, in Triton's interpreter
- `chat_templates`: a tokenizer of single bytes, and the chat templates that users bring
- `run_events`: the events of a short run, and of a run with given losses
"""

from surogate_testing.check import Check, NotApplicable
from surogate_testing.suites import checks

__all__ = ["Check", "NotApplicable", "checks"]
