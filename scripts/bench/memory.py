"""Host memory that making and restoring a state need at their peak, relative to the state's size.

    python scripts/bench/memory.py

About 300 million parameters on one CPU device. Memory is what the operating system counts (resident, high-water mark).
Each is measured in a process of its own, after a small state, so that the libraries' and the compiler's share is not
counted as the state's.
"""

import resource
import subprocess
import sys
import tempfile

import jax

from maxds import checkpoint, config, loader, mesh, params, step

QUICKSTART = "configs/quickstart.yaml"
ONE_DEVICE = "mesh.data=1 mesh.fsdp=1 mesh.expert=1 mesh.cpu_devices=1".split()
LARGE = (
    "model.hidden_size=768 model.intermediate_size=2048 model.moe_intermediate_size=512 model.num_hidden_layers=8 "
    "model.num_attention_heads=12 model.n_routed_experts=24 model.vocab_size=32768"
).split()


def peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stepper(folder: str, overrides: list[str]) -> step.Stepper:
    c, _ = loader.load(config.Config, QUICKSTART, [f"run_dir={folder}", *ONE_DEVICE, *overrides])
    mesh.initialize(c.mesh)
    return step.make(c, mesh.make(c.mesh))


def init_and_save(made: step.Stepper) -> None:
    with checkpoint.open_run(made.config, print) as saved:
        state = jax.block_until_ready(made.init())
        report("init", made, state)
        saved.save(state, 1, made.config, "none")


def restore(made: step.Stepper) -> None:
    with checkpoint.open_run(made.config, print, read_only=True) as saved:
        report("restore", made, jax.block_until_ready(saved.restore(made.abstract_state, lambda about: None)))


def report(what: str, made: step.Stepper, state: step.TrainState) -> None:
    grown, size = peak() - BEFORE, sum(a.nbytes for a in jax.tree.leaves(state))
    count = params.count(made.network.declared)
    print(f"{what}: {count / 1e6:.0f}M parameters, state {size / 2**20:.0f} MiB, peak {grown / size:.2f} of it")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            for what in ("init", "restore"):
                subprocess.run([sys.executable, __file__, what, folder], check=True)
    else:
        _, what, folder = sys.argv
        jax.block_until_ready(stepper(folder, []).init())
        large = stepper(folder, LARGE)
        BEFORE = peak()
        init_and_save(large) if what == "init" else restore(large)
