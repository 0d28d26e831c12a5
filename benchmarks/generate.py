"""Speed of the rollout engine `native` with random weights of a preset: chosen tokens a second, prefill included.

    python benchmarks/generate.py [--model qwen3-0.6b] [--sequences 256] [--prompt 64] [--new 256] [--out found.json]
    python benchmarks/generate.py --cases bf16 lora nf4 fp8 transformers
    python benchmarks/generate.py --small           # tiny, on a CPU

Cases: `bf16`, `lora` (rank 16 on every projection, not merged), `nf4` and `fp8` (the base in that weight format), and
`transformers` (its `generate` with SDPA and the same shape). Prompts differ, tokens are sampled at temperature 1 and
nothing stops early. A time is that of the second of two calls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench import adapters, assemble, registry

from surogate_core.bundles import Request, RolloutSettings
from surogate_core.engine.assembly import EngineSettings
from surogate_core.engine.pieces import RandomSource
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights

FORMATS: Mapping[str, str | None] = {"bf16": None, "lora": None, "nf4": "nf4", "fp8": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One case's figures."""

    case: str
    model: str
    sequences: int
    prompt: int
    new: int
    seconds: float
    tokens_per_second: float


def prompts(count: int, length: int, vocabulary: int) -> torch.Tensor:
    """[count, length] random tokens."""
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


def native(case: str, config: Mapping[str, Any], words: argparse.Namespace, device: torch.device) -> Callable[[], int]:
    """A call that generates, and returns the number of chosen tokens."""
    family = registry().get("model", words.model.partition("-")[0])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = EngineSettings(device=device, tokens=64, borders=2, max_seqlen=1, dtype=dtype)
    lora = adapters(16, targets=("all",) if case == "lora" else ())
    assembly = assemble(family.build(config), settings, lora=lora, weight_format=FORMATS[case])
    weights = Weights.load(assembly, RandomSource(seed=0, std=0.02, device=device))
    engine = NativeEngine(
        weights, RolloutSettings(slots=min(words.sequences, words.slots), context=words.prompt + words.new)
    )
    ids = prompts(words.sequences, words.prompt, config["vocab_size"]).tolist()
    requests = [Request(prompt=tuple(one), max_new_tokens=words.new, number=n) for n, one in enumerate(ids)]
    return lambda: sum(len(completion.ids) for completion in engine.generate(requests))


def transformers(config: Mapping[str, Any], words: argparse.Namespace, device: torch.device) -> Callable[[], int]:
    """The same by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    shape = AutoConfig.for_model(config["model_type"], **values)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa").eval()
    ids = prompts(words.sequences, words.prompt, config["vocab_size"]).to(device)

    def run() -> int:
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=words.new,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        return int(found[:, ids.shape[1] :].numel())

    return run


def measure(case: str, words: argparse.Namespace) -> Found:
    """The case's speed."""
    device = torch.device("cuda" if torch.cuda.is_available() and not words.small else "cpu")
    family, _, preset = words.model.partition("-")
    config = dict(registry().get("model", family).presets[preset])
    run = transformers(config, words, device) if case == "transformers" else native(case, config, words, device)
    run()
    began = time.perf_counter()
    tokens = run()  # both read their tokens on the host, so the device is done
    seconds = time.perf_counter() - began
    return Found(
        case=case,
        model=words.model,
        sequences=words.sequences,
        prompt=words.prompt,
        new=words.new,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
    )


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="family-preset")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--slots", type=int, default=256, help="sequences that are decoded together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--cases", nargs="+", default=["bf16", "lora", "transformers"])
    parser.add_argument("--small", action="store_true", help="qwen3-tiny, few tokens, on a CPU")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    if words.small:
        words.model, words.sequences, words.prompt, words.new = "qwen3-tiny", 4, 20, 8
    if unknown := set(words.cases) - {*FORMATS, "transformers"}:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    found = []
    for case in words.cases:
        one = measure(case, words)
        found.append(one)
        print(f"{case:14} {one.model}: {one.tokens_per_second:10,.0f} tok/s, {one.seconds:.2f} s", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if words.out is not None:
        words.out.write_text(json.dumps([asdict(one) for one in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
