"""Where the core's configuration files are found."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from surogate_core import conf_paths


def copied(package: Path) -> ModuleType:
    """The module as a file of another package directory."""
    package.mkdir(parents=True)
    assert conf_paths.__file__ is not None
    file = Path(shutil.copy(conf_paths.__file__, package))
    spec = importlib.util.spec_from_file_location("copied_conf_paths", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_of_a_wheel_are_inside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "surogate_core"
    module = copied(package)
    (package / "conf").mkdir()
    (tmp_path / "site-packages" / "conf").mkdir()
    assert module.conf_dir() == package / "conf"


def test_files_of_a_checkout_are_beside_the_package(tmp_path: Path) -> None:
    module = copied(tmp_path / "checkout" / "surogate_core")
    (tmp_path / "checkout" / "conf").mkdir()
    assert module.conf_dir() == tmp_path / "checkout" / "conf"
    assert (conf_paths.conf_dir() / "config.yaml").is_file()
