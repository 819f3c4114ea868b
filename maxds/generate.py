"""Continues a text with a trained model: python -m maxds.generate RUN --prompt="def " --tokens=200."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import PartitionSpec as P

from maxds import command, params, trained
from maxds import mesh as mesh_lib
from maxds.architecture import Model
from maxds.config import Sample
from maxds.data import Tokenizer, load_tokenizer
from maxds.model import decode, kernels
from maxds.step import Stepper, TrainState
from maxds.trained import UseError


def sample_text(stepper: Stepper, state: TrainState, tokenizer: Tokenizer, sample: Sample) -> str:
    """The prompt and its continuation; the same for the same seed. Every process of a run must call it.

    Args:
      stepper: of the model.
      state: its `params` and `router_bias` are read.
      tokenizer: of the config.
      sample: what to continue, and how.

    Raises:
      UseError: as `encode`.
    """
    prompt = encode(stepper.config.model, tokenizer, sample)
    (continuation,) = continue_prompts(stepper, state, [prompt], sample, tokenizer.eos)
    return tokenizer.decode([*prompt, *continuation])


def encode(model: Model, tokenizer: Tokenizer, sample: Sample) -> np.ndarray:
    """The prompt's tokens, int32 [tokens].

    Raises:
      UseError: the model does not know a token, or has not as many positions as the prompt and what is to follow.
    """
    prompt = tokenizer.encode(sample.prompt)
    length, limit = len(prompt) + sample.tokens, model.max_position_embeddings
    if length > limit:
        raise UseError(
            f"a prompt of {len(prompt)} tokens and tokens={sample.tokens} more exceed "
            f"model.max_position_embeddings={limit}; ask for {max(limit - len(prompt), 0)} or fewer, or shorten the "
            f"prompt"
        )
    if (largest := int(np.max(prompt))) >= model.vocab_size:
        raise UseError(
            f"the tokenizer reads the prompt {sample.prompt!r} as tokens up to {largest}, beyond "
            f"model.vocab_size={model.vocab_size}; choose another prompt"
        )
    return prompt


def continue_prompts(
    stepper: Stepper, state: TrainState, prompts: Sequence[np.ndarray], sample: Sample, eos: int | None
) -> list[np.ndarray]:
    """Continuations, int32 [up to sample.tokens] each, of prompts, int32 [at least 1] each.

    Draws of a prompt depend on the seed and on its place among the prompts, not on the mesh.
    """
    rows = -len(prompts) % stepper.mesh.size + len(prompts)
    lengths = np.array([len(p) for p in prompts] + [0] * (rows - len(prompts)), np.int32)
    width = int(max(lengths))
    if width > kernels.QUERY_BLOCK:  # whole blocks of queries: others would all be one
        width += -width % kernels.QUERY_BLOCK
    tokens = np.zeros((rows, width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    run, seed = program(stepper, sample, eos), np.uint32(sample.seed % 2**32)
    found = np.asarray(run(state.params, state.router_bias, tokens, lengths, seed))
    return [row[row >= 0] for row in found[: len(prompts)]]


def program(stepper: Stepper, sample: Sample, eos: int | None) -> Callable[..., jax.Array]:
    """The compiled (weights, bias, prompts [rows P], lengths [rows], seed) -> continuations [rows tokens], int32.

    `rows` is a multiple of the mesh's size; a row of length 0 holds no prompt; -1 is past the end.
    """
    network = stepper.network

    def per_device(weights, bias, tokens, lengths, keys):
        def pick(logits, i):
            return decode.pick(
                logits, jax.vmap(jax.random.fold_in, (0, None))(keys, i), sample.temperature, sample.top_p
            )

        return decode.make(network, weights, bias).generate(tokens, lengths, sample.tokens, pick, eos)

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(stepper.mesh))
    def run(weights, bias, tokens, lengths, seed):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(tokens)))
        batch = mesh_lib.BATCH
        specs = params.specs(network.declared), P(), batch, batch, batch
        inside = jax.shard_map(per_device, mesh=stepper.mesh, in_specs=specs, out_specs=batch, check_vma=False)
        return inside(weights, bias, tokens, lengths, keys)

    return run


def continue_text(folder: str, sample: Sample, step: int | None = None) -> str:
    """The prompt and its continuation by the model of a run, of checkpoint `step` or the last.

    Raises:
      trained.MISTAKES: the run or the prompt cannot be used.
    """
    config = trained.read_config(folder)
    tokenizer = load_tokenizer(config.data.tokenizer)
    encode(config.model, tokenizer, sample)  # refuses a prompt before the weights are read
    return sample_text(*trained.load(config, folder, step), tokenizer, sample)


def main(args: list[str]) -> int:
    """Runs the command; returns its exit code: 2 where what it was given cannot be used."""
    try:
        print(continue_text(trained.folder_of(args), _sample(flags.FLAGS), flags.FLAGS.step))
    except trained.MISTAKES as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _sample(options: flags.FlagValues) -> Sample:
    values: dict[str, Any] = {field.name: options[field.name].value for field in dataclasses.fields(Sample)}
    try:
        return Sample(**values)
    except ValueError as error:
        raise UseError("; ".join(f"--{line}" for line in str(error).splitlines())) from error


if __name__ == "__main__":
    flags.DEFINE_string("prompt", "", "The text to continue.")
    flags.DEFINE_integer("tokens", Sample.tokens, "How many to add, at most.")
    flags.DEFINE_float("temperature", Sample.temperature, "0: always the most probable token.")
    flags.DEFINE_float("top_p", Sample.top_p, "Draw from the most probable tokens that together have this probability.")
    flags.DEFINE_integer("seed", Sample.seed, "Of the draws.")
    flags.DEFINE_integer("step", None, "Of the checkpoint; by default the latest.")
    command.run(main)
