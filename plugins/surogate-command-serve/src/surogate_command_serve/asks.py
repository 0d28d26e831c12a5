"""Requests of the OpenAI API: the body of a request, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from surogate_command_serve.refusals import RequestError
from surogate_command_serve.tool_fields import Offer, message_of, offer, schema_of

__all__ = ["Ask", "RequestError", "read"]

MOST_CHOICES = 128
"""Largest `n`."""
MOST_COMPLETIONS = 1024
"""Largest number of completions of a request: prompts times `n`."""
MOST_STOPS = 16
LONGEST_STOP = 1000
"""Characters of the longest stop text."""
MOST_DIGITS = 1000
"""Most digits of a whole number."""

SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
    "seed": (-(2**63), 2**64 - 1),
}
"""Fields of `Sampling` with the smallest and the largest value that is taken."""
WHOLE = ("top_k", "seed")
LEAST_TOP_P = 1e-9
"""In place of 0, which keeps the most probable token alone too."""

OWN = {
    True: (
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "functions",
        "function_call",
    ),
    False: ("prompt", "best_of", "echo", "suffix"),
}
"""Whether a request is a chat → the fields that only such a request has."""
SHARED = (
    *SAMPLING,
    "model",
    "max_tokens",
    "n",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prediction",
)
"""Fields that change no answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "suffix": ("",),
}
"""Fields that are not offered, with the values that ask for nothing."""

HINTS = {
    "presence_penalty": "use repetition_penalty",
    "frequency_penalty": "use repetition_penalty",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "top_logprobs": "leave it out; logprobs gives the log-probability of the chosen token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    chat: bool
    model: str | None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Texts or tokens to continue; empty for a chat."""
    messages: tuple[Mapping[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Only what the request has."""
    logprobs: bool = False
    echo: bool = False
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    ignore_eos: bool = False
    offer: Offer = field(default_factory=Offer)
    schema: Mapping[str, Any] | None = None
    """What the answer must be as JSON."""

    @property
    def held(self) -> bool:
        """Whether a grammar decides what the answer may be."""
        return self.schema is not None or bool(self.offer.must)

    def unheld(self, reason: str) -> RequestError:
        """The error of a constrained answer that cannot be made."""
        param = "response_format" if self.schema is not None else "tools"
        return RequestError(f"{param}: {reason}", param=param)


def read(body: bytes, *, chat: bool) -> Ask:
    """What a body asks for; raises `RequestError`."""
    fields = _Fields(_parsed(body), chat=chat)
    fields.check_names()
    given = {name: value for name in SAMPLING if (value := fields.sampling(name)) is not None}
    n = fields.whole("n", 1, least=1, most=MOST_CHOICES)
    assert n is not None
    limit = fields.whole("max_tokens", None, least=1)
    if chat:
        limit = fields.whole("max_completion_tokens", limit, least=1)
    prompts = () if chat else fields.prompts()
    if n * len(prompts) > MOST_COMPLETIONS:
        raise RequestError(f"{len(prompts)} prompts with n = {n}: at most {MOST_COMPLETIONS} completions.", param="n")
    if fields.whole("best_of", n, least=1) != n:
        raise RequestError("best_of is not offered. Fix: leave it out, or set n.", param="best_of")
    logprobs, echo = fields.logprobs(), fields.flag("echo")
    if logprobs and echo:
        raise RequestError("echo with logprobs is not offered. Fix: leave one of them out.", param="echo")
    offered = offer(*map(fields.values.get, ("tools", "tool_choice", "parallel_tool_calls")))
    schema = schema_of(fields.values.get("response_format"))
    if schema is not None and offered.tools:
        reason = "response_format with tools is not offered. Fix: leave one of them out, or tool_choice none."
        raise RequestError(reason, param="response_format", code="unsupported_parameter")
    if fields.flag("ignore_eos") and (schema is not None or offered.must):
        raise RequestError("ignore_eos: a constrained answer has an end. Fix: leave it out.", param="ignore_eos")
    return Ask(
        chat=chat,
        model=fields.of_type("model", str, "text"),
        prompts=prompts,
        messages=fields.messages() if chat else (),
        n=n,
        max_tokens=limit,
        stop=fields.stops(),
        sampling=given,
        logprobs=logprobs,
        echo=echo,
        stream=fields.flag("stream"),
        usage=fields.usage(),
        ignore_eos=fields.flag("ignore_eos"),
        offer=offered,
        schema=schema,
    )


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body.decode("utf-8"), parse_int=_whole_number)
        if rb"\ud" in body.lower():  # only such an escape makes half of a pair, and to look for it takes long
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("the body has half of a surrogate pair, which is not text.") from error
    except UnicodeDecodeError as error:
        raise RequestError("the body is not UTF-8.") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply.") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise RequestError("the body is not a JSON object.")
    return found


class _Fields:
    """The fields of a body."""

    def __init__(self, values: Mapping[str, Any], *, chat: bool):
        self.values = {name: value for name, value in values.items() if value is not None}
        self.chat = chat

    def check_names(self) -> None:
        """Refuse fields that are unknown, or that ask for what is not offered."""
        known = (*SHARED, *OWN[self.chat], *IGNORED)
        for name in self.values:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                fix = f" Fix: {near[0]}" if near else ""
                if name in OWN[not self.chat]:
                    fix = f" Fix: send it to {'/v1/completions' if self.chat else '/v1/chat/completions'}"
                raise RequestError(
                    f"{name[:100]}: there is no such field.{fix}", param=name[:100], code="unknown_parameter"
                )
        for name, neutral in NEUTRAL.items():
            if name in self.values and self.values[name] not in neutral:
                fix = HINTS.get(name, "leave it out")
                raise RequestError(f"{name} is not offered. Fix: {fix}.", param=name, code="unsupported_parameter")

    def of_type(self, name: str, kind: type, what: str) -> Any:
        """A field of a type; None without one."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise RequestError(f"{name}: must be {what}.", param=name)
        return value

    def flag(self, name: str) -> bool:
        """A boolean; false without one."""
        return bool(self.of_type(name, bool, "true or false"))

    def whole(self, name: str, default: int | None, *, least: int, most: int = 2**31) -> int | None:
        """A whole number."""
        value = self.values.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise RequestError(f"{name}: must be a whole number from {least} to {most}.", param=name)
        return value

    def sampling(self, name: str) -> float | None:
        """A field of `Sampling`; None without one."""
        value, (least, most) = self.values.get(name), SAMPLING[name]
        if value is None:
            return None
        kinds = int if name in WHOLE else int | float
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or not least <= value <= most:  # NaN is in no range
            what = "a whole number" if name in WHOLE else "a number"
            raise RequestError(f"{name}: must be {what} from {least:g} to {most:g}.", param=name)
        if name == "top_p":
            return max(LEAST_TOP_P, value)
        return max(0, value) if name == "top_k" else value

    def logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        if self.chat:
            return self.flag("logprobs")
        value = self.values.get("logprobs", False)
        if value is not False and value is not True and value != 0:
            raise RequestError(
                "logprobs: other tokens than the chosen one have no log-probability here. Fix: logprobs: 0, which "
                "gives that of the chosen token.",
                param="logprobs",
                code="unsupported_parameter",
            )
        return value is not False

    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        value = self.values.get("stop", ())
        found = (value,) if isinstance(value, str) else value
        fits = isinstance(found, list | tuple) and len(found) <= MOST_STOPS
        if not fits or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in found):
            raise RequestError(
                f"stop: must be text, or a list of at most {MOST_STOPS} texts, none empty or of more than "
                f"{LONGEST_STOP:,} characters.",
                param="stop",
            )
        return tuple(found)

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts of a completion."""
        value = self.values.get("prompt")
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and value:
            if all(map(_is_token, value)):
                return (tuple(value),)
            if all(isinstance(one, str) for one in value):
                return tuple(value)
            if all(isinstance(one, list) and one and all(map(_is_token, one)) for one in value):
                return tuple(map(tuple, value))
        raise RequestError("prompt: must be text, a list of texts, or a list of token ids.", param="prompt")

    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The messages of a chat, whose contents are texts."""
        value = self.values.get("messages")
        if not isinstance(value, list) or not value:
            raise RequestError("messages: must be a list with at least one message.", param="messages")
        return tuple(message_of(place, one) for place, one in enumerate(value))

    def usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        options = self.of_type("stream_options", dict, "an object") or {}
        for name, value in options.items():
            where, known = f"stream_options.{name[:100]}", ("include_usage", "include_obfuscation")
            if name not in known:
                near = get_close_matches(name, known, n=1, cutoff=0.5)
                fix = f" Fix: {near[0]}" if near else ""
                raise RequestError(f"{where}: there is no such field.{fix}", param=where, code="unknown_parameter")
            if not isinstance(value, bool):
                raise RequestError(f"{where}: must be true or false.", param=where)
        return bool(options.get("include_usage"))


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise RequestError(f"the body has a number of {len(digits):,} digits; at most {MOST_DIGITS} are read.")
    return int(digits)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
