"""Surogate plugin: models as GGUF files for llama.cpp and Ollama."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl
from surogate_export_gguf.options import GgufOptions

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_export_format() -> bundles.ExportFormat:
    """GGUF."""
    return bundles.ExportFormat(
        name="gguf", summary="llama.cpp and Ollama", suffix=".gguf", write=_write, options=GgufOptions
    )


def _write(job: bundles.ExportJob, options: GgufOptions) -> bundles.Exported:
    # gguf and numpy are imported when a file is written, not when a plugin is loaded.
    from surogate_export_gguf.writer import write

    return write(job, options)
