"""The options of the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufOptions:
    """Flags of ``surogate export --format gguf``."""

    type: Literal["auto", "f32", "f16", "bf16", "q8_0"] = "auto"
    """Type of the matrices: auto is the dtype of the model's files; q8_0 has 8 bits and a 16-bit scale for 32 weights.
    Vectors and routers are f32.
    """
    ollama: str | None = None
    """Where to write an Ollama Modelfile, such as ``Modelfile``; null writes none."""
