"""Write docs/plugins.md from the plugins' metadata. With --check nothing is written: exit 1 if it is not current."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from packaging.specifiers import SpecifierSet  # noqa: E402

from surogate_core import API_VERSION  # noqa: E402
from surogate_core.plugins.contract import UNSTATED  # noqa: E402
from surogate_core.plugins.static import view_files  # noqa: E402

FILE = ROOT / "docs" / "plugins.md"
CORE = re.compile(r"surogate-core(?:\[\w+\])?([>=]=.+)")
"""A requirement of the core, with its versions."""

INTRODUCTION = """\
# Plugins

<!-- Made by scripts/make_plugins_page.py from the metadata of plugins/; change those. -->

| command | does |
| --- | --- |
| `surogate plugins list` | what is installed, what it offers, and why it would not be loaded |
| `surogate plugins show NAME` | one plugin in full |
| `surogate plugins new NAME --kind KIND` | write a package that installs, with tests, README and CI file |
| `surogate plugins check [NAME …]` | run the conformance kit on one plugin, or on all; exit code 0 or 1 |
| `surogate plugins check --matrix` | try which installed plugins can be combined; exit code 0 or 1 |
| `surogate plugins lock` | write the digests of all installed files to `surogate.lock` |
| `surogate plugins verify` | compare the installed files with the lock; exit code 0, 1 (different) or 2 (no lock) |
| `surogate plugins sbom` | print a CycloneDX 1.6 bill of materials of the installed set, with the hash of every file |

Only `check` imports a plugin. [config.md](config.md#which-plugins-may-be-imported) describes the import policies,
[security.md](security.md) what they protect against.

Plugins start fast: with 100 more plugins than this repository has, `surogate --help` takes 0.14 s, `surogate plugins
list` 0.46 s and `surogate --cfg job` 1.03 s; without the 100 they take 0.11, 0.29 and 0.78 s (medians on a machine
with two cores, `python benchmarks/plugin_cold_start.py`). This holds for plugins that import torch only when they are
used; `--help` imports no plugin.

## The hook API

The contract of [hooks.md](hooks.md) has a version, `surogate_core.API_VERSION`. The version increases when a hook
changes in a way that breaks existing plugins. A plugin states the versions that it supports in the module that its
entry point names, as a literal version specifier:

```python
SUROGATE_API = ">=2,<3"
```

Surogate reads it from the source. It does not import a plugin that does not support this version; `surogate plugins
list`, or a run that selects the plugin, gives the reason. A plugin that states nothing counts as written for
`{unstated}`. Version 2 is the present one: plugins for version 1 are refused. From version 3 on, a core serves its own
version and the one before. [public-surface.md](public-surface.md) lists what plugins may import, and says what counts
as an addition and how a name is dropped.

Two plugins that offer one name, or one config option, do not stop runs that use another: `surogate plugins list` and
`surogate doctor` show it, and a run that asks for the name is refused. Kernel packs are used by every run, so two packs
with one name, or with a kernel of one op, name and priority, stop it.

## The conformance kit

`surogate-testing` has the checks that each kind of plugin must pass. `surogate plugins check NAME` runs them on an
installed plugin:

```text
optimizer-adamw conforms: 15 checks hold, 0 do not
```

Each check is printed when it ends, with its time: it holds, is FAILED with the fault, or is skipped with the reason.
On a terminal its name is there while it runs. `--check TEXT` runs the checks with this text in their name: `surogate
plugins check model-acme --check generates`. If no check has it, the message has the nearest names. All checks of a
family take minutes, so while you work on one, run the checks that concern your change.

A failed check names the broken contract and, if the plugin's code raised an error, the file and line. `--verbose`
adds the traceback. Every check has a time limit of ten minutes. Checks of monitors and launchers run in a child
process with a limit of one minute, so a plugin that ends the process, or hangs, fails only its own check.

- every plugin: its requirements are met; its import and its hooks are quick, print nothing
  and start no thread; its bundles can be listed without importing it; options are frozen and have defaults.
- `model`: presets build, and missing sizes are named; `hf_model_types` has the `model_type` of each preset, and
  `architecture` is the class that transformers loads; logits and every gradient equal transformers' class to 1e-5 in
  fp32, if that class exists, on documents longer than its window, and so do the logits where a key of the
  `config.json` is left out or null; transformers' configuration reads each preset; what it says to export formats
  is a mapping or a refusal; an export is read back with
  the same bits and loads in transformers; other heads are read from their `config.json` and trained beside adapters.
  Beside its mixers a block computes each row by itself, with other neighbours and in another order of the rows;
  packed documents have the logits that each has alone, whatever is beside them; layers of one class with other
  settings, and other values of a setting that a block declares or of a known key of the preset, give other results;
  generation has the log-probabilities of the forward, in prompts and sampled tokens, with documents longer than every
  window and than a chunk of a scan. A model directory, with the `config.json` that transformers writes if it knows
  the family, is fine-tuned with adapters, evaluated, merged, continued and exported as the commands do it, and the
  results agree. Adapters on all projections give equal logits here, exported in PEFT, and folded in by PEFT and by
  `surogate merge`; what PEFT cannot read is said. Blocks are traced, full in fp32 and with adapters in bf16,
  under every recipe that runs on a CPU, emulated or not, and every parameter has a gradient. A family with experts:
  each layer reports K times its tokens, of equal probabilities the lowest number wins, recomputing changes no bit,
  `train_router` trains the routers with the gradient of a full training, adapters of each expert add scale · B A
  to its weight, and two ranks that share out experts have one rank's logits, to the bit, and its gradients;
  with even loads, but for rounding.
- `recipe`: product and gradients have their shape, dtype, a relative error of at most 0.25 and the same bits twice;
  their magnitude is right to 3 % and to half their error; products of positive operands have errors of both signs, so
  rounding is not always downwards; zeros give zeros; the host reads no values; `plain` is true only if the product is
  plain; a packed frozen weight gives the same product; products of experts keep these bounds for uneven loads and for
  all rows on one expert, packed too; the state takes in the observed values, in place, and not in a
  skipped step; training, and a bit-equal resume. On a device without native support the checks run emulated.
- `quant`: a weight is unpacked with a relative error of at most 0.25, into workspaces of any row pitch, from as many
  bytes as stated, with the same bits twice; experts are unpacked at once as each is alone; zeros stay zeros, and
  values that are not finite do not become finite; training has the bits of training on the rounded weights, with and
  without recomputation; a bit-equal resume.
- `optimizer`: a step moves every master, moves none with a learning rate of 0, and never changes the padding between
  parameters; a step with `clip` equals a step with gradients multiplied by it; `weight_decay` pulls the weights of
  its group towards 0; the host reads no values; gradients that are not finite change nothing; the state loads into
  another optimizer bit for bit and has the stated size; bf16 masters, if supported, are rounded stochastically and
  can be replayed; training, and a bit-equal resume.
- `schedule`: a rate for every step of short and long runs, with warm-up, cool-down and final rate; no factor above 1;
  equal factors in any order of steps, and when it is built again.
- `dataset`: for the format's `examples`: ids are int32 and in the vocabulary, labels are the token itself or -100,
  something is trained, equal rows give equal documents, bad rows have a reason. A run also checks the ids and labels
  of every row.
- `monitor`: it handles every event, including figures that are not finite, in less than a second each; it returns
  None or a `Control` whose `lr_scale` is finite and not negative; it prints nothing to standard output unless its
  spec has `prints`; its state is strict JSON and is restored; it closes; if it raises, the run and the other monitors
  continue.
- `kernels`: every kernel belongs to an existing op; it equals the op's reference in float64, forward and backward, in
  each dtype and on each device of this machine that it supports, for all inputs that it takes: one row and 200,
  widths that are not multiples of 16, three dimensions, rows with gaps between them, an eps that matters; statistics
  of a row are fp32; it does not change its arguments, and its custom ops do what their schemas say; on fake tensors
  it gives the shapes, dtypes and strides of a real run; two runs give equal bits.
- `offload`: training with it, two micro-batches a step, has the bits of training without, the sums of gradients after
  each micro-step too; its options are prepared as in a run; its stores report what they hold on device, host and
  disk, and after a step no tensor of a kind that it moves is on the device; the two tensors that it allocates are
  zeros and share their memory.
- `objective`: built again it gives the same bits; one fp32 loss per token, and its gradient, 0 where the label is
  -100; a token's loss does not depend on the other tokens; training, whole and in chunks.
- `task`: equal data give equal micro-batches; a stream that loads a state goes on with the same micro-batches, after
  any step; it refuses the state of other data; every micro-batch has the shapes of the sample; every pass over the
  held-out rows is the same.
- `policy_loss`: a finite loss and gradient for each sampled token, wherever the model has moved, and none for other
  tokens; at first completions with a positive advantage become more probable; other completions in a row change
  nothing; equal terms give equal bits; each completion has a weight above 0; traced, it equals plain torch.
- `advantage`: a finite number for each completion, also where rewards are equal or missing; equal rewards give equal
  bits; the highest reward of a prompt has the largest advantage.
- `environment`: the same number and seed give the same task, of JSON values; every reward is a finite number or None,
  also for an episode without a reply; an episode gives the same rewards again.
- `export`: every option has a default and is text or a switch; a model of an unknown type is a `UserError` that names
  the type, before a tensor is read and without a file.
- `launcher`: every rank of the job runs once, two for a job of two GPUs, its exit code comes back, and an error in it
  is never exit code 0.
- `fabric`: two processes that it connects, on GPUs if there are two, exchange, gather, add and compare with the bits of
  ranks in one process, for one element and many, for parts of unequal and no length, and in replays of a CUDA graph.
  With `unequal=True`, two of them also exchange different lengths.
  With `groups=True`, four processes do the same in groups of two and of four neighbouring ranks, at different times;
  where there are only two or three GPUs, and the fabric needs some, in one group of two.

A block that shifts or averages rows without a mixer, or a setting that nothing reads, is a fault that only the kit
sees: no guard of a run can. It names the class, the layer and the line of `forward`. The preset `tiny` decides what
is tried, so give it each kind of layer, windows of at most 256 positions, and the keys that the family reads. A block
that reads the documents' borders itself is skipped there, with the reason: it trains, and generation refuses it.

The kit cannot know which tokens a format intends to train: `surogate tokenize --debug` shows them. A check that does
not apply on this machine is reported as skipped, with the reason; for example, a kernel pack for NVIDIA GPUs needs an
NVIDIA GPU. The kernel packs and recipes of this repository pass on an H200. In a plugin's own tests, a pytest plugin
makes one test of each check:

```python
# pytest -p surogate_testing.pytest_plugin
SUROGATE_PLUGIN = "optimizer-ademamix"


def test_conformance(surogate_check):
    surogate_check.run()
```

`surogate plugins new` writes this file. With the pytest plugin, tests marked `gpu` are skipped on a machine without an
NVIDIA GPU. `surogate_testing` also has what the tests of this repository's plugins share: models and micro-batches of
a few dozen numbers in an engine (`tiny`), a model family against transformers (`parity`, `family_suite`), the ops by
their definitions (`op_cases`, `attention_suite`), CUDA C++ compiled for the host (`host_cuda`), Triton's kernels in its
interpreter (`interpreter`), chat templates on a tokenizer of bytes (`chat_templates`), a tiny model and adapters on
disk (`pretrained`), and the events of a short run (`run_events`). `policy_losses.terms_of(ratio_N=…, advantages_N=…)`
makes the terms of a policy loss, for a test by hand; with `logp_N=…` it also takes log π, which is -1 otherwise.

## Combinations

`surogate plugins check --matrix` combines the installed plugins: model family × recipe × optimizer × offloader × mode
(full, adapters, pre-training; residuals kept or computed again), on a CPU, with the preset `tiny` of each family. The
design is pairwise: every pair of choices is part of a combination that either trains a step with a finite loss or is
refused by name before anything is loaded. If a pair is refused, the other pairs of its combination are tried elsewhere.
The last line counts the pairs that trained together, that are refused by name, and that are neither; with the plugins
of this repository, which a test combines, none is neither.
"""


def make() -> str:
    """The page's text."""
    lines = [INTRODUCTION.format(unstated=UNSTATED), "## Compatibility", ""]
    versions = range(1, API_VERSION + 1)
    heads = ["plugin", "version", "surogate-core", *(f"API {v}" for v in versions), "offers"]
    lines += [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for pyproject in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        if "entry-points" not in project:
            continue  # the conformance kit
        core = next(m[1] for r in project["dependencies"] if (m := CORE.fullmatch(r)))
        for module in project["entry-points"]["surogate"].values():
            package = pyproject.parent / "src" / module.partition(":")[0].partition(".")[0]
            view = view_files(package / "__init__.py", package)
            stated = SpecifierSet(view.api or UNSTATED)
            offers = ", ".join(f"{kind} `{name}`" for kind, name in view.bundles) or "options only"
            fits = ["yes" if stated.contains(str(v)) else "no" for v in versions]
            name = f"[`{project['name']}`](../plugins/{project['name']}/README.md)"
            row = [name, project["version"], f"`{core}`", *fits, offers]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or check it."""
    text = make()
    if "--check" in sys.argv[1:]:
        current = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        if not current:
            print(f"{FILE.relative_to(ROOT)} is not current; run: python scripts/make_plugins_page.py", file=sys.stderr)
        return 0 if current else 1
    FILE.write_text(text, encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
