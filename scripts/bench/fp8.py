"""What float8 costs in loss: the quickstart in bfloat16, then with `precision.matmul=fp8`, on the same data.

    python scripts/bench/fp8.py [key=value ...]

Between the two, bfloat16 once more with another schedule, which changes nothing but rounding: by how much two runs of
500 steps differ anyway. Held out: the terms of the last evaluation. Training: means over the last 50 steps.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "steps=500 precision.compute=bfloat16 eval.every_steps=100 eval.batches=32 checkpoint.every_steps=null sample=null"
)
RUNS = {
    "bfloat16": [],
    "bfloat16, plain": ["schedule.kind=plain"],
    "float8": ["precision.matmul=fp8"],
}


def train(folder: Path, *overrides: str) -> dict[str, float]:
    """Loss terms, held out and in training."""
    command = [sys.executable, "-m", "maxds.train", "configs/quickstart.yaml", f"run_dir={folder}"]
    subprocess.run([*command, *SETTINGS.split(), *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    evals, steps = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("eval.jsonl", "metrics.jsonl")
    )
    last = [step["terms"] for step in steps[-50:]]
    terms = "main", "mtp_1"
    held_out = {f"held out {term}": evals[-1]["eval"][term] for term in terms}
    return held_out | {f"training {term}": sum(of[term] for of in last) / len(last) for term in terms}


def main(overrides: list[str]) -> None:
    reference = None
    with tempfile.TemporaryDirectory() as scratch:
        for name, own in RUNS.items():
            began = time.perf_counter()
            found = train(Path(scratch) / name, *own, *overrides)
            reference = reference or found
            shown = ", ".join(f"{term} {loss:.4f} ({loss / reference[term] - 1:+.2%})" for term, loss in found.items())
            print(f"{name}: {shown}; {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
