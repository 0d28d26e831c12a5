"""Generation and likelihoods: prompts, wanted completions, memory for them, logits of a model."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.generate.losses import logits_of
    from surogate_core.generate.native import NativeEngine
    from surogate_core.generate.weights import weights_of
    from surogate_core.inference.completions import GrowingText
    from surogate_core.inference.generation import PreparedModel, stop_ids
    from surogate_core.inference.texts import MOST_SLOTS, Prompt, PromptOptions, Text, fitting_slots, needed_bytes
    from surogate_core.measure.subject import JudgedText, Likelihood

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
