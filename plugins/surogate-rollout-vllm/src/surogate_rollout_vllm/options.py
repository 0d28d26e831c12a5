"""The options of `rollout=vllm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval, MinLen


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """A vLLM server and how it is used."""

    url: Annotated[str, MinLen(1)] = "http://127.0.0.1:8000"
    """Address of the server, without `/v1`."""
    model: Annotated[str, MinLen(1)] | None = None
    """Name of the base model on the server; null takes the only one that it serves."""
    key_variable: Annotated[str, MinLen(1)] = "VLLM_API_KEY"
    """Environment variable with the server's API key; without it no key is sent."""
    adapter_dir: Annotated[str, MinLen(1)] | None = None
    """Directory for the adapters, which the server reads by the same path; null makes a temporary one."""
    timeout: Annotated[float, Interval(gt=0, le=86_400)] = 600.0
    """Seconds that one request may take."""
    retries: Annotated[int, Interval(ge=0, le=100)] = 3
    """Further attempts of a request that fails: no connection, no answer in time, HTTP 429 or 5xx."""
    requests_at_once: Annotated[int, Interval(ge=1, le=4096)] = 256
    """Largest number of open requests; the server batches them."""
    probe_tokens: Annotated[int, Interval(ge=2, le=4096)] = 128
    """Tokens of the prompts whose log-probabilities are compared after every update."""
    probe_tolerance: Annotated[float, Interval(gt=0, le=100)] = 0.1
    """Largest mean difference of these log-probabilities between the server and the trainer."""
