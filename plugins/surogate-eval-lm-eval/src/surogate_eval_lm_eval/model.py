"""A model of Surogate as lm-eval's model class.

Prompts are encoded, cut at the left and completed as lm-eval's class for transformers does it, so both give the same
figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from surogate_core.plugin import UserError, bundles, encoding, inference

LENGTH = 2048
"""Tokens of a sequence, if the model has no end."""
IGNORED = {"do_sample", "use_cache", "max_length"}
"""Generation keys that do not change what is sampled here."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class SurogateLM(TemplateLM):
    """lm-eval's interface to a loaded model."""

    def __init__(self, subject: bundles.MeasuredModel, *, seed: int = 0):
        super().__init__()
        self.subject, self.seed = subject, seed
        self.tokenizer = subject.tokenizer

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        context = self.subject.context
        return int(context) if context != float("inf") else LENGTH

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        begin = self.tokenizer.bos_token_id
        return int(begin) if begin is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Its name in lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Token ids; a text that has the first special token already gets no other one."""
        if add_special_tokens is None:
            return encoding.encode_whole(self.tokenizer, string, ended=False)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # ------------------------------------------------------------------------- likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        for number, (_, context, continuation) in enumerate(requests):
            whole = (*context, *continuation)[-(self.max_length + 1) :]
            border = max(1, len(whole) - len(continuation))
            pairs.append(
                inference.JudgedText(
                    name=f"request {number}", context=whole[:border], continuation=tuple(whole[border:])
                )
            )
        return [(one.logprob, one.greedy) for one in self.subject.likelihoods(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that do not overlap."""
        windows, counts = [], []
        for request in requests:
            some = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *utils.make_disjoint_window(window)) for window in some]
            windows += own
            counts.append(len(own))
        values = iter(self._loglikelihood_tokens(windows))
        return [sum(next(values)[0] for _ in range(count)) for count in counts]

    # ------------------------------------------------------------------------- completions

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A completion of each prompt; those with equal settings are made together."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        found = [""] * len(requests)
        for numbers in groups.values():
            texts = self._complete([requests[number].args[0] for number in numbers], requests[numbers[0]].args[1])
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
        return found

    def _complete(self, contexts: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
        values = dict(normalize_gen_kwargs(dict(keys), 256))
        until, most = [text for text in values.pop("until") if text], values.pop("max_gen_toks")
        sampling = {key: values.pop(key) for key in SAMPLING if key in values}
        if unknown := values.keys() - IGNORED:
            raise UserError(
                f"lm-eval: `generation_kwargs`: {min(unknown)} is not available. "
                f"Fix: use do_sample, {', '.join(SAMPLING)}, until and max_gen_toks"
            )
        room = self.max_length - most
        if room < 1:
            raise UserError(
                f"lm-eval: `max_gen_toks`: {most:,} tokens are asked for, and the model's positions end at "
                f"{self.max_length:,}. Fix: --max-new-tokens {self.max_length // 2}"
            )
        prompts = [
            inference.Prompt(name=f"prompt {number}", ids=tuple(self.tok_encode(text)[-room:]))
            for number, text in enumerate(contexts)
        ]
        wanted = inference.PromptOptions(
            max_new_tokens=most,
            sampling=bundles.Sampling(**{"temperature": 0.0, **sampling}, seed=self.seed),
            stop=tuple(until),
        )
        stops = [*until, self._text([self.eot_token_id])]
        return [
            postprocess_generated_text(self._text(text.ids, skip_special_tokens=True), stops, None)
            for text in self.subject.complete(prompts, wanted)
        ]
