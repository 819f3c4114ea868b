"""A worker of `alternate`: train steps of maxds on random tokens."""

import sys

import alternate
import jax
import numpy as np

from maxds import config, loader, mesh, step


def rows(batch: int, length: int, vocab: int) -> dict[str, np.ndarray]:
    """One document a row."""
    tokens = alternate.tokens(batch, length, vocab)
    positions = np.array(np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length)))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.ones_like(positions),
        "positions": positions,
    }


def main(path: str, *overrides: str) -> None:
    c, _ = loader.load(config.Config, path, overrides)
    mesh.initialize(c.mesh)
    stepper = step.make(c, mesh.make(c.mesh))
    state = jax.block_until_ready(stepper.init())
    mesh.keep_freed_memory(c.mesh)
    batch = stepper.batch(rows(c.data.global_batch, c.data.sequence_length, c.model.vocab_size))

    def one_step():
        nonlocal state
        state, metrics = stepper.train(state, batch, stepper.training)
        jax.block_until_ready((state, metrics))

    alternate.serve(one_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
