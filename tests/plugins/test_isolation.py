"""Side effects of plugins are reported with the plugin's name, and do not reach the command's output."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.plugins import Registry, import_policy, isolation, load_plugins
from surogate_core.plugins.isolation import culprit

HEAD = "from surogate_core import bundles, hookimpl\n"
LABEL = "plugin odd (distribution dist-odd 1.2.3)"
HOOK = f"""
{HEAD}
@hookimpl
def surogate_recipe():
    BODY
    return bundles.RecipeSpec(name="odd", build=lambda *a: None)
"""


def load() -> Registry:
    return load_plugins(import_policy(None, {}))


def remarks(registry: Registry) -> list[str]:
    return [str(r) for r in registry.remarks if r.plugin.name == "odd"]


def test_our_own_plugins_give_no_cause_for_a_remark() -> None:
    registry = load()
    registry.check()
    ours = [r for r in registry.remarks if r.plugin.distribution.startswith("surogate-")]
    assert not [str(r) for r in ours if not r.text.startswith("took ")]  # a busy machine is not their fault


@pytest.mark.parametrize("where", ["import", "hook"])
def test_what_is_printed_is_named_and_is_not_in_the_output(install_plugin: Any, capsys: Any, where: str) -> None:
    line = "print('hello', 'world\\nof stdout')"
    install_plugin("odd", line + HOOK.replace("BODY", "pass") if where == "import" else HOOK.replace("BODY", line))
    registry = load()
    assert "odd" in registry.names("recipe")
    doing = "when it was imported" if where == "import" else "in its hook surogate_recipe"
    assert remarks(registry) == [f"{LABEL} printed to stdout {doing}: 'hello world of stdout'"]
    assert capsys.readouterr().out == ""


def test_long_prints_are_cut(install_plugin: Any) -> None:
    install_plugin("odd", "print('x' * 1000)")
    (remark,) = remarks(load())
    assert remark.endswith("x" * 80 + "…'")


def test_what_is_written_to_a_stdout_that_was_kept_comes_out_later(install_plugin: Any, capsys: Any) -> None:
    source = "import sys\nkept = sys.stdout\nkept.reconfigure(line_buffering=True)\nkept.buffer.write(b'bytes ')\n"
    install_plugin("odd", source + "kept.write('early')\n")
    assert remarks(load()) == [f"{LABEL} printed to stdout when it was imported: 'bytes early'"]
    print("late", file=sys.modules["plugin_odd"].kept)
    assert capsys.readouterr().out == "late\n"


def test_a_plugin_that_fails_after_it_printed_is_named_for_both(install_plugin: Any, capsys: Any) -> None:
    install_plugin("odd", "print('soon'); 1 / 0")
    registry = load()
    assert "ZeroDivisionError" in str(registry.broken["odd"])
    assert len(remarks(registry)) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("daemon", [True, False])
def test_threads_are_named(install_plugin: Any, daemon: bool) -> None:
    source = (
        f"import threading\nstop = threading.Event()\n"
        f"threading.Thread(target=stop.wait, name='lurker', daemon={daemon}).start()\n"
    )
    install_plugin("odd", source)
    before = threading.active_count()
    registry = load()
    try:
        waits = "" if daemon else ", which the process will wait for at its end"
        assert remarks(registry) == [f"{LABEL} started the thread 'lurker' when it was imported{waits}"]
        assert "odd" in registry.plugins
    finally:
        sys.modules["plugin_odd"].stop.set()
        next((t.join() for t in threading.enumerate() if t.name == "lurker"), None)
    assert threading.active_count() == before


def test_a_slow_import_is_named_with_what_made_it_so(install_plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(isolation, "clock", lambda: now[0])
    monkeypatch.setitem(sys.modules, "plugin_clock", now)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    install_plugin("odd", "import sys\nsys.modules['plugin_clock'][0] += 1.25\nsys.modules['datasets'] = None\n")
    install_plugin("quick", "import sys\nsys.modules['plugin_clock'][0] += 0.75\n")
    registry = load()
    assert remarks(registry) == [
        f"{LABEL} took 1.2 s when it was imported; its module imports datasets, which belongs into its hooks"
    ]
    assert [r.plugin.name for r in registry.remarks] == ["odd"]


# ------------------------------------------------------------------------------- the commands


def test_a_composed_configuration_is_printed_alone(install_plugin: Any, capsys: Any) -> None:
    """What a program reads from the command is not mixed with a plugin's own; stderr names the plugin."""
    import yaml

    install_plugin("odd", "print('hello: [')")
    assert main(["--cfg", "job"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["recipe"]["name"] == "bf16"
    assert f"warning: {LABEL} printed to stdout when it was imported: 'hello: ['" in printed.err


def test_the_doctor_tells(install_plugin: Any, capsys: Any) -> None:
    install_plugin("odd", "print('hello')")
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"{LABEL} printed to stdout when it was imported: 'hello'" in facts["remarks on plugins"]


def test_a_kernel_pack_that_fails_is_told_by_the_run_that_does_without(
    install_plugin: Any, tmp_path: Path, capsys: Any
) -> None:
    """Its hook is called after the configuration was checked, and nothing asks for it by name."""
    source = f"{HEAD}@hookimpl\ndef surogate_kernel_pack():\n    raise RuntimeError('no compiler')\n"
    install_plugin("odd", source)
    rows = "".join(json.dumps({"text": f"a row of text, number {n}"}) + "\n" for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    data = f"datasets=[{{path: {tmp_path}/rows.jsonl, type: text}}]"
    settings = ["max_steps=1", "warmup_steps=0", "validation_split_ratio=0", "sequence_len=32", "monitor=[jsonl]"]
    tokenizer = "tokenizer=pkg://surogate_dataset_chat/embedded/tokenizer"
    assert main([data, tokenizer, *settings, f"output_dir={tmp_path}/out"]) == 0
    assert "odd" not in capsys.readouterr().err
    start = json.loads((tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    said = f"{LABEL} failed in its hook surogate_kernel_pack: RuntimeError: no compiler; it is left out"
    assert start["notes"].count(said) == 1


RAISING = f"""
{HEAD}
@hookimpl
def surogate_launcher():
    return bundles.Launcher(name="odd", launch=launch)

def launch(job, options, registry):
    BODY
"""


@pytest.mark.parametrize(
    ("body", "raised"),
    [
        ("return options.missing", "AttributeError: 'NoOptions' object has no attribute 'missing'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_what_a_bundle_raises_in_a_run_is_its_plugins(
    install_plugin: Any, capsys: Any, tmp_path: Path, body: str, raised: str
) -> None:
    install_plugin("odd", RAISING.replace("BODY", body))
    assert main(["launcher=odd", f"output_dir={tmp_path}/out"]) == 1
    assert f"surogate: a bug in {LABEL}: {raised}. The traceback is in {tmp_path}/out" in capsys.readouterr().err


def test_what_passes_through_a_plugin_is_not_its_own(install_plugin: Any) -> None:
    """What the DSL refuses is the fault of the plugin that called it; what else the core raises is not."""
    from surogate_core.bundles import NoOptions
    from surogate_core.dsl.dims import Dim

    install_plugin("odd", RAISING.replace("BODY", "return job.run()"))
    registry = load()
    launcher = registry.get("launcher", "odd")
    for main_, expected in ((lambda: Dim("width").size({}), "odd"), (lambda: load().get("recipe", "no such"), None)):
        with pytest.raises(Exception) as caught:
            launcher.launch(SimpleNamespace(run=main_), NoOptions(), registry)
        found = culprit(caught.value)
        assert (found.name if found else None) == expected
