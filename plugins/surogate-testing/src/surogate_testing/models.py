"""Checks of model families: presets, parity with transformers, export, and a step under every recipe."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import MachineError, UserError, bundles, dsl
from surogate_core.service.engine import distinct, pieces
from surogate_core.service.kernels import CHUNK
from surogate_core.service.model import EXPERT, KeyValues, RouterLosses, States, expanded
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.recipes import built as built_recipe

TOLERANCE = 1e-5
"""Relative error of logits and gradients in fp32."""

MOST_PARAMETERS = 5_000_000
MOST_WINDOW = 256
"""Largest window of a preset that the checks compute with; their documents are longer."""


def tiny_preset(family: bundles.ModelFamily, name: str = "tiny") -> dict[str, Any]:
    """The preset that the checks compute with."""
    if name not in family.presets:
        raise NotApplicable(f"the family has no preset `{name}`, a shape for a CPU")
    config = dict(family.presets[name])
    model = family.build(config)
    count = sum(math.prod(s.shape) for s in distinct(pieces(model, lora=None, max_seqlen=8)))
    ensure(count <= MOST_PARAMETERS, f"preset `{name}` has {count} parameters, more than {MOST_PARAMETERS}")
    for prefix, block in model.blocks(0):
        for spec in block.mixer_specs():
            ensure(
                not isinstance(spec, KeyValues) or spec.window <= MOST_WINDOW,
                f"preset `{name}`: {spec.name} of {prefix.rstrip('.')} has a window of {getattr(spec, 'window', 0)} "
                f"positions, and the checks have documents that are longer. Fix: a window of at most {MOST_WINDOW}",
            )
    return config


def tiny_presets(family: bundles.ModelFamily) -> dict[str, dict[str, Any]]:
    """The preset ``tiny``, and those whose names begin with ``tiny-``: variants that are compared with transformers'
    class too.
    """
    others = [name for name in family.presets if name.startswith("tiny-")]
    return {name: tiny_preset(family, name) for name in ("tiny", *others)}


def longest_of(model: dsl.Model, window: int = 0) -> int:
    """Tokens of a document that is longer than every window and than a chunk of a scan; a multiple of 16.

    `window`: one that `model` may lack, such as that of transformers' class.
    """
    specs = [spec for _, block in model.blocks(0) for spec in block.mixer_specs()]
    window = max((window, *(spec.window for spec in specs if isinstance(spec, KeyValues))))
    scans = any(isinstance(spec, States) for spec in specs)
    length = max(40, 2 * min(window, MOST_WINDOW) + 8, CHUNK + 12 if scans else 0)
    return -(-length // 16) * 16


def reference(family: bundles.ModelFamily, config: Mapping[str, Any] | None = None) -> Any:
    """The class of transformers with random weights, in which every tensor affects the result.

    `config`: by default that of the preset `tiny`.
    """
    from transformers import AutoModelForCausalLM

    theirs = their_config(config or tiny_preset(family))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    return model


def their_config(config: Mapping[str, Any]) -> Any:
    """transformers' configuration of a ``config.json``. Raises `NotApplicable` where it has no such models, and
    whatever transformers raises.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # A copy, because transformers changes what it is given.
    values = deepcopy(dict(config))
    model_type = str(values.pop("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        raise NotApplicable(f"transformers has no model of type {model_type!r}")
    return AutoConfig.for_model(model_type, **values)


def state_for(built: dsl.Model, model: Any) -> dict[str, Tensor]:
    """The tensors of transformers' class by the names in files. `AssertionError` if the family has others."""
    tied = model.config.tie_word_embeddings
    state = {k: v.detach().clone() for k, v in model.state_dict().items() if not (tied and "lm_head" in k)}
    found = tiny.in_files(state, built)
    ensure_names(built, found)
    return found


def ensure_names(model: dsl.Model, theirs: Collection[str]) -> None:
    """Raise `AssertionError` naming the first tensor that the model or transformers' class lacks."""
    own = {
        f"{prefix}{spec.hf_name}": f"{type(block).__qualname__}.{spec.name.split('.')[0]}"
        for prefix, block in model.blocks(0)
        for spec in block.tensor_specs("", block.linear_slots(None), train_base=True, experts=block.expert_slots(None))
    }
    known: set[str] = set()
    for spec in distinct(pieces(model, lora=None, max_seqlen=8)):
        names = list(expanded(spec.hf_name, spec.shape)) if EXPERT in spec.hf_name else [spec.hf_name]
        whose = own.get(spec.hf_name, "the embedding or the head")
        missing = [name for name in names if name not in theirs]
        ensure(
            not missing,
            f"transformers' class has no tensor {', '.join(missing[:1])}, which {whose} declares. Fix: give it the "
            f"name that it has there; what a base class declares is left out with `NAME = None`",
        )
        known.update(names)
    lacking = sorted(set(theirs) - known)
    ensure(
        not lacking,
        f"transformers' class has the tensor {', '.join(lacking[:1])}, which nothing declares. Fix: declare it",
    )


def document_length(model: dsl.Model, theirs: Any) -> int:
    """Tokens of a document that is longer than the windows of a model and of transformers' class; 0 without windows.

    Raises `AssertionError` for one that is too large.
    """
    window, kinds = getattr(theirs, "sliding_window", None) or 0, getattr(theirs, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        window = 0
    ensure(
        window <= MOST_WINDOW or window >= theirs.max_position_embeddings,
        f"transformers' class reads `sliding_window` {window}, and no document of the checks is longer. "
        f"Fix: give the preset a `sliding_window` of at most {MOST_WINDOW}",
    )
    specs = [spec for _, block in model.blocks(0) for spec in block.mixer_specs()]
    has_window = window or any(isinstance(spec, KeyValues) and spec.window for spec in specs)
    return longest_of(model, window) if has_window else 0


def reads_its_presets(family: bundles.ModelFamily) -> None:
    """Every preset builds; its tensors have names of their own and sizes; without sizes it names the missing key."""
    ensure(bool(family.hf_model_types), "`hf_model_types` is empty")
    for name, preset in family.presets.items():
        try:
            model = family.build(dict(preset))
        except UserError as error:
            raise AssertionError(
                f"preset {name}: `build` refuses it: {error} If the family computes it, name the key in `reads`"
            ) from error
        found = list(distinct(pieces(model, lora=None, max_seqlen=8)))
        ensure(len({s.hf_name for s in found}) == len(found), f"preset {name}: two tensors have one name")
        ensure(all(min(s.shape) > 0 for s in found), f"preset {name}: a tensor is empty")
        with suppress(NotApplicable):
            _ensure_they_read(name, preset)
    try:
        family.build({"model_type": family.hf_model_types[0]})
    except UserError:
        return
    raise AssertionError("a config.json without sizes is not refused with a UserError")


def _ensure_they_read(name: str, preset: Mapping[str, Any]) -> None:
    try:
        their_config(preset)
    except NotApplicable:
        raise
    except Exception as error:
        raise AssertionError(
            f"preset {name}: transformers' configuration cannot be made of it ({type(error).__name__}: {error}), so no "
            f"export of it could be loaded. Fix: change the preset, and refuse such a config.json in `build`"
        ) from error


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


def _each_tiny(family: bundles.ModelFamily, check: Callable[[bundles.ModelFamily, Mapping[str, Any]], None]) -> None:
    for name, preset in tiny_presets(family).items():
        try:
            check(family, preset)
        except AssertionError as error:
            raise AssertionError(f"preset `{name}`: {error}") from error


def equals_transformers(family: bundles.ModelFamily) -> None:
    """Logits and every gradient agree with transformers' class to 1e-5 in fp32, on packed documents."""
    _each_tiny(family, _ensure_equal)


def _ensure_equal(family: bundles.ModelFamily, preset: Mapping[str, Any]) -> None:
    model = reference(family, preset)
    config = model.config.to_dict()
    built = family.build(config)
    state = state_for(built, model)
    longest = document_length(built, model.config)
    lengths = (longest, *tiny.LENGTHS[1:]) if longest else tiny.LENGTHS
    tokens = -(-(sum(lengths) + 1) // 16) * 16
    documents = tiny.documents(lengths, vocabulary=min(config["vocab_size"], 1000))
    expected, expected_logits = _by_transformers(model, documents, built)

    def exact() -> Mapping[str, Tensor]:
        double = deepcopy(model).double()
        # The other products of experts know no float64.
        double.set_experts_implementation("eager")
        return _by_transformers(double, documents, built)[0]

    made = tiny.engine(config=config, build=family.build, source=tiny.tensor_source(state), tokens=tokens)
    packed = tiny.batch(documents, tokens=tokens)
    logits = made.logits(packed)[: sum(lengths)]
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
    names = state_for(built, model).keys()
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
    config, state = model.config.to_dict(), state_for(built, model)
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
    _each_tiny(family, _ensure_same_text)


def _ensure_same_text(family: bundles.ModelFamily, preset: Mapping[str, Any]) -> None:
    from surogate_core.plugin import inference
    from surogate_core.service.inference import Weights

    model = reference(family, preset)
    config = model.config.to_dict()
    built = family.build(config)
    assembly = tiny.assembly(config, build=family.build, lora=tiny.lora(targets=()))
    weights = Weights.load(assembly, tiny.tensor_source(state_for(built, model)))
    longest, new = max(33, document_length(built, model.config)), 12
    context = max(64, -(-(longest + new) // 16) * 16)
    prompts = tiny.documents((5, longest, 16), vocabulary=min(config["vocab_size"], 1000))
    requests = [
        bundles.Request(prompt=tuple(ids), max_new_tokens=new, number=number, sampling=bundles.Sampling(temperature=0))
        for number, ids in enumerate(prompts)
    ]
    found = inference.NativeEngine(weights, bundles.RolloutSettings(slots=2, context=context)).generate(requests)
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
    alone = inference.NativeEngine(weights, bundles.RolloutSettings(slots=1, context=context))
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
