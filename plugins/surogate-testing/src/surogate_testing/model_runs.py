"""Checks of a model family in use: generation, and a run from a checkpoint directory to its exports."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surogate_core.plugin import PluginError, UserError, bundles
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.model_blocks import longest_of
from surogate_testing.models import load_in_transformers, reference, tiny_preset

if TYPE_CHECKING:
    from surogate_core.plugin import inference
    from surogate_core.service.plugins import Registry

CLOSE = 1e-4
"""Largest difference of log-probabilities in fp32."""
NEW = 12
STEPS = 3
"""Steps of the run from a checkpoint directory."""
RING = 128
"""Positions of a slot in which a small window is a ring."""


# ------------------------------------------------------------------------- generation


def generates_as_it_computes(family: bundles.ModelFamily) -> None:
    """Sampled tokens and prompts have the log-probabilities of the forward, beyond each window and chunk of a scan.

    With few slots, in caches of two sizes, in fixed and in growing passes.
    """
    from surogate_core.plugin import inference
    from surogate_core.service.inference import Weights

    config = tiny_preset(family)
    longest = longest_of(family.build(config))
    tokens = longest + 16
    made = tiny.engine(config, build=family.build, tokens=tokens, max_seqlen=tokens)
    vocabulary, weights = min(made.model.vocab_size, 1000), Weights.of(made)
    prompts = tiny.documents((5, longest, 16, 1, 33), vocabulary=vocabulary)
    asked = [*prompts, prompts[1], prompts[4]]
    requests = [
        bundles.Request(prompt=tuple(ids), max_new_tokens=NEW, number=number, sampling=bundles.Sampling(temperature=0))
        for number, ids in enumerate(asked)
    ]

    def forward(ids: Sequence[int]) -> Tensor:
        return torch.log_softmax(made.logits(tiny.batch([ids], tokens=tokens))[: len(ids)].float(), -1)

    for stepped, context in ((False, tokens), (True, max(RING, tokens)), (False, max(RING, tokens))):
        how = f"{'growing' if stepped else 'fixed'} passes, slots of {context} positions"
        try:
            engine = inference.NativeEngine(weights, bundles.RolloutSettings(slots=2, context=context), stepped=stepped)
            found = engine.generate(requests)
        except UserError as refusal:
            raise NotApplicable(str(refusal)) from None
        for request, completion in zip(requests, found, strict=True):
            _ensure_of_forward(forward([*request.prompt, *completion.ids]), request.prompt, completion, how)
        for ids, own in zip(prompts, engine.logprobs(prompts), strict=True):
            expected = forward(ids)[:-1].gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
            error = max((abs(a - b) for a, b in zip(own, expected.tolist(), strict=True)), default=0.0)
            where = f"{how}: a prompt of {len(ids)} tokens"
            ensure(error <= CLOSE, f"{where} has log-probabilities that differ by {error:.1e} from the forward's")


def _ensure_of_forward(logprobs_TV: Tensor, prompt: Sequence[int], completion: Any, how: str) -> None:
    before = logprobs_TV[len(prompt) - 1 : -1]
    chosen = before.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    for number, (own, theirs) in enumerate(zip(completion.logprobs, chosen.tolist(), strict=True)):
        ensure(
            abs(own - theirs) <= CLOSE,
            f"{how}: token {number + 1} behind a prompt of {len(prompt)} has the log-probability {own:.5f}, in the "
            f"forward {theirs:.5f}",
        )
    short = (before.max(-1).values - chosen).max().item()
    ensure(short <= CLOSE, f"{how}: behind a prompt of {len(prompt)} a token is not the most probable one")


# ------------------------------------------------------------------------- a run


def runs_with(registry: Registry | None) -> Callable[[bundles.ModelFamily], None]:
    """The check of a run with these plugins; None: those that are installed."""

    def runs_from_a_checkpoint(family: bundles.ModelFamily) -> None:
        """A model directory is fine-tuned, evaluated, merged, continued and exported, as the commands do it."""
        from surogate_core.service.config import contained

        config, found = tiny_preset(family), _with(registry, family)
        with tempfile.TemporaryDirectory() as parent, contained():
            try:
                _Run(family, found, Path(parent)).check(config)
            except PluginError as error:
                if f"model {family.name!r}" in str(error) or "not installed" not in str(error):
                    raise
                raise NotApplicable(f"a run needs another plugin: {error}") from None

    return runs_from_a_checkpoint


def _with(registry: Registry | None, family: bundles.ModelFamily) -> Registry:
    """The plugins, this family among them."""
    from surogate_core.plugin import import_policy, load_plugins
    from surogate_core.service.plugins import InstalledPlugin, Offered

    registry = load_plugins(import_policy()) if registry is None else registry
    known = registry.bundles("model")
    if family.name in known and known[family.name].bundle is family:
        return registry
    # A family that no plugin offers, as tests have: with plugins of its own, because others use the given ones.
    registry = load_plugins(import_policy())
    plugin = InstalledPlugin(name=f"kit-{family.name}", module=__name__, distribution="kit", version="0")
    registry.plugins[plugin.name] = plugin
    registry._offers["model"] = {**registry.bundles("model"), family.name: Offered(bundle=family, plugin=plugin)}
    return registry


class _Run:
    """A short run of a family in a directory."""

    def __init__(self, family: bundles.ModelFamily, registry: Registry, parent: Path):
        self.family, self.registry, self.parent = family, registry, parent
        self.base, self.run, self.merged = parent / "base", parent / "run", parent / "merged"
        self.rows = parent / "rows.jsonl"
        self.overrides = (
            "device=cpu", "compiler=fx", "model_dtype=fp32", "sequence_len=64", f"data_cache_dir={parent / 'data'}",
            "per_device_train_batch_size=1", f"datasets=[{{path: {self.rows}, type: conversation}}]",
            f"validation_datasets=[{{path: {self.rows}, type: conversation}}]",
        )  # fmt: skip

    def check(self, config: Mapping[str, Any]) -> None:
        """Every step from a model of this configuration, and that they agree."""
        _write_model(self.family, config, self.base)
        texts = ("the chain slips when it is worn", "oil it", "a brake squeals if the rim is wet; dry it and go on")
        rows = [
            [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": t}] for n, t in enumerate(texts)
        ]
        self.rows.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows * 2), encoding="utf-8")
        self._fine_tune()
        self._ensure_adapter()
        merge = _from_plugin("surogate_command_export.merge", "merge")
        merge(None, self.run, self.merged, families=lambda: self.registry.all("model"))
        self._ensure_merged()
        before, after, folded = (self._loss(word) for word in (self.base, self.run, self.merged))
        ensure(math.isfinite(before) and math.isfinite(after), f"losses of the evaluation are {before} and {after}")
        ensure(before != after, "the evaluation of the run is that of its base: the adapter changes nothing")
        ensure(abs(after - folded) <= CLOSE * abs(after), f"the run's loss is {after}, of the merged model {folded}")
        self._ensure_generates()
        self._export()
        load_in_transformers(self.merged, str(self._config()["model_type"]))

    def _config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.merged / "config.json").read_text(encoding="utf-8"))
        return found

    def _fine_tune(self) -> None:
        from surogate_core.plugin import load_run_config
        from surogate_core.service.setup import launch

        settings = (
            "lora=true", "lora_rank=4", "lora_target_modules=[all]", f"max_steps={STEPS}", "warmup_steps=0",
            "eval_steps=0", "learning_rate=0.02", "monitor=[]", f"output_dir={self.run}",
        )  # fmt: skip
        overrides = [f"model={self.base}", *self.overrides, *settings]
        code = launch(load_run_config(overrides, task="sft", registry=self.registry), self.registry)
        ensure(code == 0, f"the run ends with exit code {code}")

    def _ensure_adapter(self) -> None:
        """The exported adapter has the bits of the checkpoint, which are the engine's."""
        from surogate_core.service.setup import open_trained

        fused = self._fused()
        tops = [open_trained(self.run / place)[0][-1] for place in ("adapter", f"checkpoint-{STEPS}")]
        exported, saved = (
            {name.removeprefix(top.prefix): tensor for name, tensor in top.with_experts(fused).tensors.items()}
            for top in tops
        )
        tiny.ensure_same_bits(exported, saved, "the exported adapter and the checkpoint")

    def _ensure_merged(self) -> None:
        """The merged directory has the tensors of the base, and those that have an adapter are changed."""
        from surogate_core.plugin import ModelDir
        from surogate_core.service.files import lora_files

        base, merged = ModelDir.open(self.base), ModelDir.open(self.merged)
        (adapter,) = lora_files.open_stack(self.run / "adapter", key="RUN")
        names = set(base.names())
        ensure(set(merged.names()) == names, f"merged: other tensors: {sorted(set(merged.names()) ^ names)[:5]}")
        changed = [name for name in names if not torch.equal(base.get(name), merged.get(name))]
        fused = self._fused()
        whole = {part: name for name, one in fused.items() if name in names for part, _ in one.parts}
        wanted = {whole.get(f"{m}.weight", f"{m}.weight") for m in adapter.with_experts(fused).modules}
        ensure(set(changed) == wanted, f"merged: {sorted(set(changed) ^ wanted)[:5]} are changed and have no adapter")

    def _fused(self) -> Mapping[str, Any]:
        """The tensors that files have for all experts of a layer together."""
        return self._prepared(self.base).model.fused_tensors()

    def _prepared(self, word: Path) -> inference.PreparedModel:
        from surogate_core.plugin import load_run_config
        from surogate_core.service.inference import named, prepare

        found = named(str(word))
        config = load_run_config([*found.overrides, *self.overrides], registry=self.registry)
        return prepare(found, config, self.registry)

    def _loss(self, word: Path) -> float:
        """The mean loss of a label token on the held-out rows."""
        from surogate_core.service.data import EvalBatches, pipeline
        from surogate_core.service.inference import documents_of

        prepared = self._prepared(word)
        data = pipeline.prepare(prepared.config, prepared.tokenizer, self.registry.all("dataset"), trains_prompts=False)
        assert data.eval is not None
        batches = EvalBatches(data.eval, rows_per_micro_batch=1)
        documents = [one for found in documents_of(prepared.load(self.registry), batches) for one in found]
        return math.fsum(one.loss for one in documents) / math.fsum(one.weight for one in documents)

    def _ensure_generates(self) -> None:
        """The merged model continues as the run does."""
        from surogate_core.service.inference import texts

        found = []
        for word in (self.run, self.merged):
            prepared = self._prepared(word)
            given = [texts.prompt_of_text(prepared.tokenizer, text, name="prompt") for text in ("oil", "the chain is")]
            wanted = texts.PromptOptions(max_new_tokens=8, sampling=bundles.Sampling(temperature=0), ignore_eos=True)
            requests, _ = texts.requests_of(prepared, given, wanted)
            weights = prepared.load(self.registry)
            engine = self.registry.get("rollout", "native").open(weights, texts.settings_of(weights, requests))
            found.append(texts.generate_texts(engine, prepared.tokenizer, requests, wanted.stop))
        for own, merged in zip(*found, strict=True):
            error = abs(own.logprobs[0] - merged.logprobs[0])
            ensure(error <= CLOSE, f"the merged model's first token differs by {error:.1e} in its log-probability")
            ensure(list(own.ids) == list(merged.ids), f"the run continues with {own.text!r}, merged {merged.text!r}")

    def _export(self) -> None:
        """A file in each installed format to which the family describes itself, or a refusal that names the tensor."""
        convert, options_of = (_from_plugin("surogate_command_export.conversion", n) for n in ("convert", "options_of"))
        for name in self.family.exports.keys() & set(self.registry.names("export")):
            spec, place = self.registry.get("export", name), self.parent / f"export.{name}"
            options = options_of(spec, {})
            try:
                done = convert(str(self.run), spec, options, place, self.registry, overrides=self.overrides)
            except UserError:
                continue  # the format has no place for such a model, and says so
            ensure(done.file.stat().st_size > 0, f"export {name}: the file is empty")


def _from_plugin(module: str, name: str) -> Any:
    """A function of a plugin of this project, which need not be installed."""
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise NotApplicable(f"a run needs another plugin: {error.name.replace('_', '-')} is not installed") from None


def _write_model(family: bundles.ModelFamily, config: Mapping[str, Any], directory: Path) -> None:
    """A random model as transformers writes it, or as an export has it where transformers has no such model."""
    from surogate_core.plugin import CardFacts
    from surogate_core.service.files import export_full
    from surogate_testing.chat_templates import byte_tokenizer

    tokenizer = byte_tokenizer()
    model = family.build(config)
    vocabulary = -(-max(model.vocab_size, len(tokenizer)) // 64) * 64
    config = {**config, model.embed.vocab.label: vocabulary}
    try:
        theirs = reference(family, config)
    except NotApplicable:
        made = tiny.engine(config, build=family.build)
        ensure(made.model.vocab_size == vocabulary, f"`{model.embed.vocab.label}` is not the number of embeddings")
        full = {"architectures": [made.model.architecture], "model_type": family.hf_model_types[0], **config}
        tensors = made.parameters.base_tensors()
        card, fused = CardFacts(title="check"), made.model.fused_tensors()
        export_full(directory, tensors, config=full, tokenizer=tokenizer, card=card, fused=fused)
        return
    theirs.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


CHECKS = (generates_as_it_computes,)
