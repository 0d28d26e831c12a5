"""Functions that options name: where they are found, and what the policy for plugins forbids."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest

from surogate_core.bundles import Code
from surogate_core.errors import UserError
from surogate_core.plugins.discovery import ImportPolicy, InstalledPlugin
from surogate_core.plugins.functions import code_of, load_function, mistake
from surogate_core.plugins.policy import LockRule

OPEN = ImportPolicy()
ALLOW = ImportPolicy(allow=(("plugins.allow", frozenset({"good"})),))
LOCKED = ImportPolicy(locks=(LockRule(where="plugins.policy", file="surogate.lock", allow_editable=False),))
BLOCKED = ImportPolicy(block={"good": "plugins.block"})
PLUGINS = [
    InstalledPlugin(name=name, module=f"{name}_plugin.hooks:plugin", distribution=f"d-{name}", version="1")
    for name in ("good", "other")
]


@pytest.mark.parametrize(
    ("text", "policy", "expected"),
    [
        ("mine:f", OPEN, None),
        ("a/b.py:f", OPEN, None),
        ("good_plugin.deep:f", ALLOW, None),
        ("good_plugin:f", LOCKED, None),
        (
            "mine:f",
            ALLOW,
            "mine:f is not in the package of a plugin, and plugins.allow allows only the code of plugins.",
        ),
        ("a/b.py:f", LOCKED, "a/b.py:f is not in the package of a plugin, and plugins.policy allows only the code"),
        ("good_plugin/../b.py:f", ALLOW, "is not in the package of a plugin"),
        ("other_plugin:f", ALLOW, "is code of plugin other (distribution d-other 1), which is not in plugins.allow."),
        (
            "good_plugin:f",
            BLOCKED,
            "is code of plugin good (distribution d-good 1), which is blocked by plugins.block.",
        ),
        *((text, OPEN, "names no function") for text in ("f", ":f", "m:", "m:1", "a-b:f", "m..n:f", "")),
    ],
)
def test_what_may_be_loaded(text: str, policy: ImportPolicy, expected: str | None) -> None:
    found = mistake(text, policy, PLUGINS)
    assert found is None if expected is None else found is not None and expected in found


def test_the_functions_of_options() -> None:
    @dataclass
    class Options:
        one: Annotated[str, Code()] = "a:f"
        none: Annotated[str | None, Code()] = None
        several: Annotated[list[str], Code()] = field(default_factory=lambda: ["b:f", "c:g"])
        module: Annotated[str, Code(function=False)] = "e"
        empty: Annotated[str, Code(function=False)] = ""
        text: str = "d:f"

    Options.__annotations__ = {
        "one": Annotated[str, Code()],
        "none": Annotated[str | None, Code()],
        "several": Annotated[list[str], Code()],
        "module": Annotated[str, Code(function=False)],
        "empty": Annotated[str, Code(function=False)],
        "text": str,
    }
    found = [(name, text) for name, text, _ in code_of(Options())]
    assert found == [("one", "a:f"), ("several", "b:f"), ("several", "c:g"), ("module", "e")]


def test_a_module_that_an_option_names() -> None:
    mark = Code(function=False)
    assert mistake("mine.deep", OPEN, PLUGINS, mark) is None
    assert mistake("good_plugin", ALLOW, PLUGINS, mark) is None
    assert "mine is not in the package of a plugin" in (mistake("mine", ALLOW, PLUGINS, mark) or "")
    assert "names no module" in (mistake("my-own", OPEN, PLUGINS, mark) or "")


def test_a_file_and_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found_here_only.py").write_text("def f():\n    return 7\n")
    for text in ("found_here_only.py:f", "found_here_only:f", f"{tmp_path}/found_here_only.py:f", "math:sqrt"):
        assert callable(load_function(text, key="k", policy=OPEN))
    (tmp_path / "ends.py").write_text("raise RuntimeError('first\\nsecond')\n")
    with pytest.raises(UserError, match=r"^k: ends.py cannot be imported: RuntimeError: first second$"):
        load_function("ends.py:f", key="k", policy=OPEN)
    with pytest.raises(UserError, match="k: found_here_only has no function 'g'"):
        load_function("found_here_only:g", key="k", policy=OPEN)
    with pytest.raises(UserError, match="k: mine:f is not in the package of a plugin"):
        load_function("mine:f", key="k", policy=ALLOW)
