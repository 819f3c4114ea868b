"""The 671B step beside MaxText's default schedule of it: compiled for the same devices, read by the same predictor.

    python scripts/bench/peer.py --peer=FOLDER --python=PATH --recipe=FILE [--batches=8,7,6] [--out=FOLDER] [--small]

FOLDER is a checkout of MaxText, PATH an interpreter that has what it needs, with our JAX and libtpu, and FILE the
`run_recipe.sh` of Google's tpu-recipes for this model on these chips: the peer's arguments and its compiler's flags
are read from there. Of `--batches`, sequences of a device, the first that fits is compared; ours is the row `tpu7x-256`
of `aot.py`. Each compiles in a process of its own: 16 minutes of CPU and 7 GiB of host memory. What is found is
left in the folder of `--out`, and read by the next call. `--small` takes narrow layers, to try this out.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import aot
import numpy as np
from jax.sharding import Mesh

from maxds import flops, loader
from maxds.aot import cost, fit, hlo, report, timeline, topology
from maxds.aot.hlo import Computation, Instruction
from maxds.aot.network import Network
from maxds.config import Config

OURS = "tpu7x-256"  # of the rows of aot.py
SMALL = (
    "model.num_hidden_layers=5 model.hidden_size=512 model.num_attention_heads=8 model.intermediate_size=1024 "
    "model.moe_intermediate_size=256 model.q_lora_rank=256 model.vocab_size=4096"
)
PEER_SMALL = (
    "override_model_config=true base_num_decoder_layers=5 base_emb_dim=512 base_num_query_heads=8 "
    "base_num_kv_heads=8 base_mlp_dim=1024 base_moe_mlp_dim=256 q_lora_rank=256 vocab_size=4096"
)
# Of the recipe: experts are chosen, not drawn at random; there is no other process, and a key has a new name.
CHANGES = (
    "use_random_routing=False compile_topology=tpu7x-256 compile_topology_num_slices=1 run_name=peer "
    "skip_jax_distributed_system=true"
)
RENAMED = {"fsdp_shard_on_exp": "shard_exp_on_fsdp"}


class Costs(cost.Costs):
    """Of the peer's program. What its kernels say that they cost is set by the recipe, to steer the compiler."""

    def of(self, computation: Computation, i: Instruction) -> cost.Cost | None:
        """As of ours; grouped matmuls at peak, and reading everything once."""
        found = super().of(computation, i)
        if found and found.basis == "cost estimate" and "gmm" in i.op_name:
            moved = self.hbm_bytes(computation, i)
            return cost.Cost(max(found.flops / self.peak, moved / self.chip.hbm), "grouped matmul", found.flops, moved)
        return found

    def flops(self, computation: Computation, i: Instruction) -> float:
        """As of ours; of attention, those of the causal half."""
        if i.opcode == "custom-call" and "splash" in i.op_name:
            return causal_flops(computation, i)
        return super().flops(computation, i)


def causal_flops(computation: Computation, i: Instruction) -> float:
    """Of attention, or of its gradients, from queries, keys and values [… head, position, size]."""
    arrays = [a for name in i.operands for a in computation.by_name[name].arrays]
    q, _, v = [a.dims for a in arrays if a.dtype == "bf16"][:3]
    products = q[-1] + v[-1] if "_fwd_" in i.op_name else 3 * q[-1] + 2 * v[-1]
    return float(math.prod(q[:-1]) * q[-2] * products)  # two for each multiplication, in half of the square


def settings(recipe: str) -> tuple[str, dict[str, str]]:
    """(flags of the compiler, the peer's arguments) of a recipe, which is a shell script that assigns both."""
    flags, arguments = (
        recipe.partition(f'{name}="')[2].partition('"')[0].replace("\\\n", " ").split()
        for name in ("XLA_FLAGS", "MAXTEXT_ARGS")
    )
    pairs = dict(argument.split("=", 1) for argument in arguments if "$" not in argument)
    return " ".join(flags), {RENAMED.get(name, name): value for name, value in pairs.items()}


def compiled(folder: Path, command: list[str], environment: dict[str, str]) -> dict:
    """What the peer leaves in a folder, from there or by compiling."""
    file, partial = folder / "program.json", folder / "partial.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _, spent = aot.measured(command, environment)
        if not partial.exists():
            sys.exit(f"{folder.name}: the peer failed, as it says above")
        file.write_text(json.dumps(json.loads(partial.read_text()) | {"compile": spent}) + "\n")
        partial.unlink()
    return json.loads(file.read_text())


def examined(folder: Path, found: dict, config: Config) -> dict:
    """Figures of the peer's program, as `maxds.compile` gives them of ours."""
    name = aot.ROWS[OURS][0]
    places = {(*d.coords, d.core_on_chip): d for d in topology.devices(name)}
    devices = np.array([places[tuple(place)] for place in found["devices"]])
    mesh = Mesh(devices.reshape(tuple(found["mesh"].values())), tuple(found["mesh"]))
    kind, chip = devices[0].device_kind, topology.chip(devices[0])
    target = report.Target(config, found["mesh"], name, 1, kind, chip, flops.peak(kind) or 0.0, {})
    about = report.about(target) | {"jax": found["jax"], "compile": found["compile"]}
    if "refused" in found:
        refused = fit.of_error(found["refused"], ())
        if refused is None:
            sys.exit(found["refused"])
        return about | {"fit": report.fit(refused)}
    module = hlo.parse((folder / "program.hlo").read_text())
    network = Network(mesh, chip, module.partitions)
    walked = timeline.walk(module, Costs(module, chip, target.peak), network.route)
    fits = fit.of_executable(SimpleNamespace(**found["memory"]), chip.hbm_bytes)
    return about | {"fit": report.fit(fits, module), "cost": report.cost(target, module, walked, network)}


def theirs(args: argparse.Namespace, batch: int) -> dict:
    """The peer's figures at so many sequences a device."""
    flags, arguments = settings(args.recipe.read_text())
    folder = args.out / f"peer{'-small' * args.small}-{batch}"
    changes = f"{CHANGES} {PEER_SMALL * args.small} per_device_batch_size={batch} base_output_directory={folder}"
    arguments |= dict(change.split("=", 1) for change in changes.split())
    source = args.peer.resolve() / "src"
    worker = [args.python, str(Path(__file__).with_name("peer_worker.py")), str(folder)]
    command = [*worker, str(source / "maxtext/configs/base.yml"), *(f"{k}={v}" for k, v in arguments.items())]
    found = compiled(folder, command, {"PYTHONPATH": str(source), "LIBTPU_INIT_ARGS": flags})
    overrides = f"{aot.ALONE} data.sequence_length={arguments['max_target_length']} {SMALL * args.small}".split()
    path = aot.ROOT / "configs" / "deepseek3-671b.yaml"
    config, _ = loader.load(Config, str(path), [*overrides, f"data.global_batch={batch * len(found['devices'])}"])
    figures = examined(folder, found, config)
    (args.out / f"{folder.name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of MaxText")
    parser.add_argument("--python", required=True, help="an interpreter that has what it needs")
    parser.add_argument("--recipe", type=Path, required=True, help="run_recipe.sh of the model on these chips")
    parser.add_argument("--batches", default="8,7,6", help="sequences a device of the peer, from the most")
    parser.add_argument("--out", type=Path, default=aot.ROOT / "runs" / "aot", help="where figures are left")
    parser.add_argument("--small", action="store_true", help="few and narrow layers, to try this out")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    topology.prepare()
    print(*aot.COLUMNS, sep=" | ")
    print(*["---"] * len(aot.COLUMNS), sep=" | ")
    for batch in args.batches.split(","):
        peer = theirs(args, int(batch))
        print(*aot.row(f"MaxText, {batch} sequences a device", peer), sep=" | ", flush=True)
        if peer["fit"]["fits"]:
            break
    name = OURS + "-small" * args.small
    topology_name, slices, overrides = aot.ROWS[OURS]
    aot.ROWS[name] = topology_name, slices, f"{overrides} {SMALL * args.small}"
    maxds = aot.compiled(name, args.out / f"{name}.json")
    print(*aot.row("maxds, 8 sequences a device", maxds), sep=" | ", flush=True)
    for found in (maxds, peer):
        if not found["fit"]["fits"]:
            sys.exit("one does not fit, and there is nothing to compare")
    faster = maxds["cost"]["tokens_per_second_per_device"] / peer["cost"]["tokens_per_second_per_device"]
    spent = maxds["compile"]["cpu_seconds"] / peer["compile"]["cpu_seconds"]
    print(f"\ntokens/s of maxds to the peer's: {faster:.2f}; CPU-seconds of compiling: {spent:.2f}")
    for missing in peer["cost"]["not_estimated"]:
        print(f"of the peer counted as nothing: {missing['times']:,.0f} x {missing['what']}")


if __name__ == "__main__":
    main()
