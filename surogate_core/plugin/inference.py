"""Generation and likelihoods: prompts, wanted completions, memory for them, logits of a model."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.generate.losses import logits_of as logits_of
    from surogate_core.generate.native import NativeEngine as NativeEngine
    from surogate_core.generate.room import fitting_slots as fitting_slots
    from surogate_core.generate.room import needed_bytes as needed_bytes
    from surogate_core.generate.weights import weights_of as weights_of
    from surogate_core.inference.completions import GrowingText as GrowingText
    from surogate_core.inference.generation import PreparedModel as PreparedModel
    from surogate_core.inference.generation import stop_ids as stop_ids
    from surogate_core.inference.texts import MOST_SLOTS as MOST_SLOTS
    from surogate_core.inference.texts import Prompt as Prompt
    from surogate_core.inference.texts import PromptOptions as PromptOptions
    from surogate_core.inference.texts import Text as Text
    from surogate_core.measure.subject import JudgedText as JudgedText
    from surogate_core.measure.subject import Likelihood as Likelihood

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
