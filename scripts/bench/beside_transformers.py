"""Tokens a second on one device: maxds beside transformers' DeepSeek-V3, same shape, batch, dtype and optimizer.

    python scripts/bench/beside_transformers.py [--shape quickstart|larger|card] [--rounds N] [key=value ...]

Both train with AdamW and clipping, on the same random tokens. First the ways that transformers offers to run its
experts and attention compete, then the fastest of them competes with maxds. Model FLOPs (`maxds/flops.py`) are also
shown as a share of those of one large matmul, measured before and after.

`quickstart` and `larger` are for a CPU: float32, two threads, and steps alternate, so that what else runs on the
machine slows all alike. `card` is for a GPU of 80 GB or more (`maxds[cuda,parity]`): bfloat16 beside weights in
float32, maxds in float8 too, and one after the other, for each fills the card; `key=value` fits the shape to another,
and a way that does not fit is told and left out.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import alternate

HERE = Path(__file__).parent
QUICKSTART = HERE.parent.parent / "configs" / "quickstart.yaml"
COMMON = ("model.num_nextn_predict_layers=0 loss.mtp=0 loss.balance=0 mesh.data=1 mesh.fsdp=1 mesh.expert=1").split()
ON_CPU = "precision.compute=float32 mesh.cpu_devices=1".split()
LARGER = (
    "model.hidden_size=512 model.intermediate_size=1408 model.moe_intermediate_size=256 model.num_attention_heads=8 "
    "model.q_lora_rank=192 model.kv_lora_rank=128 model.qk_nope_head_dim=64 model.qk_rope_head_dim=32 "
    "model.v_head_dim=64 model.n_routed_experts=32 model.num_experts_per_tok=6 model.vocab_size=8192 "
    "data.sequence_length=512 data.global_batch=4"
).split()
CARD = (  # 3.0B parameters, 48 GB with gradients and moments
    "precision.compute=bfloat16 mesh.cpu_devices=null model.hidden_size=2048 model.intermediate_size=8192 "
    "model.moe_intermediate_size=1024 model.num_hidden_layers=12 model.num_attention_heads=16 model.q_lora_rank=768 "
    "model.kv_lora_rank=512 model.qk_nope_head_dim=128 model.qk_rope_head_dim=64 model.v_head_dim=128 "
    "model.n_routed_experts=32 model.vocab_size=129280 model.max_position_embeddings=4096 "
    "data.sequence_length=4096 data.global_batch=4"
).split()
SHAPES = {"quickstart": ON_CPU, "larger": ON_CPU + LARGER, "card": CARD}
# Experts and attention, as transformers names its implementations, and whether torch.compile is applied. `batched_mm`
# is left out: it copies an expert's weights for every token, gigabytes at these shapes.
TORCH = [
    ("eager", "eager", False),
    ("eager", "sdpa", False),
    ("grouped_mm", "sdpa", False),
    ("grouped_mm", "sdpa", True),
]
MAXDS = {
    "maxds plain": ["schedule.kind=plain"],
    "maxds plain, nothing recomputed": ["schedule.kind=plain", "schedule.keep=everything"],
    "maxds batch_split": [],
}
FLOAT8 = {"maxds plain, float8": ["schedule.kind=plain", "precision.matmul=fp8"]}
Make = Callable[[], alternate.Worker]


def described(overrides: list[str]) -> dict:
    """The model and batch of a config, as transformers reads them."""
    from maxds import config, flops, loader

    c, _ = loader.load(config.Config, QUICKSTART, overrides)
    known = loader.plain(c.model)
    for ours in ("head_dim", "num_nextn_predict_layers", "rope_scaling", "rope_theta", "scoring_func", "topk_method"):
        known.pop(ours)
    batch, length = c.data.global_batch, c.data.sequence_length
    step_flops = batch * length * flops.per_token(c.model, length)["total"]
    about = {"batch": batch, "length": length, "flops": step_flops, "dtype": c.precision.compute}
    return about | {"model": known, "on_cpu": c.mesh.cpu_devices is not None}


def matmul_rate(shape: dict) -> float:
    """FLOP/s of a matmul in the dtype of the shape, on all cores of a CPU or on a GPU: the best of ten."""
    import jax

    if shape["on_cpu"]:
        jax.config.update("jax_platforms", "cpu")
    size, seconds = 2048 if shape["on_cpu"] else 16384, []
    x = jax.random.normal(jax.random.key(0), (size, size), shape["dtype"])  # ones would be faster
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(x @ x)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def torch_worker(shape: dict, experts: str, attention: str, compiled: bool) -> alternate.Worker:
    arguments = shape | {"experts": experts, "attention": attention, "compile": compiled}
    return alternate.Worker([str(HERE / "torch_worker.py"), json.dumps(arguments)])


def maxds_worker(overrides: list[str]) -> alternate.Worker:
    command = [str(HERE / "maxds_worker.py"), str(QUICKSTART), *overrides]
    return alternate.Worker(command, {"MALLOC_ARENA_MAX": "1"})  # as `scripts/train` sets it


def measured(workers: dict[str, Make], rounds: int, shape: dict) -> dict[str, tuple[float, ...]]:
    """As `alternate.medians`: on a CPU of all at once, on a GPU of one after the other, of those that get ready."""
    if shape["on_cpu"]:
        return alternate.medians({name: make() for name, make in workers.items()}, rounds)
    found = {}
    for name, make in workers.items():
        try:
            found |= alternate.medians({name: make()}, rounds)
            print(f"{name}: {found[name][0]:.3f} s a step", flush=True)
        except alternate.EndedError:
            print(f"{name}: ended before it was ready; why, is told above", flush=True)
    return found


def show(found: dict[str, tuple[float, ...]], shape: dict, reference: str, rate: float) -> None:
    tokens = shape["batch"] * shape["length"]
    for name, (wall, cpu) in found.items():
        ratio, cpu_ratio = (found[reference][i] / found[name][i] for i in range(2))
        reached = shape["flops"] / wall
        print(
            f"{name:40s} {tokens / wall:9.0f} tokens/s  x{ratio:.2f}   {cpu:6.2f} CPU-s a step  x{cpu_ratio:.2f}"
            f"   {reached / 1e9:5.0f} GFLOP/s, {reached / rate:4.0%} of a matmul's",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # a GPU's memory is for whoever takes a step
    overrides = COMMON + SHAPES[args.shape] + args.overrides
    shape = described(overrides)
    rate = matmul_rate(shape)
    ways = {f"transformers {' '.join(w[:2])}{' compiled' * w[2]}": w for w in TORCH}
    rivals = {name: functools.partial(torch_worker, shape, *way) for name, way in ways.items()}
    ours = MAXDS if shape["on_cpu"] else MAXDS | FLOAT8
    workers = {name: functools.partial(maxds_worker, overrides + extra) for name, extra in ours.items()}
    found = measured(rivals, max(args.rounds // 2, 2), shape)
    if not found:
        sys.exit("no way of transformers got ready: where memory was short, fit the shape with key=value")
    best = min(found, key=found.get)
    show(found, shape, best, max(rate, matmul_rate(shape)))
    again = {best: rivals[best]} if shape["on_cpu"] else {}
    found = {best: found[best]} | measured(again | workers, args.rounds, shape)
    show(found, shape, best, max(rate, matmul_rate(shape)))


if __name__ == "__main__":
    main()
