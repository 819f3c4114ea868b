"""A worker of `peer`, in the peer's interpreter: compiles MaxText's train step, and leaves the program and its memory.

python peer_worker.py FOLDER ARGUMENT ...     (arguments of its own train_compile)
"""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # or JAX would look for a TPU first

import jax
import tokamax
from maxtext.trainers.pre_train import train_compile


def main(folder: Path, arguments: list[str]) -> None:
    compiled = train_compile.jit_and_compile

    def kept(function, args, kwargs, mesh, *rest):
        places = [(*d.coords, d.core_on_chip) for d in mesh.devices.flat]
        found = {"mesh": dict(mesh.shape), "devices": places, "jax": jax.__version__}
        try:
            program = compiled(function, args, kwargs, mesh, *rest)
            (folder / "program.hlo").write_text(program.as_text())
            memory = program.memory_analysis()
            found["memory"] = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
        except jax.errors.JaxRuntimeError as error:
            found["refused"] = str(error)
        (folder / "partial.json").write_text(json.dumps(found) + "\n")
        sys.exit()  # what it would print is in the files

    train_compile.jit_and_compile = kept
    with tokamax.config.cross_compile(True):  # or its kernels would refuse a machine without a TPU
        train_compile.main(["train_compile", *arguments])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
