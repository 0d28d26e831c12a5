"""Checks of model families: presets, parity with transformers, export, and a step under every recipe."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import MachineError, UserError, bundles, dsl
from surogate_core.service.engine import distinct, pieces
from surogate_core.service.model import RouterLosses
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.recipes import built as built_recipe

TOLERANCE = 1e-5
"""Relative error of logits and gradients in fp32."""

MOST_PARAMETERS = 5_000_000


def tiny_preset(family: bundles.ModelFamily) -> dict[str, Any]:
    """The preset that the checks compute with."""
    if "tiny" not in family.presets:
        raise NotApplicable("the family has no preset `tiny`, a shape for a CPU")
    config = dict(family.presets["tiny"])
    specs = distinct(pieces(family.build(config), lora=None, max_seqlen=8))
    count = sum(math.prod(s.shape) for s in specs)
    ensure(count <= MOST_PARAMETERS, f"preset `tiny` has {count} parameters, more than {MOST_PARAMETERS}")
    return config


def reference(family: bundles.ModelFamily, config: Mapping[str, Any] | None = None) -> Any:
    """The class of transformers with random weights, in which every tensor affects the result.

    `config`: by default that of the preset `tiny`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = dict(config or tiny_preset(family))
    model_type = str(config.get("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        raise NotApplicable(f"transformers has no model of type {model_type!r}")
    del config["model_type"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    return model


def _state(model: Any) -> dict[str, Tensor]:
    tied = model.config.tie_word_embeddings
    return {k: v.detach().clone() for k, v in model.state_dict().items() if not (tied and "lm_head" in k)}


def reads_its_presets(family: bundles.ModelFamily) -> None:
    """Every preset builds; its tensors have names of their own and sizes; without sizes it names the missing key."""
    ensure(bool(family.hf_model_types), "`hf_model_types` is empty")
    for name, preset in family.presets.items():
        model = family.build(dict(preset))
        found = list(distinct(pieces(model, lora=None, max_seqlen=8)))
        ensure(len({s.hf_name for s in found}) == len(found), f"preset {name}: two tensors have one name")
        ensure(all(min(s.shape) > 0 for s in found), f"preset {name}: a tensor is empty")
    try:
        family.build({"model_type": family.hf_model_types[0]})
    except UserError:
        return
    raise AssertionError("a config.json without sizes is not refused with a UserError")


def says_what_it_is(family: bundles.ModelFamily) -> None:
    """`hf_model_types` has the `model_type` of each preset, and `architecture` is the class that transformers loads."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name, preset in family.presets.items():
        model_type = str(preset.get("model_type", ""))
        types = ", ".join(map(repr, family.hf_model_types))
        ensure(
            model_type in family.hf_model_types,
            f"`hf_model_types` ({types}) does not have the model_type {model_type!r} of preset {name}: its own export "
            f"would not be read",
        )
        found = family.build(dict(preset)).architecture
        listed = preset.get("architectures", [found])
        ensure(found in listed, f"`architecture` is {found!r}, and preset {name} has `architectures` {list(listed)}")
        theirs = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, found)
        known = (theirs,) if isinstance(theirs, str) else tuple(theirs)
        ensure(
            found in known,
            f"`architecture` is {found!r}; transformers loads model_type {model_type!r} as {', '.join(known)}",
        )


def describes_itself_to_formats(family: bundles.ModelFamily) -> None:
    """What `exports` says of each preset is a mapping with names as keys, or refuses the preset with a UserError."""
    for name, describe in family.exports.items():
        for preset, config in family.presets.items():
            try:
                found = describe(dict(config))
            except UserError:
                continue
            keys = isinstance(found, Mapping) and all(isinstance(key, str) for key in found)
            ensure(keys and bool(found), f"exports[{name!r}] of preset {preset}: {found!r} is not a mapping with names")


def equals_transformers(family: bundles.ModelFamily) -> None:
    """Logits and every gradient agree with transformers' class to 1e-5 in fp32, on packed documents."""
    model = reference(family)
    config = model.config.to_dict()
    built = family.build(config)
    state = tiny.in_files(_state(model), built)
    documents = tiny.documents(vocabulary=min(config["vocab_size"], 1000))
    expected, expected_logits = _by_transformers(model, documents, built)

    def exact() -> Mapping[str, Tensor]:
        double = deepcopy(model).double()
        # The other products of experts know no float64.
        double.set_experts_implementation("eager")
        return _by_transformers(double, documents, built)[0]

    made = tiny.engine(config=config, build=family.build, source=tiny.tensor_source(state))
    packed = tiny.batch(documents)
    logits = made.logits(packed)[: sum(map(len, documents))]
    error = tiny.relative_error(logits, expected_logits)
    ensure(error <= TOLERANCE, f"logits: relative error {error:.1e} is above {TOLERANCE}")
    _ensure_gradients(tiny.gradients(made, [packed]), expected, exact)


def _by_transformers(
    model: Any, documents: Sequence[Sequence[int]], built: dsl.Model
) -> tuple[dict[str, Tensor], Tensor]:
    """(gradients of the mean loss by their names in files, logits) of documents one by one."""
    model.zero_grad()
    losses, expected_logits = [], []
    for document in documents:
        ids = torch.tensor([document])
        logits = model(input_ids=ids).logits[0]
        expected_logits.append(logits.detach())
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none"))
    torch.cat(losses).mean().backward()
    names = tiny.in_files(_state(model), built).keys()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g for n, g in tiny.in_files(gradients, built).items() if n in names}, torch.cat(expected_logits)


def _ensure_gradients(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    exact: Callable[[], Mapping[str, Tensor]] | None = None,
) -> None:
    """Within the tolerance. Where fp32 holds fewer digits: as near to float64, which `exact` gives, as the expected."""
    ensure(found.keys() == expected.keys(), f"other tensors: {sorted(found.keys() ^ expected.keys())[:5]}")
    errors = {name: tiny.relative_error(found[name], gradient) for name, gradient in expected.items()}
    allowed = TOLERANCE
    if exact is not None and max(errors.values()) > TOLERANCE:
        true = exact()
        errors = {name: tiny.relative_error(found[name].double(), gradient) for name, gradient in true.items()}
        allowed = max(allowed, *(2 * tiny.relative_error(expected[n].double(), g) for n, g in true.items()))
    for name, error in errors.items():
        ensure(error <= allowed, f"gradient of {name}: relative error {error:.1e} is above {allowed:.1e}")


def balances_as_transformers(family: bundles.ModelFamily) -> None:
    """The load-balancing loss of routers and the gradients with it agree with transformers' class to 1e-5 in fp32."""
    built = family.build(tiny_preset(family))
    if not any(spec.role == "router_probability" for _, block in built.blocks(0) for spec in block.side_specs()):
        raise NotApplicable("its blocks do not report the router's sums (`surogate_core.dsl.sides`)")
    model, coefficient = reference(family), 0.5
    config, state = model.config.to_dict(), tiny.in_files(_state(model), built)
    (document,) = tiny.documents((29,), vocabulary=min(config["vocab_size"], 1000))
    ids = torch.tensor([document])
    found = model(input_ids=ids, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(found.logits[0, :-1], ids[0, 1:])
    if getattr(found, "aux_loss", None) is None:
        raise NotApplicable("the class of transformers has no load-balancing loss")
    (loss + coefficient * found.aux_loss).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = {n: g for n, g in tiny.in_files(gradients, built).items() if n in state}
    losses, source = RouterLosses(aux=coefficient), tiny.tensor_source(state)
    made = tiny.engine(config=config, build=family.build, source=source, router_losses=losses)
    batches = [tiny.batch([document])]
    _ensure_gradients(tiny.gradients(made, batches), expected)
    sides = made.train_step(batches, step=0, lr=0.0).sides().values()
    own = sum(float(total) for role, total in sides if role == "router_aux_loss") / coefficient
    wanted = found.aux_loss.item()
    ensure(abs(own - wanted) <= TOLERANCE * wanted, f"the load-balancing loss is {own}, transformers' is {wanted}")


def generates_as_transformers(family: bundles.ModelFamily) -> None:
    """Greedy completions equal transformers' token for token, log-probabilities to 1e-5 in fp32, in any company."""
    from surogate_core.plugin import inference
    from surogate_core.service.inference import Weights

    model = reference(family)
    config = model.config.to_dict()
    built = family.build(config)
    assembly = tiny.assembly(config, build=family.build, lora=tiny.lora(targets=()))
    weights = Weights.load(assembly, tiny.tensor_source(tiny.in_files(_state(model), built)))
    prompts = tiny.documents((5, 33, 16), vocabulary=min(config["vocab_size"], 1000))
    new = 12
    requests = [
        bundles.Request(prompt=tuple(ids), max_new_tokens=new, number=number, sampling=bundles.Sampling(temperature=0))
        for number, ids in enumerate(prompts)
    ]
    found = inference.NativeEngine(weights, bundles.RolloutSettings(slots=2, context=64)).generate(requests)
    for ids, completion in zip(prompts, found, strict=True):
        given = torch.tensor([ids])
        theirs = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        expected = theirs.sequences[0, len(ids) :].tolist()
        ensure(list(completion.ids) == expected, f"tokens {list(completion.ids)}, transformers' are {expected}")
        logprobs = [
            torch.log_softmax(logits[0], -1)[i].item() for logits, i in zip(theirs.logits, expected, strict=True)
        ]
        error = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(completion.logprobs, logprobs, strict=True))
        ensure(error <= TOLERANCE, f"log-probabilities: error {error:.1e} is above {TOLERANCE}")
    alone = inference.NativeEngine(weights, bundles.RolloutSettings(slots=1, context=64))
    for request, completion in zip(requests, found, strict=True):
        ensure(alone.generate([request]) == [completion], "a completion alone has other bits than in a batch")


def comes_back_from_an_export(family: bundles.ModelFamily) -> None:
    """After a step the exported directory has the engine's tensors, and loads in transformers with nothing missing."""
    from surogate_core.plugin import CardFacts, TensorFile
    from surogate_core.service.files import export_full

    config = tiny_preset(family)
    ensure(bool(config.get("model_type") and config.get("architectures")), "preset `tiny` lacks `architectures`")
    made = tiny.engine(config=config, build=family.build)
    tiny.train(made, 1)
    kept = {name: tensor.clone() for name, tensor in made.parameters.base_tensors()}
    with tempfile.TemporaryDirectory() as parent:
        directory = export_full(
            Path(parent) / "export",
            kept.items(),
            config=config,
            tokenizer=None,
            card=CardFacts(title="check"),
            fused=made.model.fused_tensors(),
        )
        written: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            written |= {name: tensor.clone() for name, tensor in TensorFile(file).items()}
        written = tiny.in_files(written, made.model)
        tiny.ensure_same_bits(written, kept, "the export")
        load_in_transformers(directory, str(config["model_type"]))
    again = tiny.engine(config=config, build=family.build, source=tiny.tensor_source(written))
    packed = tiny.batch(tiny.documents())
    ensure(torch.equal(again.logits(packed), made.logits(packed)), "logits of the export are not those of the run")


def trains_its_other_heads(family: bundles.ModelFamily) -> None:
    """Each of `heads`: its configuration is read as it, and its own tensors are trained beside adapters."""
    plain = family.build(tiny_preset(family))
    for cls in plain.heads:
        config = plain.with_head(cls.kind)
        assert config is not None
        made = family.build(config)
        what = f"head {cls.kind}"
        ensure(isinstance(made.head, cls), f"{what}: a model of its configuration has {type(made.head).__name__}")
        own = made.head.own(made)
        ensure(made.head.hf_name in own, f"{what}: {made.head.hf_name} is not trained beside adapters")
        engine = tiny.engine(config=made.config, build=family.build, lora=tiny.lora(), objective=_SMALL_OUTPUTS)
        before = {name: tensor.clone() for name, tensor in engine.parameters.base_tensors() if name in own}
        loss, _ = engine.train_step(tiny.batches(0)[:1], step=0, lr=0.01).read()
        ensure(math.isfinite(loss), f"{what}: the loss is {loss}")
        after = dict(engine.parameters.base_tensors())
        still = [name for name, tensor in before.items() if torch.equal(after[name], tensor)]
        ensure(not still, f"{what}: a step does not change {still}")


def _square(outputs_NO: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return torch.where(labels_N >= 0, outputs_NO.float().square().mean(-1), 0.0)


_SMALL_OUTPUTS = bundles.Objective(name="small_outputs", token_loss=_square)
"""A loss for the outputs of any head."""


def load_in_transformers(directory: Path, model_type: str) -> None:
    """Ensure that transformers loads a directory with nothing missing, if it has such models."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    info = loaded[1]
    ensure(not info["missing_keys"], f"transformers misses {sorted(info['missing_keys'])[:5]}")
    ensure(not info["unexpected_keys"], f"transformers does not expect {sorted(info['unexpected_keys'])[:5]}")


def _built_on_a_cpu(spec: bundles.RecipeSpec) -> bundles.Recipe | None:
    """The recipe with the defaults of its options; None if a CPU cannot run it."""
    try:
        return built_recipe(spec, tiny.CPU)
    except MachineError:
        return None


def trains_with(recipes: Mapping[str, bundles.RecipeSpec]) -> Callable[[bundles.ModelFamily], None]:
    """The check of a step under each recipe that this machine's CPU can run, natively or emulated."""

    def trains_under_every_recipe(family: bundles.ModelFamily) -> None:
        """Blocks are traced, full in fp32, and in bf16 with adapters that are computed again; losses and gradients are
        finite.
        """
        config = tiny_preset(family)
        usable = {name: recipe for name, spec in recipes.items() if (recipe := _built_on_a_cpu(spec)) is not None}
        # Adapters are tried with recomputing and full training without; each engine costs a trace of every block.
        for name, recipe in (usable or {"reference": tiny.PLAIN}).items():
            for lora, recompute, dtype in ((None, False, torch.float32), (tiny.lora(), True, torch.bfloat16)):
                parts: dict[str, Any] = {"recipe": recipe, "lora": lora, "recompute": recompute, "dtype": dtype}
                made = tiny.engine(config=config, build=family.build, **parts)
                loss = made.accumulate([tiny.batch(tiny.documents())])
                ensure(math.isfinite(loss), f"recipe {name}: the loss is not finite")
                for tensor, gradient in made.parameters.gradients_by_name().items():
                    ensure(bool(gradient.isfinite().all()), f"recipe {name}: the gradient of {tensor} is not finite")

    return trains_under_every_recipe


CHECKS = (
    reads_its_presets,
    says_what_it_is,
    describes_itself_to_formats,
    equals_transformers,
    generates_as_transformers,
    comes_back_from_an_export,
    trains_its_other_heads,
)
