"""Whole runs of a model with experts: adapters, merging, continuing, files of both kinds, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from mixture import save_qwen3_moe
from run_fixtures import QUICK, RunHere
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate_core.bundles import Recipe
from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.errors import ConfigError, UserError
from surogate_core.files.metrics import read_metrics
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import resolve_model, resolve_recipe
from surogate_core.setup.experts import expert_notes, product_notes
from surogate_core.train.loop import DivergedError

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "lora_target_modules=[all]", "max_steps=2", "tokenizer=null")
EVERYTHING = ("lora_expert_rank=2", "train_router=true")
IDS = torch.arange(40).reshape(2, 20)


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE whose first layer is dense, in several files."""
    return save_qwen3_moe(tmp_path_factory.mktemp("moe") / "base", max_shard_size="40KB")


@pytest.fixture(scope="module")
def small(data_cache: Path) -> list[str]:
    return [*QUICK, *LORA, f"data_cache_dir={data_cache}"]


@pytest.fixture(scope="module")
def trained(model: Path, small: Sequence[str], run_here: RunHere, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with adapters on everything and trained routers, merged too."""
    output = tmp_path_factory.mktemp("trained") / "out"
    loads = ("log_expert_loads=100", "save_steps=1", "save_total_limit=1")
    assert run_here(output, *small, *EVERYTHING, *loads, f"model={model}", "merge_adapter=true") == 0
    return output


def test_the_adapter_in_peft_and_the_merged_model_in_transformers_have_equal_logits(
    model: Path, trained: Path, tmp_path: Path
) -> None:
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    plain = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, trained / "adapter"))
    assert not torch.allclose(plain, adapted, atol=1e-4), "the adapter must matter"
    (checkpoint,) = trained.glob("checkpoint-*")
    for number, source in enumerate((trained / "adapter", checkpoint)):
        output = str(tmp_path / f"merged-{number}")
        assert main(["merge", "--base-model", str(model), str(source), "--output", output]) == 0
        merged = transformers.AutoModelForCausalLM.from_pretrained(output)
        torch.testing.assert_close(logits(merged), adapted, rtol=1e-4, atol=1e-5)
    in_run, in_command = (load_file(d / "model.safetensors") for d in (trained / "model", tmp_path / "merged-0"))
    assert in_run.keys() == in_command.keys()
    assert all(torch.equal(in_run[name], in_command[name]) for name in in_run)


@pytest.fixture
def fused(model: Path, tmp_path: Path) -> Path:
    """The model with one tensor of all experts of a layer, as transformers 5 has it in memory."""
    directory = Path(shutil.copytree(model, tmp_path / "fused"))
    for file in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        file.unlink()
    state = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert "model.layers.1.mlp.experts.gate_up_proj" in state
    save_file({name: tensor.clone() for name, tensor in state.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.slow
def test_a_file_with_one_tensor_of_all_experts_trains_the_same_bits(
    fused: Path, trained: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path,
    digests: Callable[[Path], dict[str, str]],
) -> None:  # fmt: skip
    output = tmp_path / "out"
    assert run_here(output, *small, *EVERYTHING, f"model={fused}", "merge_adapter=true") == 0
    assert digests(output / "adapter") == digests(trained / "adapter")
    names = load_file(output / "model" / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert not any(name.endswith("gate_up_proj") for name in names)
    assert main(["merge", "--base-model", str(fused), str(output / "adapter"), "--output", str(tmp_path / "m")]) == 0
    assert digests(tmp_path / "m") == digests(output / "model")


LAYER = "base_model.model.model.layers.1.mlp.experts"


def exchanged(adapter: Path, *, experts: int = 4) -> None:
    """Rewrite an adapter of all experts as PEFT up to 0.18 wrote it: A reads what the weight writes."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for module in (LAYER, f"{LAYER}.base_layer"):
        a, b = (tensors[f"{module}.lora_{side}.weight"] for side in "AB")
        a_eri, b_ore = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts)
        tensors[f"{module}.lora_A.weight"] = b_ore.permute(2, 1, 0).reshape(-1, b.shape[0]).contiguous()
        tensors[f"{module}.lora_B.weight"] = a_eri.permute(2, 1, 0).reshape(a.shape[1], -1).contiguous()
    save_file(tensors, file)


@pytest.fixture(scope="module")
def of_peft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """An adapter of PEFT on one tensor of all experts, with another rank for one of them; and its logits."""
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={r"experts\.gate_up_proj": 4}, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(base, config).eval()
    torch.manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    directory = tmp_path_factory.mktemp("peft") / "adapter"
    adapted.save_pretrained(directory)
    return directory, logits(adapted)


@pytest.mark.parametrize("old", [False, True], ids=["peft 0.19", "peft 0.18"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "fused"])
def test_an_adapter_of_one_tensor_of_all_experts_is_merged(
    model: Path, of_peft: tuple[Path, Tensor], tmp_path: Path, request: pytest.FixtureRequest, together: bool, old: bool
) -> None:
    adapter, expected = Path(shutil.copytree(of_peft[0], tmp_path / "adapter")), of_peft[1]
    if old:
        exchanged(adapter)
    base = request.getfixturevalue("fused") if together else model
    assert main(["merge", "--base-model", str(base), str(adapter), "--output", str(tmp_path / "merged")]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_of_one_tensor_of_all_experts_is_trained_on(
    model: Path, of_peft: tuple[Path, Tensor], small: Sequence[str], run_here: RunHere, tmp_path: Path
) -> None:
    """If its ranks and scales are those of a run; each expert goes on with the adapter that it had."""
    words = [*small, f"model={model}", "lora_target_modules=[q_proj,experts]", "lora_rank=2", "lora_alpha=6"]
    words += ["lora_dropout=0", "adapter_init_mode=trainable", "max_steps=1", "learning_rate=0"]
    with pytest.raises(UserError, match=r"experts\.\d\.down_proj has another rank than the adapter's other modules"):
        run_here(tmp_path / "uneven", *words, f"adapter_path={of_peft[0]}")
    even = Path(shutil.copytree(of_peft[0], tmp_path / "even"))
    tensors = load_file(even / "adapter_model.safetensors")
    for side in "AB":
        name = f"{LAYER}.base_layer.lora_{side}.weight"
        tensors[name] = halved(tensors[name], side).contiguous()
    save_file(tensors, even / "adapter_model.safetensors")
    config = json.loads((even / "adapter_config.json").read_text())
    (even / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {}}))
    assert run_here(tmp_path / "out", *words, f"adapter_path={even}") == 0
    merged = []
    for number, adapter in enumerate((even, tmp_path / "out" / "adapter")):
        target = tmp_path / f"merged-{number}"
        assert main(["merge", "--base-model", str(model), str(adapter), "--output", str(target)]) == 0
        merged.append(load_file(target / "model.safetensors"))
    assert merged[0].keys() == merged[1].keys()
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


def halved(tensor: Tensor, side: str, *, experts: int = 4) -> Tensor:
    """A factor of all experts with the first half of its rank."""
    if side == "A":
        whole = tensor.view(experts, -1, tensor.shape[1])
        return whole[:, : whole.shape[1] // 2].reshape(-1, tensor.shape[1])
    whole = tensor.view(tensor.shape[0], -1, experts)
    return whole[:, : whole.shape[1] // 2].reshape(tensor.shape[0], -1)


def test_an_adapter_of_all_experts_that_fits_no_base_or_both_layouts_is_refused(
    model: Path, of_peft: tuple[Path, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = Path(shutil.copytree(of_peft[0], tmp_path / "adapter"))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{LAYER}.lora_A.weight"] = torch.zeros(8, 31)
    save_file(tensors, file)
    words = ["merge", "--base-model", str(model), str(adapter), "--output", str(tmp_path / "merged")]
    assert main(words) == 2
    assert f"{LAYER}: A [8, 31] and B [32, 8] fit no tensor of all experts" in capsys.readouterr().err


@pytest.mark.slow
def test_training_goes_on_from_an_adapter_of_experts(
    model: Path, trained: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path
) -> None:
    words = [f"model={model}", f"adapter_path={trained / 'adapter'}", "adapter_init_mode=trainable"]
    with pytest.raises(UserError) as caught:
        run_here(tmp_path / "out", *small, *words)
    assert "lora_expert_rank is 4, the adapter's is 2" in str(caught.value)
    assert "train_router: only the adapter trains model.layers.1.mlp.gate.weight" in str(caught.value)
    assert run_here(tmp_path / "out", *small, *EVERYTHING, *words, "max_steps=1", "learning_rate=0") == 0
    before, after = (load_file(d / "adapter" / "adapter_model.safetensors") for d in (trained, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run_here(tmp_path / "merged", *small, *words[:2], "adapter_init_mode=merge", "max_steps=1") == 0


def notes(installed: Registry, *overrides: str) -> list[str]:
    config = load_run_config([*QUICK, "model=qwen3-moe", "lora=true", *overrides], registry=installed)
    device = torch.device("cpu")
    recipe = resolve_recipe(config, installed, device)
    return expert_notes(config, resolve_model(config, installed), recipe, device)


def test_a_run_says_how_a_recipe_multiplies_experts(installed: Registry) -> None:
    assert len(notes(installed, "recipe=bf16")) == 1
    note, _ = notes(installed, "recipe=fp8-hybrid")
    assert note.startswith("EMULATED FP8 products of experts (cpu has none)")
    note, _ = notes(installed, "recipe=nvfp4")
    assert note.startswith("EMULATED NVFP4 (there is no product of experts")
    assert notes(installed, "recipe=fp8-hybrid", "model=qwen3") == []


def test_a_run_says_where_each_expert_multiplies_all_rows(installed: Registry) -> None:
    config = load_run_config([*QUICK, "model=qwen3-moe"], registry=installed)
    model = resolve_model(config, installed).model
    plain = {("grouped_product", "float32"): "reference", ("swiglu", "bfloat16"): "reference"}
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    (note,) = product_notes(plain, model, cuda)
    assert note.startswith("experts: no kernel takes all their products in float32 here, so that each of ")
    assert product_notes(plain, model, cpu) == []
    assert product_notes({("grouped_product", "bfloat16"): "triton"}, model, cuda) == []


def test_a_run_says_that_a_recipe_leaves_experts_as_they_are(installed: Registry) -> None:
    """A third party's recipe need not know of experts."""
    config = load_run_config([*QUICK, "model=qwen3-moe"], registry=installed)
    recipe = type("Other", (Recipe,), {"name": "other"})()
    (note,) = expert_notes(config, resolve_model(config, installed), recipe, torch.device("cpu"))
    assert note.startswith("recipe bf16: experts (mlp.experts.{e}.gate_proj, mlp.experts.{e}.up_proj, ")
    assert note.endswith("are multiplied in float32.")


def test_a_run_says_which_adapters_of_experts_peft_does_not_load(installed: Registry) -> None:
    _, note = notes(installed, "recipe=bf16", "lora_target_modules=[q_proj,gate_proj]")
    assert "mlp.experts.{e}.gate_proj without mlp.experts.{e}.up_proj" in note
    assert len(notes(installed, "recipe=bf16", "lora_target_modules=[up_proj,gate_proj]")) == 1
    assert len(notes(installed, "recipe=bf16", "lora_target_modules=[q_proj,down_proj]")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["lora_expert_rank=4", "train_router=true"],
            "LoRA: adapters on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (rank 16) and gate_proj, "
            "up_proj, down_proj (rank 4) of 8 experts in each of 2 layers; routers are trained as whole matrices.",
        ),
        (
            ["lora_target_modules=[attention]"],
            "LoRA: adapters on q_proj, k_proj, v_proj, o_proj (rank 16); experts have none; routers are frozen.",
        ),
        (
            ["lora_target_modules=[experts]"],
            "LoRA: adapters on gate_proj, up_proj, down_proj (rank 16) of 8 experts in each of 2 layers; routers are "
            "frozen.",
        ),
    ],
)
def test_a_run_says_what_has_adapters(installed: Registry, words: list[str], said: str) -> None:
    assert notes(installed, "recipe=bf16", *words)[0] == said
    assert any("vLLM refuses" in note for note in notes(installed, "recipe=bf16", *words)) == (
        "train_router" in str(words)
    )


@pytest.mark.parametrize("word", ["lora_expert_rank=4", "train_router=true", "lora_target_modules=[experts]"])
def test_keys_of_experts_are_refused_where_there_are_none(installed: Registry, word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key}.*experts"):
        notes(installed, "recipe=bf16", "model=qwen3", word)


@pytest.mark.slow
def test_a_router_that_is_not_finite_is_named(
    model: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    name = "model.layers.1.mlp.gate.weight"
    file = directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    for words in ((), ("validation_datasets=[]", "validation_split_ratio=0")):
        with pytest.raises(DivergedError) as caught:
            run_here(tmp_path / f"out-{len(words)}", *small, *words, f"model={directory}")
        assert f"the model's {name} has values that are not finite. Fix: " in str(caught.value)
    assert "the router of layer 1 is the first with probabilities that are not finite" in str(caught.value)


def test_a_run_records_how_it_routes(trained: Path) -> None:
    metrics = trained / "metrics.jsonl"
    (start,) = read_metrics(metrics, event="run_start")
    # Two of four experts: their weights, and adapters of rank 2.
    assert start["parameters"] - start["active_parameters"] == 2 * 3 * (32 * 16 + 2 * (32 + 16))
    steps, routing, loads = (read_metrics(metrics, event=e) for e in ("step_end", "routing_stats", "expert_loads"))
    assert [r["step"] for r in routing] == [r["step"] for r in loads] == [1, 2], "a checkpoint has the loads until then"
    for step, figures, record in zip(steps, routing, loads, strict=True):
        assert (record["layers"], record["steps"]) == ([1], 1), "layer 0 is dense"
        (tokens,) = record["tokens"]
        assert (len(tokens), sum(tokens)) == (4, 2 * step["tokens"]), "two experts a token, and no padding"
        assert (
            figures["moe_load_imbalance"]
            == figures["moe_worst_imbalance"]
            == pytest.approx(4 * max(tokens) / sum(tokens))
        )
        assert (figures["moe_worst_layer"], figures["moe_experts"], figures["moe_experts_per_token"]) == (1, 4, 2)
        assert 1.9 < figures["moe_aux_loss_raw"] < 4
        assert figures["moe_z_loss_raw"] > 0
        assert figures["moe_aux_loss"] is figures["moe_z_loss"] is None, "no coefficient is set"
    assert "Expert load" in (trained / "report.html").read_text()


@pytest.mark.slow
def test_a_router_trained_on_a_quantised_base_is_in_adapter_and_merged_model(
    model: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path
) -> None:
    words = [*EVERYTHING, "qlora_fp8=true", "qlora_block_size=32", "merge_adapter=true", f"model={model}"]
    assert run_here(tmp_path / "out", *small, *words) == 0
    name = "model.layers.1.mlp.gate.weight"
    trained = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")[f"base_model.model.{name}"]
    merged = load_file(tmp_path / "out" / "model" / "model.safetensors")[name]
    assert torch.equal(trained, merged)
    before = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()[name]
    assert not torch.equal(trained, before)
