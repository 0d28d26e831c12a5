"""Fixtures for all tests: fake plugin distributions, and a log directory of the tests' own."""

from __future__ import annotations

import importlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from run_fixtures import (  # noqa: F401
    base,
    base_on,
    data_cache,
    digests,
    grpo_keys,
    history,
    installed,
    records,
    run_here,
)

from surogate_core import API_VERSION
from surogate_testing.fixtures import hf_dir, model_copy, nothing_kept, one_thread  # noqa: F401

InstallPlugin = Callable[..., Path]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell without job control starts commands that end in `&`. Tests send the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = itertools.count()


@pytest.fixture(scope="session")
def _logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(autouse=True)
def _own_log_directory(_logs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A log directory for each test, which the first record makes: most tests write none."""
    monkeypatch.setenv("SUROGATE_LOG_DIR", str(_logs / str(next(_numbers))))
    yield
    if "surogate_core.logs" in sys.modules:
        sys.modules["surogate_core.logs"].close_log()


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallPlugin]:
    """Installs a fake distribution: ``install_plugin(name, source, conf={"recipe/x.yaml": …})``.

    A source that states no hook API gets the present one at its end, unless `states_api` is false.

    The entry point is named `name`, the distribution ``dist-<name>``, the module ``plugin_<name>``;
    the return value is the directory that was put on `sys.path`.
    """
    from surogate_core.plugins.static import static_view

    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    before = set(sys.modules)

    def install(
        name: str,
        source: str,
        *,
        conf: Mapping[str, str] | None = None,
        distribution: str = "",
        version: str = "1.2.3",
        module: str = "",
        requires: tuple[str, ...] = (),
        states_api: bool = True,
    ) -> Path:
        if states_api and "SUROGATE_API" not in source:
            source += f'\nSUROGATE_API = ">={API_VERSION},<{API_VERSION + 1}"\n'
        distribution = distribution or f"dist-{name}"
        module = module or f"plugin_{name.replace('-', '_')}"
        package = site / module
        package.mkdir()
        (package / "__init__.py").write_text(source, encoding="utf-8")
        for path, text in (conf or {}).items():
            file = package / "conf" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            for directory in (file.parent, package / "conf"):
                (directory / "__init__.py").touch()
            file.write_text(text, encoding="utf-8")
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {r}" for r in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[surogate]\n{name} = {module}\n", encoding="utf-8")
        static_view.cache_clear()
        # A directory that was looked at earlier in the same tick of its clock would be taken for unchanged.
        importlib.invalidate_caches()
        return site

    yield install
    static_view.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith("plugin_"):
            del sys.modules[module]
