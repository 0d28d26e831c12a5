"""Speed of the rollout engine `native` with random weights of a preset: chosen tokens a second, prefill included.

    python benchmarks/generate.py [--model qwen3-0.6b] [--sequences 256] [--prompt 64] [--new 256] [--out found.json]
    python benchmarks/generate.py --model qwen3-8b --sequences 128 --cases bf16 lora nf4 fp8 transformers
    python benchmarks/generate.py --cases bf16 --operations      # layers operation by operation, not compiled
    python benchmarks/generate.py --cases bf16 schema --sequences 32      # answers that are held to a JSON schema
    python benchmarks/generate.py --cases drafts undrafted --sequences 4  # text that repeats itself; also --sequences 1
    python benchmarks/generate.py --small                        # tiny, on a CPU

Cases: `bf16`, `schema` (each sequence held to a list of integers, with a drawn vocabulary), `lora` (rank 16 on every
projection, not merged), `lora-fp8` (the same under the recipe fp8-hybrid, with scales as after a step), `nf4` and `fp8`
(the base in that weight format), `drafts` and `undrafted` (greedy, by which random weights repeat themselves, with
drafts and without), `wrong` (sampled, each step with wrong drafts in all rows that are left: what drafts cost;
`--slots` beyond the sequences leaves more of them), `transformers` (its `generate` with SDPA and the same shape) and
`vllm` (its `LLM` as it is by default, without shared prefixes, which the prompts do not have; it captures the batches
that occur, which shortens its start alone).
Prompts differ, tokens are sampled at temperature 1 (with `--top-k` and `--top-p` from the most probable ones), and
nothing stops early. Each case runs in a process of its own; one that fails costs only itself.

`tokens_per_second` is that of the fastest call after the first. `first_token` is the time of one request for one token
right after a call with all sequences, `first_call` the time of the first such call of the process after loading, which
compiles and captures. `prefill`: the time of one token for every sequence, once passes of that shape are captured.
`step`: the median time of a captured step by CUDA events, with all sequences at half of their length; steps without the
host would give `roof` tokens a second. `right`: accepted drafts of a step with drafts. `memory`: GiB of the GPU at
most.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench import adapters, apart, assemble, registry
from gpu_lora import profile

from surogate_core.bundles import Grammar, Request, RolloutSettings, Sampling
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import RandomSource
from surogate_core.generate.constraints import Grammars
from surogate_core.generate.decoding import SteppedRunner
from surogate_core.generate.drafts import Repeats
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.passes import FixedRunner
from surogate_core.generate.weights import Weights
from surogate_core.inference.texts import MOST_SLOTS

MOST = MOST_SLOTS["cuda"]
"""Sequences that are decoded together, unless `--slots` is given."""
SCALE = 64.0
"""The case `lora-fp8` multiplies every tensor by this before it is rounded to FP8; training would choose the scales."""
FORMATS: Mapping[str, str | None] = {
    **dict.fromkeys(("bf16", "schema", "lora", "lora-fp8", "drafts", "undrafted", "wrong")),
    "nf4": "nf4",
    "fp8": "fp8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One case's figures; times in seconds."""

    case: str
    model: str
    sequences: int
    prompt: int
    new: int
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    load: float | None = None
    first_call: float | None = None
    first_token: float | None = None
    prefill: float | None = None
    step: float | None = None
    roof: float | None = None
    right: float | None = None
    profile: dict[str, Any] | None = None
    """Kernel times of that step, with `--profile`."""
    memory: float | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    eager: str | None = None
    """Why steps were not captured."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed."""

    generate: Callable[[int, int], int]
    """(sequences, new tokens) → chosen tokens; it returns when they are on the host."""
    figures: Callable[[], dict[str, Any]] = dict
    """What is known after the calls."""


def shape_of(model: str) -> tuple[Any, str]:
    """(family, preset) of the two names joined by a dash; both can have dashes of their own."""
    names = [name for name in registry().names("model") if model.startswith(f"{name}-")]
    family = registry().get("model", max(names, key=len, default=model))
    return family, model.removeprefix(f"{family.name}-")


def prompts(count: int, length: int, vocabulary: int) -> torch.Tensor:
    """[count, length] random tokens."""
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


def native(case: str, config: Mapping[str, Any], words: argparse.Namespace, device: torch.device) -> Case:
    """The engine `native`."""
    family, _ = shape_of(words.model)
    on_gpu = device.type == "cuda"
    settings = EngineSettings(
        device=device,
        tokens=64,
        borders=2,
        max_seqlen=1,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        compiler="inductor" if on_gpu and not words.operations else "fx",
        cuda_graphs=not words.no_graphs,
    )
    lora = adapters(16, targets=("all",) if case.startswith("lora") else ())
    recipe = "fp8-hybrid" if case == "lora-fp8" else "bf16"
    assembly = assemble(family.build(config), settings, recipe=recipe, lora=lora, weight_format=FORMATS[case])
    weights = Weights.load(assembly, RandomSource(seed=0, std=0.02, device=device))
    if weights.rows is not None:
        weights.rows.state.rows.fill_(SCALE)
    slots = words.slots or min(words.sequences, MOST)
    room = RolloutSettings(slots=slots, context=words.prompt + words.new)
    engine = NativeEngine(weights, room, drafts=case != "undrafted")
    if case == "wrong":
        guess_wrongly(engine)
    ids = prompts(words.sequences, words.prompt, config["vocab_size"]).tolist()
    greedy = case in ("drafts", "undrafted")
    sampling = Sampling(temperature=0.0 if greedy else 1.0, top_k=words.top_k, top_p=words.top_p)
    held: Mapping[str, Any] = {}
    if case == "schema":
        held = {"grammar": integers(config["vocab_size"]), "stop_ids": frozenset((0,))}

    def generate(sequences: int, new: int) -> int:
        requests = [
            Request(prompt=tuple(one), max_new_tokens=new, number=number, sampling=sampling, **held)
            for number, one in enumerate(ids[:sequences])
        ]
        return sum(len(completion.ids) for completion in engine.generate(requests))

    def figures() -> dict[str, Any]:
        runner = engine._runner
        assert isinstance(runner, SteppedRunner | FixedRunner)
        drafts, step, found = runner.drafts, None, None
        replay = captured(runner, slots, words.prompt + words.new // 2) if isinstance(runner, SteppedRunner) else None
        if replay is not None:
            step = seconds_of(replay)
            found = profile(replay, 4) if words.profile else None
        return {
            "kernels": {" ".join(key): name for key, name in assembly.kernels.chosen.items()},
            "eager": getattr(runner, "eager", None),
            "step": step,
            "roof": slots / step if step else None,
            "right": drafts.right / drafts.steps if drafts.steps else None,
            "profile": found,
        }

    return Case(generate=generate, figures=figures)


def guess_wrongly(engine: NativeEngine) -> None:
    """Every step of the process has as many drafts as there are rows for, nearly all of them wrong."""
    runner = engine._runner
    assert isinstance(runner, SteppedRunner | FixedRunner)
    runner.drafts.pays = lambda rows: -1.0
    Repeats.next = lambda self, count: [0] * count  # type: ignore[method-assign]


def integers(size: int) -> Grammar:
    """The grammar of a list of at least 10,000 integers, for a vocabulary of the bytes and of drawn words and numbers,
    whose first token is the end.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(0)
    words = dict.fromkeys(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(words) < size:
        words["".join(draw.choices("0123456789abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8)))] = None
    backend = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}
    return Grammars(tokenizer, frozenset((0,)), size).of_schema(schema)


def captured(runner: SteppedRunner, slots: int, length: int) -> Callable[[], None] | None:
    """The largest captured step with all slots at this length; None if none was captured."""
    kinds = [k for k in runner._graphs if k.rows >= slots and k.longest > length and not k.drafted]
    if not kinds:
        return None
    state, graph = runner._state, runner._graphs[min(kinds, key=lambda kind: (kind.rows, kind.longest))]
    state.clear()
    state.slots_N[:slots] = torch.arange(slots, device=state.device)
    state.positions_N[:slots] = length
    runner._loaded = []

    def replay() -> None:
        state.done.zero_()
        graph.replay()

    return replay


def seconds_of(replay: Callable[[], None]) -> float:
    """Median time of a step."""
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def transformers(config: Mapping[str, Any], words: argparse.Namespace, device: torch.device) -> Case:
    """The same by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    shape = AutoConfig.for_model(config["model_type"], **values)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa").eval()
    ids = prompts(words.sequences, words.prompt, config["vocab_size"]).to(device)

    def generate(sequences: int, new: int) -> int:
        found = model.generate(
            ids[:sequences],
            attention_mask=torch.ones_like(ids[:sequences]),
            max_new_tokens=new,
            do_sample=True,
            top_k=words.top_k,
            top_p=words.top_p,
            eos_token_id=None,
            pad_token_id=0,
        )
        return int(found[:, ids.shape[1] :].numel())

    return Case(generate=generate)


KEYS_AND_VALUES = 24 << 30
"""Bytes that vLLM keeps for them."""


def vllm(config: Mapping[str, Any], words: argparse.Namespace) -> Case:
    """The same by vLLM, which draws weights of its own."""
    from vllm import LLM, SamplingParams

    together = words.slots or min(words.sequences, MOST)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=words.prompt + words.new,
            max_num_seqs=together,
            enable_prefix_caching=False,
            # More than all sequences need; measuring what is free takes it longer.
            kv_cache_memory_bytes=KEYS_AND_VALUES,
            compilation_config={"cudagraph_capture_sizes": sorted({1, min(words.prompt, 512), together})},
        )
    ids = prompts(words.sequences, words.prompt, config["vocab_size"]).tolist()
    # Its word for all tokens is -1 where ours is 0.
    kept = {"top_k": words.top_k or -1, "top_p": words.top_p}

    def generate(sequences: int, new: int) -> int:
        sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, **kept)
        asked = [{"prompt_token_ids": one} for one in ids[:sequences]]
        return sum(len(found.outputs[0].token_ids) for found in engine.generate(asked, sampling, use_tqdm=False))

    return Case(generate=generate)


def timed(run: Callable[[], int]) -> tuple[float, int]:
    """(seconds, tokens) of a call; both engines read their tokens on the host, so the device is done."""
    began = time.perf_counter()
    tokens = run()
    return time.perf_counter() - began, tokens


def measure(case: str, words: argparse.Namespace) -> Found:
    """The case's figures."""
    device = torch.device("cuda" if torch.cuda.is_available() and not words.small else "cpu")
    family, preset = shape_of(words.model)
    config = dict(family.presets[preset])
    began = time.perf_counter()
    if case == "vllm":
        made = vllm(config, words)
    else:
        made = transformers(config, words, device) if case == "transformers" else native(case, config, words, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    load = time.perf_counter() - began
    first_call, _ = timed(lambda: made.generate(1, 1))
    made.generate(1, 1)
    # Compiles and captures what the timed calls need, and lets the GPU raise its clock.
    made.generate(words.sequences, words.new if case != "transformers" else 1)
    first_token = median(timed(lambda: made.generate(1, 1))[0] for _ in range(5))
    if case != "transformers":
        made.generate(words.sequences, 1)
    prefill = median(timed(lambda: made.generate(words.sequences, 1))[0] for _ in range(3))
    calls = [timed(lambda: made.generate(words.sequences, words.new)) for _ in range(words.calls)]
    seconds, tokens = min(calls)
    return Found(
        case=case,
        model=words.model,
        sequences=words.sequences,
        prompt=words.prompt,
        new=words.new,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        load=load,
        first_call=first_call,
        first_token=first_token,
        prefill=prefill,
        # vLLM's is that of another process.
        memory=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" and case != "vllm" else None,
        **made.figures(),
    )


def measured(case: str, words: argparse.Namespace, arguments: list[str]) -> Found:
    """The case's figures, from a process of its own unless `--within` is given."""
    if words.within:
        return measure(case, words)
    figures = {
        "case": case,
        "model": words.model,
        "sequences": words.sequences,
        "prompt": words.prompt,
        "new": words.new,
    }
    return Found(**figures | apart(__file__, arguments, case))


def shown(found: Found) -> str:
    """A line."""
    if found.error is not None:
        return f"{found.case:14} {found.model}: {found.error[:200]}"
    parts = [f"{found.tokens_per_second:10,.0f} tok/s, {found.seconds:.2f} s"]
    if found.step is not None:
        parts.append(f"step {found.step * 1e3:.2f} ms ({found.roof:,.0f} tok/s)")
    if found.right is not None:
        parts.append(f"{found.right:.1f} drafts right a step")
    if found.prefill is not None:
        parts.append(f"prefill {found.prefill * 1e3:.0f} ms")
    if found.first_token is not None:
        parts.append(f"first token {found.first_token * 1e3:.0f} ms ({found.first_call:.2f} s at first)")
    if found.memory is not None:
        parts.append(f"{found.memory:.1f} GiB")
    if found.eager is not None:
        parts.append(f"no graphs: {found.eager}")
    return f"{found.case:14} {found.model}: {', '.join(parts)}"


def main(arguments: list[str] | None = None) -> None:
    """Measure the cases."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="family-preset")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--slots", type=int, help=f"sequences that have room; those that there are, up to {MOST}")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--calls", type=int, default=2, help="timed calls; the fastest counts")
    parser.add_argument("--cases", nargs="+", default=["bf16", "lora", "transformers"])
    parser.add_argument("--operations", action="store_true", help="do not compile layers")
    parser.add_argument("--no-graphs", action="store_true", help="do not capture steps")
    parser.add_argument("--within", action="store_true", help="all cases in this process")
    parser.add_argument("--profile", action="store_true", help="kernel times of a step, in the JSON")
    parser.add_argument("--small", action="store_true", help="qwen3-tiny, few tokens, on a CPU")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args(arguments)
    if words.small:
        words.model, words.sequences, words.prompt, words.new = "qwen3-tiny", 4, 20, 8
    if unknown := set(words.cases) - {*FORMATS, "transformers", "vllm"}:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    found = []
    for case in words.cases:
        found.append(measured(case, words, arguments))
        print(shown(found[-1]), flush=True)
        if words.out is not None:
            words.out.write_text(json.dumps([asdict(one) for one in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
