"""docs/python.md and examples/finetune.ipynb run as they stand, with a tiny model in place of the hub's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages import blocks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen3-0.6B"
NOTEBOOK = ROOT / "examples" / "finetune.ipynb"


@pytest.fixture
def model(tmp_path: Path, model_copy: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(model_copy)


def test_the_page_about_python(model: str) -> None:
    space: dict[str, Any] = {}
    page = [block for block in blocks(ROOT / "docs" / "python.md") if "tests/api/test_page.py" in block.mark]
    assert len(page) > 6
    for block in page:
        exec(compile(block.text.replace(MODEL, model), str(block), "exec"), space)
    assert [step for step, _ in space["history"]] == [1, 2, 3, 4, 5, 6]
    assert (space["merged"] / "model.safetensors").is_file()
    assert len({run.path for run in space["runs"]}) == 2


def test_the_notebook(model: str) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "it is stored without outputs"
    for cell in notebook.cells:
        cell.source = cell.source.replace(MODEL, model)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(Path.cwd())}})
    client.execute()
    shown = json.dumps(notebook.cells)
    assert "<iframe srcdoc=" in shown
    texts = [out["text"] for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "stream"]
    assert sum(text.count("\n") for text in texts) < 60, "quiet enough to read"
    # transformers, in the last cell, prints a bar.
    ours = [out for cell in notebook.cells[:-1] for out in cell.get("outputs", ())]
    assert not [out for out in ours if out.get("name") == "stderr"]
