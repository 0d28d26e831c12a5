"""Compares a family with transformers' class of it, on tiny random weights, for the tests of model families.

The tests of adapters need PEFT.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from surogate_core.plugin import CardFacts, dsl, export_adapter
from surogate_core.service.engine import Engine
from surogate_core.service.files import export_full
from surogate_testing import tiny
from surogate_testing.check import ensure

TOLERANCE = 1e-5
"""Relative tolerance in fp32; measured errors are near 1e-6."""
LENGTHS = (13, 9, 7)
TINY: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
"""A config of three layers with grouped queries."""

Record = Callable[[str, object], None]
"""Measured errors go into the report (``--junitxml``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """One random model, in transformers and in an engine."""

    reference: Any
    build: Callable[[Mapping[str, Any]], dsl.Model]
    documents: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls,
        architecture: type[Any],
        config: Any,
        build: Callable[[Mapping[str, Any]], dsl.Model],
        *,
        lengths: Sequence[int] = LENGTHS,
        settled: Callable[[Any], None] = lambda model: None,
    ) -> ModelPair:
        """A random model in which every tensor affects the result: norms are not one, biases are not zero.

        `settled` changes the values of some in place, such as decays.
        """
        torch.manual_seed(0)
        model = architecture(config)
        with torch.no_grad():
            saved = model.state_dict()
            buffers = (b for name, b in model.named_buffers() if name in saved)
            for p in (*model.parameters(), *buffers):
                p.add_(torch.randn_like(p) * (0.1 if p.ndim > 1 else 0.3))
            settled(model)
        return cls(reference=model, build=build, documents=tiny.documents(lengths, seed=100))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch: the documents and a little padding."""
        return sum(map(len, self.documents)) + 3

    def state(self) -> dict[str, Tensor]:
        """The tensors of a safetensors file; a tied head is not among them."""
        tied = self.reference.config.tie_word_embeddings
        state = {k: v.clone() for k, v in self.reference.state_dict().items() if not (tied and "lm_head" in k)}
        return tiny.in_files(state, self._built())

    def _built(self) -> dsl.Model:
        return self.build(self.reference.config.to_dict())

    def engine(self, extra: Mapping[str, Tensor] | None = None, **settings: Any) -> Engine:
        """An engine with the same weights."""
        source = tiny.tensor_source({**self.state(), **(extra or {})})
        config = self.reference.config.to_dict()
        parts = {"build": self.build, "optimizer": tiny.ADAMW, "source": source, **settings}
        return tiny.engine(config, **{"tokens": self.tokens, **parts})

    def logits_error(self) -> float:
        """The largest relative error of a document's logits, packed here and alone there."""
        logits = self.engine().logits(tiny.batch(self.documents, tokens=self.tokens))
        start, errors = 0, []
        for document in self.documents:
            with torch.no_grad():
                expected = self.reference(input_ids=torch.tensor([document])).logits[0]
            errors.append(tiny.relative_error(logits[start : start + len(document)], expected))
            start += len(document)
        return max(errors)

    def gradient_error(self, *, recompute: bool) -> tuple[float, str]:
        """The largest relative error of a tensor's gradient, and its name; the loss is checked too.

        Where fp32 holds fewer digits, both sides are compared with transformers' model in float64: an error twice as
        large as that of transformers in fp32 counts as `TOLERANCE`.
        """
        wanted, expected = self._by_transformers(self.reference)
        engine = self.engine(recompute=recompute, head_chunks=2)
        batch = tiny.batch(self.documents, tokens=self.tokens)
        loss = engine.evaluate([batch])[0]
        ensure(abs(loss - wanted) <= TOLERANCE * abs(wanted), f"the loss is {loss}, not {wanted}")
        found = tiny.gradients(engine, [batch])
        error, name = tiny.worst(found, expected)
        if error <= TOLERANCE:
            return error, name
        double = copy.deepcopy(self.reference).double()
        double.set_experts_implementation("eager")
        _, exact = self._by_transformers(double)
        error, name = tiny.worst(found, exact)
        return error * min(1.0, TOLERANCE / (2 * tiny.worst(expected, exact)[0])), name

    def _by_transformers(self, model: Any) -> tuple[float, dict[str, Tensor]]:
        """(mean loss, gradients by their names in files) of the documents one by one."""
        model.zero_grad()
        losses = []
        for document in self.documents:
            ids = torch.tensor([document])
            logits = model(input_ids=ids).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
        loss = torch.cat(losses).mean()
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        # Before they are split: an expert that no token chooses has none, as in training.
        ensure(all(g is not None and g.norm() > 0 for g in found.values()), "a gradient of zero tests nothing")
        return loss.item(), tiny.in_files(found, self._built())

    def leaks(self) -> list[tuple[int, int]]:
        """(changed, other): the documents whose logits another one's changed first token changes in any bit.

        With experts, by more than rounding: a product rounds by the number of an expert's rows.
        """
        bound = 1e-6 if self._built().expert_slots() else 0.0
        engine = self.engine()
        before = engine.logits(tiny.batch(self.documents, tokens=self.tokens)).clone()
        borders = [0, *accumulate(map(len, self.documents))]
        found = []
        for number, document in enumerate(self.documents):
            changed = list(map(list, self.documents))
            changed[number][0] = (document[0] + 1) % self.reference.config.vocab_size
            after = engine.logits(tiny.batch(changed, tokens=self.tokens))
            differs = [tiny.relative_error(after[a:b], before[a:b]) > bound for a, b in pairwise(borders)]
            ensure(differs[number], "a changed token must change its own document's logits")
            found += [(number, other) for other, one in enumerate(differs) if one and other != number]
        return found

    def greedy(self, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """`count` tokens after each document, by `NativeEngine` and by transformers' forward over the whole text."""
        from surogate_core.plugin import bundles, inference
        from surogate_core.service.inference import Weights

        assembly = tiny.assembly(self.reference.config.to_dict(), build=self.build, lora=tiny.lora(targets=()))
        weights = Weights.load(assembly, tiny.tensor_source(self.state()))
        requests = [
            bundles.Request(
                prompt=tuple(ids), max_new_tokens=count, number=number, sampling=bundles.Sampling(temperature=0)
            )
            for number, ids in enumerate(self.documents)
        ]
        longest = max(map(len, self.documents)) + count
        made = inference.NativeEngine(weights, bundles.RolloutSettings(slots=2, context=longest)).generate(requests)
        theirs = []
        for document in self.documents:
            text = list(document)
            for _ in range(count):
                with torch.no_grad():
                    logits = self.reference(input_ids=torch.tensor([text]), use_cache=False).logits
                text.append(int(logits[0, -1].argmax()))
            theirs.append(text[len(document) :])
        return [list(one.ids) for one in made], theirs

    def full_export_error(self, path: Path) -> float:
        """After a step, the logits of the exported model in transformers."""
        engine = self.engine()
        batch = tiny.batch(self.documents, tokens=self.tokens)
        engine.train_step([batch], step=0, lr=1e-3).read()
        directory = export_full(
            path, engine.parameters.base_tensors(), config=self.reference.config.to_dict(), tokenizer=None,
            card=CardFacts(title="tiny"), max_shard_bytes=20_000, fused=self._built().fused_tensors(),
        )  # fmt: skip
        found: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        loaded, info = found
        ensure(not info["missing_keys"], f"transformers misses {info['missing_keys']}")
        ensure(not info["unexpected_keys"], f"transformers does not expect {info['unexpected_keys']}")
        return self._first_error(loaded, engine)

    def adapter_export_error(self, path: Path, *, targets: Sequence[str] = tiny.TARGETS) -> float:
        """After a step from PEFT's adapters, the logits of the exported adapter in PEFT."""
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

        state = self.state()
        torch.manual_seed(1)
        settings = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM")
        adapted = get_peft_model(self.reference, settings)
        prefix = "base_model.model."
        adapters = {n.removeprefix(prefix): t.clone() for n, t in get_peft_model_state_dict(adapted).items()}
        base = adapted.unload()
        engine = self.engine({**state, **adapters}, lora=tiny.lora(4, scale=2.0, targets=targets))
        return self._adapted_error(path, engine, base)

    def own_adapter_error(self, path: Path, targets: Sequence[str] = tiny.TARGETS, **others: Any) -> float:
        """After steps from random adapters, the logits of the exported adapter in PEFT; it is not in the reference.

        `others`: further fields of `LoRA`.
        """
        own, drawn = tiny.tensor_source(self.state()), tiny.random_source()
        engine = self.engine(
            source=lambda spec: drawn(spec) if spec.role == "adapter" else own(spec),
            lora=tiny.lora(4, scale=2.0, targets=targets, **others),
        )
        return self._adapted_error(path, engine, copy.deepcopy(self.reference))

    def _adapted_error(self, path: Path, engine: Engine, base: Any) -> float:
        from peft import PeftModel

        batch = tiny.batch(self.documents, tokens=self.tokens)
        for step in range(2):
            engine.train_step([batch], step=step, lr=1e-2).read()
        directory = export_adapter(
            path, engine.parameters.adapter_tensors(), rank=4, alpha=8, dropout=0.0, base_model=None,
            card=CardFacts(title="tiny"), model=self._built(),
        )  # fmt: skip
        plain = self._first_error(base, engine)
        ensure(plain > 100 * TOLERANCE, "the adapter must matter")
        return self._first_error(PeftModel.from_pretrained(base, str(directory)).eval(), engine)

    def _first_error(self, loaded: Any, engine: Engine) -> float:
        first = self.documents[0]
        with torch.no_grad():
            expected = loaded(input_ids=torch.tensor([first])).logits[0]
        return tiny.relative_error(engine.logits(tiny.batch([first], tokens=self.tokens))[: len(first)], expected)
