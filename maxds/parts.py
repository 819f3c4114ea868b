"""A checkpoint read and written by parts, for models that are larger than memory.

Orbax writes what it would write of a state whose weights have one number each; then each array is
laid out anew in its own size, in chunks of one layer or expert, and filled by parts.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from maxds import checkpoint, params
from maxds.architecture import Model
from maxds.config import Config
from maxds.model import layout
from maxds.step import TrainState

CHUNK_BYTES = 64 * 2**20  # of an array is read at a time when a training starts from it

Shape = tuple[int, ...]


def abstract(model: Model) -> TrainState:
    """Shapes and dtypes of a state without its optimizer's; no arrays, no devices."""
    weights = params.derive(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), layout.declare(model))
    bias = jax.eval_shape(lambda: layout.router_bias(model))
    step, norm = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)))
    return TrainState(step=step, params=weights, opt_state=None, router_bias=bias, typical_norm=norm)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The arrays of a checkpoint, by name."""

    arrays: dict[str, Any]  # of tensorstore

    def read(self, name: str, index: tuple[int, ...]) -> np.ndarray:
        """What lies at these places along the leading axes.

        Raises:
          CheckpointError: it is not there, or not whole.
        """
        try:
            return self.arrays[name][index].read().result()
        except ValueError as error:
            raise checkpoint.CheckpointError(
                f"{name} cannot be read ({checkpoint.reason(error)}); copy the checkpoint again, or choose another one"
            ) from error

    def write(self, name: str, index: tuple[int, ...], numbers: np.ndarray) -> None:
        """Writes what lies at these places along the leading axes.

        Raises:
          OSError: the disk refuses, such as one that is full.
        """
        try:
            self.arrays[name][index].write(numbers).result()
        except ValueError as error:
            raise OSError(f"{name} cannot be written: {checkpoint.reason(error)}") from error

    def dtype(self, name: str) -> np.dtype:
        """Of an array."""
        return self.arrays[name].dtype.numpy_dtype


def create(config: Config, run: pathlib.Path, dtypes: dict[str, np.dtype], stacked: dict[str, int]) -> None:
    """Makes checkpoint 0 of a run, of zeros.

    Args:
      config: of the run, as it is to be found in the checkpoint.
      run: the folder of the run.
      dtypes: of every weight and router bias, by name.
      stacked: how many of their leading axes count layers and experts: a chunk has one of each.
    """
    state = abstract(config.model)
    small = jax.tree_util.tree_map_with_path(
        lambda path, a: jnp.zeros((1,) * len(a.shape), dtypes.get(params.name(path), a.dtype)), state
    )
    checkpoint.save_outline(config, str(run), small, state)
    declared = {f"params.{path}": p for path, p in params.flatten(layout.declare(config.model)).items()}
    for name, shape in checkpoint.shapes(state).items():
        if name in dtypes:
            split = [axis for axis, by in enumerate(declared[name].spec) if by == "fsdp"] if name in declared else []
            chunk = _chunk(shape, stacked[name], split, dtypes[name].itemsize)
            _lay_out(_folder(run, 0) / name, shape, chunk, dtypes[name])


def _chunk(shape: list[int], stacked: int, split: list[int], itemsize: int) -> list[int]:
    """Of one layer or expert, and where that is large, split as training splits it."""
    chunk = [1] * stacked + shape[stacked:]
    for axis in split:
        pieces = -(-int(np.prod(chunk)) * itemsize // CHUNK_BYTES)
        chunk[axis] = -(-chunk[axis] // pieces)
    return chunk


def _lay_out(folder: pathlib.Path, shape: list[int], chunk: list[int], dtype: np.dtype) -> None:
    metadata = {
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    store = {"driver": "file", "path": f"{folder}/"}
    ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata}, create=True, delete_existing=True).result()


def open_checkpoint(run: pathlib.Path, step: int, names: list[str]) -> Parts:
    """These arrays of a checkpoint, whether it was written by parts or by a training."""
    folder = _folder(run, step)
    files = {"driver": "file", "path": f"{folder}/"}
    store = {"driver": "ocdbt", "base": files} if (folder / "manifest.ocdbt").exists() else files
    # As Orbax does: zeros are written, so that a file that is missing is not taken for them.
    zarr = {"driver": "zarr3", "store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}

    def one(name: str) -> Any:
        kvstore = store | {"path": f"{store.get('path', '')}{name}/"}
        return ts.open(zarr | {"kvstore": kvstore}, context=context).result()

    # Waiting for the disk after every chunk would take most of the time; who converts waits once, at the end.
    context = ts.Context({"file_io_sync": False})
    return Parts({name: one(name) for name in names})


def _folder(run: pathlib.Path, step: int) -> pathlib.Path:
    return run / "checkpoints" / str(step) / "state"
