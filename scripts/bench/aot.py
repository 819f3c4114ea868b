"""What a TPU's compiler makes of the 671B step: a table of topologies, schedules, slices, lengths, and of V3.2 and V4.

    python scripts/bench/aot.py [--only=ROW,ROW] [--out=FOLDER] [--list]

A row is one `python -m maxds.compile` in a process of its own, one after the other: about 15 CPU-minutes and 10 GiB of
host memory each. Its figures are left in FOLDER/ROW.json and shown again, not compiled, by the next call: delete what
is to be made anew. Compile time is in CPU-seconds, everything included, from process start to exit.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FITS, DOES_NOT_FIT = 0, 8  # exit codes of maxds.compile
GIB = 2**30

NO_MTP = "loss.mtp=0 loss.later=[] model.num_nextn_predict_layers=0"
ALONE = f"{NO_MTP} optimizer.accumulate_steps=1"  # one part, as the figures of others are
SPLIT = "mesh.context_parallel=true"
HALF_GRADIENTS = "precision.grads=bfloat16 precision.reduce=bfloat16"
SMALL = f"{ALONE} precision.params=bfloat16 {HALF_GRADIENTS}"  # 8 bytes a parameter
AWAY = "optimizer.state_memory=host"
ALL_AWAY = f"{AWAY} optimizer.params_memory=host"
KEEP = "schedule.keep=[dispatch_input]"  # where there is room: attention's output projection is not computed again
V5P = (  # as in scripts/launch/v5p-8x8x8.yaml
    "data.global_batch=16384 optimizer.accumulate_steps=4 schedule.offload=[attention_input,dispatch_input]"
)


def growing(devices: int, sequences: int = 8) -> str:
    """One part of this many sequences a device."""
    return f"{ALONE} data.global_batch={devices * sequences}"


ROWS = {
    # name: topology, slices, overrides
    "tpu7x": ("tpu7x:4x8x8", 1, ""),
    "tpu7x-plain": ("tpu7x:4x8x8", 1, "schedule.kind=plain"),
    "tpu7x-fp8": ("tpu7x:4x8x8", 1, "precision.matmul=fp8"),
    "tpu7x-fp8-experts": ("tpu7x:4x8x8", 1, "precision.matmul=fp8_experts"),
    "tpu7x-half": ("tpu7x:4x4x8", 1, "optimizer.accumulate_steps=10"),
    "tpu7x-256": ("tpu7x:4x4x8", 1, growing(256)),
    "v5p": ("v5p:8x8x8", 1, V5P),
    "v5p-plain": ("v5p:8x8x8", 1, "schedule.kind=plain"),
    "v6e": ("v6e:16x16", 1, f"{ALONE} {HALF_GRADIENTS} {ALL_AWAY} mesh.expert=16 data.global_batch=512"),
    "slices-2": ("tpu7x:4x8x8", 2, "mesh.data=2 data.global_batch=30720"),
    "chips-64": ("tpu7x:4x4x4", 1, f"{SMALL} {AWAY} data.global_batch=1024"),
    "chips-64-float32": ("tpu7x:4x4x4", 1, f"{ALL_AWAY} data.global_batch=3840"),
    "chips-512": ("tpu7x:4x8x16", 1, f"{growing(1024)} {KEEP}"),
    "chips-1024": ("tpu7x:4x16x16", 1, f"{growing(2048)} {KEEP}"),
    "chips-4096": ("tpu7x:4x32x32", 1, f"{growing(8192)} mesh.data=32"),
    "chips-4096-slices": ("tpu7x:4x16x16", 4, f"{growing(8192)} mesh.data=4"),
    "sequence-8k": ("tpu7x:4x8x8", 1, f"{growing(512, 4)} {KEEP} data.sequence_length=8192"),
    "sequence-32k": ("tpu7x:4x8x8", 1, f"{ALONE} {SPLIT} data.global_batch=512 data.sequence_length=32768"),
    "sequence-128k": ("tpu7x:4x8x8", 1, f"{ALONE} {SPLIT} data.global_batch=128 data.sequence_length=131072"),
    "v3.2": ("tpu7x:4x8x8", 1, ""),
    "v3.2-256": ("tpu7x:4x4x8", 1, "data.sequence_length=4096 data.global_batch=16384 optimizer.accumulate_steps=16"),
    "v4": ("tpu7x:4x4x8", 1, ""),
    "v4-pro": ("tpu7x:8x8x16", 1, ""),
}
CONFIGS = {
    "v3.2": "deepseek3.2-671b",
    "v3.2-256": "deepseek3.2-671b",
    "v4": "deepseek4-284b",
    "v4-pro": "deepseek4-1.6t",
}  # of the others: deepseek3-671b
COLUMNS = (
    "row",
    "topology",
    "mesh",
    "peak GiB",
    "step s",
    "tokens/s a device",
    "MFU",
    "exposed",
    "host, SparseCore",
    "FLOPs executed/model",
    "compile CPU-s",
)


def measured(command: list[str], environment: dict[str, str] | None = None) -> tuple[int, dict]:
    """Runs a command, with more in its environment; returns its exit code, and what it spent."""
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | (environment or {}), stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    spent = {"cpu_seconds": usage.ru_utime + usage.ru_stime, "host_bytes": usage.ru_maxrss * 1024}
    return os.waitstatus_to_exitcode(status), spent


def compiled(name: str, file: Path) -> dict:
    """Figures of a row, from its file or by compiling it."""
    if not file.exists():
        topology, slices, overrides = ROWS[name]
        config = f"configs/{CONFIGS.get(name, 'deepseek3-671b')}.yaml"
        command = [sys.executable, "-m", "maxds.compile", config, f"--topology={topology}", f"--slices={slices}"]
        partial = file.with_suffix(".partial")
        code, spent = measured([*command, f"--json={partial}", *overrides.split()])
        if code not in (FITS, DOES_NOT_FIT):
            sys.exit(f"{name}: maxds.compile failed, as it says above")
        file.write_text(json.dumps(json.loads(partial.read_text()) | {"compile": spent}, indent=1) + "\n")
        partial.unlink()
    return json.loads(file.read_text())


def row(name: str, found: dict) -> list[str]:
    """The cells of a line of the table."""
    mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items() if size > 1)
    topology = found["topology"] + (f" x {found['slices']}" if found["slices"] > 1 else "")
    spent = f"{found['compile']['cpu_seconds']:,.0f}"
    fit = found["fit"]
    if not fit["fits"]:
        needs = f"does not fit: {fit['total'] / GIB:,.1f} of {fit['limit'] / GIB:,.1f}"
        return [name, topology, mesh, needs, *[""] * 6, spent]
    cost = found["cost"]
    step = cost["step_seconds"]
    return [
        name,
        topology,
        mesh,
        f"{fit['peak'] / GIB:.1f} of {fit['limit'] / GIB:.1f}",
        f"{step:.2f}",
        f"{cost['tokens_per_second_per_device']:,.0f}",
        f"{cost['mfu']:.1%}",
        f"{cost['exposed_communication_fraction']:.1%}",
        f"{cost['stalled_seconds'] / step:.1%}",
        f"{cost['executed_flops'] / cost['model_flops']:.3f}",
        spent,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help="rows to compile, by name")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "aot", help="where figures are left")
    parser.add_argument("--list", action="store_true", help="print the rows, and compile nothing")
    args = parser.parse_args()
    if args.list:
        for name, (topology, slices, overrides) in ROWS.items():
            print(f"{name:17} {topology} x {slices}  {overrides}")
        return
    unknown = set(names := args.only.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    print(*COLUMNS, sep=" | ")
    print(*["---"] * len(COLUMNS), sep=" | ")
    for name in names:
        print(*row(name, compiled(name, args.out / f"{name}.json")), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
