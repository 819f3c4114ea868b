"""The quickstart as a user meets it: time to the first step, cold and warm, the whole run, and where its loss ends.

    python scripts/bench/quickstart.py [key=value ...]

Cold: an empty compile cache. Warm: the same command again, in another run folder. Each is a process
of its own, timed from its start; the first step is done when its line is in metrics.jsonl.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(folder: Path, cache: Path, *overrides: str) -> tuple[subprocess.Popen, float]:
    command = [sys.executable, "-m", "maxds.train", "configs/quickstart.yaml", f"run_dir={folder}"]
    began = time.perf_counter()
    return subprocess.Popen([*command, f"compile_cache={cache}", *overrides], cwd=ROOT), began


def first_step(process: subprocess.Popen, began: float, folder: Path) -> float:
    """Seconds from the start of the process to the end of its first step."""
    file = folder / "metrics.jsonl"
    while process.poll() is None:
        if file.exists() and "\n" in file.read_text():
            return time.perf_counter() - began
        time.sleep(0.02)
    raise SystemExit(f"the run ended early, with exit code {process.returncode}")


def main(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        cache, cold, warm = (Path(scratch) / name for name in ("cache", "cold", "warm"))
        process, began = start(cold, cache, *overrides)
        cold_seconds = first_step(process, began, cold)
        process.terminate()
        process.wait()
        process, began = start(warm, cache, *overrides)
        warm_seconds = first_step(process, began, warm)
        code, whole = process.wait(), time.perf_counter() - began
        steps = [json.loads(line) for line in (warm / "metrics.jsonl").read_text().splitlines()]
        evals = [json.loads(line) for line in (warm / "eval.jsonl").read_text().splitlines()]
    print(f"first step: {cold_seconds:.1f} s cold (target 60), {warm_seconds:.1f} s warm (target 15)")
    print(f"whole run of {len(steps)} steps, warm: {whole:.0f} s (target 240), exit code {code}")
    print(f"loss: {steps[0]['terms']['main']:.3f} at step 1, held out {evals[-1]['eval']['main']:.3f} (target 2.4)")


if __name__ == "__main__":
    main(sys.argv[1:])
