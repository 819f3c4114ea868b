"""Tokens a second on the CPU: maxds beside transformers' DeepSeek-V3, same shape, batch, dtype, optimizer and threads.

    python scripts/bench/transformers_cpu.py [--shape quickstart|larger] [--rounds N]

Both train in float32 with AdamW and clipping, on the same random tokens and one device (two threads).
First the ways that transformers offers to run its experts and attention compete, then the fastest
of them competes with maxds. Steps alternate, so that what else runs on the machine slows all alike.
Model FLOPs (`maxds/flops.py`) are also shown as a share of those of one large matmul, measured before and after.
"""

import argparse
import json
import time
from pathlib import Path

import alternate

HERE = Path(__file__).parent
QUICKSTART = HERE.parent.parent / "configs" / "quickstart.yaml"
COMMON = (
    "model.num_nextn_predict_layers=0 loss.mtp=0 loss.balance=0 precision.compute=float32 "
    "mesh.data=1 mesh.fsdp=1 mesh.expert=1 mesh.cpu_devices=1"
).split()
LARGER = (
    "model.hidden_size=512 model.intermediate_size=1408 model.moe_intermediate_size=256 model.num_attention_heads=8 "
    "model.q_lora_rank=192 model.kv_lora_rank=128 model.qk_nope_head_dim=64 model.qk_rope_head_dim=32 "
    "model.v_head_dim=64 model.n_routed_experts=32 model.num_experts_per_tok=6 model.vocab_size=8192 "
    "data.sequence_length=512 data.global_batch=4"
).split()
SHAPES = {"quickstart": [], "larger": LARGER}
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


def described(overrides: list[str]) -> dict:
    """The model and batch of a config, as transformers reads them."""
    from maxds import config, flops, loader

    c, _ = loader.load(config.Config, QUICKSTART, overrides)
    known = loader.plain(c.model)
    for ours in ("num_nextn_predict_layers", "rope_scaling", "rope_theta", "scoring_func", "topk_method"):
        known.pop(ours)
    batch, length = c.data.global_batch, c.data.sequence_length
    step_flops = batch * length * flops.per_token(c.model, length)["total"]
    return {"model": known, "batch": batch, "length": length, "flops": step_flops}


def matmul_rate(size: int = 2048) -> float:
    """FLOP/s of a float32 matmul on all cores: the best of ten."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    x, seconds = jnp.ones((size, size)), []
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
    args = parser.parse_args()
    overrides = COMMON + SHAPES[args.shape]
    shape = described(overrides)
    rate = matmul_rate()
    ways = {f"transformers {' '.join(w[:2])}{' compiled' * w[2]}": w for w in TORCH}
    found = alternate.medians({name: torch_worker(shape, *way) for name, way in ways.items()}, max(args.rounds // 2, 2))
    best = min(found, key=found.get)
    rate = max(rate, matmul_rate())
    show(found, shape, best, rate)
    workers = {best: torch_worker(shape, *ways[best])}
    workers |= {name: maxds_worker(overrides + extra) for name, extra in MAXDS.items()}
    show(alternate.medians(workers, args.rounds), shape, best, max(rate, matmul_rate()))


if __name__ == "__main__":
    main()
