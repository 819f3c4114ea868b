"""Converting a synthetic checkpoint, against copying its files: seconds, and memory at the peak.

    python scripts/bench/convert.py GIGABYTES [FOLDER]

The checkpoint has V3's build with expert matrices of 2,048 x 1,408 in bfloat16, and as many layers as the size asks
for. A new folder in FOLDER (by default the system's for temporary files) needs room for three times the size. What is
read is on the disk alone, not in the page cache, when a clock starts, and all is written through to the disk before it
stops. Each conversion is a process of its own; its memory is its resident high-water mark.
"""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from maxds import checkpoint, parts
from maxds.architecture import Model
from maxds.hf import files, settings
from maxds.hf.table import cells, table

MODEL = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
}


def make(folder: pathlib.Path, size: float) -> int:
    """Writes a checkpoint of about `size` bytes; returns how many it has."""
    model = Model(num_hidden_layers=max(round(size / 1.13e9), 1) + 1, **MODEL)
    shapes = {name: tuple(s) for name, s in checkpoint.shapes(parts.abstract(model)).items()}
    wanted = {
        name: (files.DTYPES["BF16"], c.row.tensor_shape([shapes[a][len(c.index) :] for a in c.row.arrays]))
        for c in cells(table(model, list(shapes)), shapes)
        for name in c.tensors
    }
    folder.mkdir()
    files.lay_out(folder, wanted, 4 * 2**30)
    (folder / "config.json").write_text(settings.write(model, "bfloat16", None))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(2**26, np.float32).astype(files.DTYPES["BF16"])
    for tensor in files.tensors(folder).values():
        numbers = int(np.prod(tensor.shape))
        start = rng.integers(0, max(len(noise) - numbers, 0), endpoint=True)
        tensor.write(np.resize(noise[start : start + numbers], tensor.shape))
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def forget(folder: pathlib.Path) -> None:
    """Leaves nothing of a folder's files in the page cache."""
    os.sync()
    for path in filter(pathlib.Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(what: str, size: int, work: Callable[[pathlib.Path, pathlib.Path], int], *folders: pathlib.Path) -> float:
    """Runs `work` and writes what it wrote through to the disk; prints and returns bytes per second."""
    os.sync()
    start = time.perf_counter()
    found = work(*folders)
    os.sync()
    seconds = time.perf_counter() - start
    peak = f", peak {found / 1e9:.2f} GB" if found else ""
    print(f"{what}: {seconds:.1f} s, {size / seconds / 1e6:.0f} MB/s{peak}", flush=True)
    return size / seconds


def copy(source: pathlib.Path, target: pathlib.Path) -> int:
    """Copies a folder; its memory does not count."""
    shutil.copytree(source, target)
    return 0


def convert(way: str, source: pathlib.Path, target: pathlib.Path) -> int:
    """Runs the command; returns its memory at the peak, in bytes."""
    command = [sys.executable, "-m", "maxds.convert", way, str(source), str(target)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0
    return used.ru_maxrss * 1024


def main(folder: pathlib.Path, size: float) -> None:
    """Prints what each takes, and its ratio to copying."""
    size = make(folder / "hf", size)
    print(f"{size / 1e9:.2f} GB, {len(json.loads((folder / 'hf' / files.INDEX).read_text())['weight_map'])} tensors")
    # First of all a copy that does not count: a virtual machine is slow to get memory that it has not had before.
    timed("copy, not counted", size, copy, folder / "hf", folder / "copy")
    shutil.rmtree(folder / "copy")
    works = {
        "copy": ("hf", "copy", copy),
        "from_hf": ("hf", "run", functools.partial(convert, "from_hf")),
        "to_hf": ("run", "back", functools.partial(convert, "to_hf")),
    }
    speed = {}
    for what, (source, target, work) in works.items():
        forget(folder / source)
        speed[what] = timed(what, size, work, folder / source, folder / target)
        if target != "run":
            shutil.rmtree(folder / target)
    ratios = ", ".join(f"{what} {speed[what] / speed['copy']:.2f}" for what in ("from_hf", "to_hf"))
    print(f"speed over that of copying: {ratios}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as made:
        main(pathlib.Path(made), float(sys.argv[1]) * 1e9)
