"""The conformance kit: what every plugin of a kind must hold fast, for the plugin's own tests and for `plugins check`.

In a test, by the pytest plugin `surogate_core.testing.pytest_plugin` (``pytest -p``, or `pytest_plugins` in a
``conftest.py``), which gives a test with the argument `surogate_check` every check of one plugin::

    SUROGATE_PLUGIN = "optimizer-lion"

    def test_conformance(surogate_check):
        surogate_check.run()

Without pytest: ``for check in checks("optimizer-lion"): check.run()``.
"""

from surogate_core.testing.check import Check, NotApplicable
from surogate_core.testing.suites import checks

__all__ = ["Check", "NotApplicable", "checks"]
