"""The command: python -m maxds.convert from_hf HF_DIR OUT | to_hf RUN HF_DIR [--step=N]

    from_hf   a checkpoint in Hugging Face's format becomes a run: OUT/checkpoints/0 and OUT/config.yaml
    to_hf     a checkpoint of a run becomes one in Hugging Face's format

Both work beside the place where the result is to be, in a folder with the end `.partial`, an array of
a layer or expert at a time, and note what is done: the same command goes on where it was stopped. At
the end everything is read back and compared by checksum; only then does the result have its name.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import tqdm
import xxhash
import yaml
from absl import flags, logging

import maxds
from maxds import checkpoint, command, loader, params, parts, trained
from maxds.checksum import of_part
from maxds.config import Config
from maxds.data import DataError, load_tokenizer
from maxds.hf import files, quantized, settings
from maxds.hf.files import FormatError, Tensor
from maxds.hf.table import IGNORED, Cell, cells, official, table
from maxds.model import layout
from maxds.trained import UseError

WORKERS = 2  # parts converted at a time: what memory must hold
FILE_BYTES = 4 * 2**30  # of a safetensors file, at most, unless a tensor alone exceeds it
TOKENIZER = "tokenizer.json"
# What lies beside it, and those need who serve the model: how chats are written, where answers end, Kimi's tokenizer.
SERVING = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"),
    *("tiktoken.model", "tokenization_kimi.py"),
)
WEIGHTS, MATRICES, TABLES = ("F32", "F16", "BF16"), ("F8_E4M3", "I8"), ("I64", "I32")  # dtypes of tensors
USAGE = "usage: python -m maxds.convert from_hf HF_DIR OUT | to_hf RUN HF_DIR [--step=N]"
_MISTAKES = (*trained.MISTAKES, FormatError)
_NOTES = "job.json", "done.jsonl"


class DamageError(RuntimeError):
    """What was written reads back otherwise."""


# ---------------------------------------------------------------------------------------- the work


@dataclasses.dataclass(frozen=True)
class Work:
    """A conversion: what is to be done, and where."""

    target: pathlib.Path
    identity: dict[str, Any]  # of what is converted: only the same work is gone on with
    prepare: Callable[[pathlib.Path], None]  # makes all that is to be there but the numbers
    open: Callable[[pathlib.Path], tuple[Callable[[Cell], tuple[Sequence[np.ndarray], list[int]]], Callable, Callable]]
    cells: Sequence[Cell]
    sizes: Callable[[Cell], int]  # bytes
    damaged: Callable[[dict[str, list[int]]], list[str]] = lambda sums: []  # what was read, by what `convert` returns

    @property
    def folder(self) -> pathlib.Path:
        """Where the result is while it is not whole."""
        return self.target.with_name(f"{self.target.name}.partial")

    def do(self) -> None:
        """Converts, or goes on, and gives the result its name.

        Raises:
          DamageError: what was written reads back otherwise.
        """
        done = self._begin()
        convert, write, read = self.open(self.folder)

        def one(cell: Cell) -> list[int]:
            made, sums = convert(cell)
            write(cell, made)
            return [*checksum(made), *sums]

        left = [cell for cell in self.cells if cell.tensors[0] not in done]
        with (self.folder / _NOTES[1]).open("a", buffering=1) as notes:
            for cell, found in self._each("converting", left, one):
                done[cell.tensors[0]] = found
                notes.write(json.dumps([cell.tensors[0], found]) + "\n")
        if found := self.damaged(done):
            shutil.rmtree(self.folder)
            raise DamageError(
                f"{len(found)} arrays have another checksum than when they were saved, such as {found[0]}; copy the "
                f"checkpoint again, or choose another one"
            )
        backwards = self.cells[::-1]  # the page cache has the end of what was written, not the beginning
        compared = self._each("comparing", backwards, lambda cell: checksum(read(cell)))
        wrong = [cell for cell, found in compared if found != done[cell.tensors[0]][: len(found)]]
        if wrong:
            shutil.rmtree(self.folder)
            raise DamageError(
                f"{len(wrong)} of {len(self.cells)} parts read back otherwise than they were written, such as "
                f"{wrong[-1].tensors[0]}; look after the disk of {self.target.parent} and run the command again"
            )
        for name in _NOTES:
            (self.folder / name).unlink()
        os.sync()
        with contextlib.suppress(FileNotFoundError):
            self.target.rmdir()  # an empty one may be there
        self.folder.rename(self.target)

    def _begin(self) -> dict[str, list[int]]:
        """Makes the folder, unless it is there: then what was done before, and its checksums."""
        job, notes = (self.folder / name for name in _NOTES)
        identity = json.loads(json.dumps(self.identity | {"checksum": "xxh3_64, of_part", "maxds": maxds.__version__}))
        with contextlib.suppress(OSError, ValueError):
            if json.loads(job.read_text()) == identity:
                lines = notes.read_text().splitlines(keepends=True) if notes.exists() else []
                done = dict(json.loads(line) for line in lines if line.endswith("\n"))
                notes.write_text("".join(json.dumps(item) + "\n" for item in done.items()))
                print(f"going on: {len(done)} of {len(self.cells)} parts were converted before")
                return done
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.prepare(self.folder)
        job.write_text(json.dumps(identity))
        return {}

    def _each(self, what: str, work: Sequence[Cell], fn: Callable[[Cell], list[int]]) -> Iterator:
        """Each cell with what `fn` returns, a few at a time; with a progress bar on a terminal."""
        total = sum(map(self.sizes, work))
        with (
            tqdm.tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None) as bar,
            futures.ThreadPoolExecutor(WORKERS) as pool,
        ):
            try:
                for cell, found in zip(work, pool.map(fn, work), strict=True):
                    yield cell, found
                    bar.update(self.sizes(cell))
            finally:
                pool.shutdown(cancel_futures=True)  # what has not begun


def checksum(arrays: Sequence[np.ndarray]) -> list[int]:
    """Of the bytes of each."""
    return [xxhash.xxh3_64_intdigest(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data) for a in arrays]


@dataclasses.dataclass(frozen=True)
class Sums:
    """The checksums that a training saved of its arrays, each of which is the sum of those of its parts."""

    saved: dict[str, str]  # as `checksum.of_arrays`; of what a conversion made, there are none
    shapes: dict[str, tuple[int, ...]]
    cells: Sequence[Cell]

    def of(self, cell: Cell, parts: Sequence[np.ndarray]) -> list[int]:
        """Of the parts of a cell's arrays."""
        if cell.row.copy or cell.row.arrays[0] not in self.saved:
            return []
        places = [np.ravel_multi_index(cell.index, self.shapes[a][: len(cell.index)]) for a in cell.row.arrays]
        firsts = [int(place) * part.size for place, part in zip(places, parts, strict=True)]
        return [of_part(part, first) for part, first in zip(parts, firsts, strict=True)]

    def differing(self, found: dict[str, list[int]]) -> list[str]:
        """The arrays that are not those that were saved, by what `Work` has found of each cell."""
        totals: dict[str, int] = {}
        for cell in self.cells:
            for array, part in zip(cell.row.arrays, found[cell.tensors[0]][len(cell.tensors) :], strict=False):
                totals[array] = totals.get(array, 0) + part
        return [a for a, total in totals.items() if self.saved[a].partition(":")[2] != f"{total % 2**32:08x}"]


def _of_this_machine(folder: str, advice: str) -> pathlib.Path:
    if "://" in folder:
        raise UseError(f"{folder} is in a bucket; {advice}")
    return pathlib.Path(folder).expanduser().absolute()


def _check_target(target: str, needed: int) -> pathlib.Path:
    path = _of_this_machine(target, "convert to a folder of this machine, and copy that")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UseError(f"{target} is there already; remove it, or choose another place")
    free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
    begun = path.with_name(f"{path.name}.partial").exists()
    if free < needed and not begun:
        raise UseError(f"{target} needs {needed / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB left")
    return path


def _carry(folder: pathlib.Path, to: pathlib.Path, names: Sequence[str]) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copy(folder / name, to / name)


def _stamp(paths: Sequence[pathlib.Path]) -> dict[str, list[int]]:
    return {str(p.absolute()): [p.stat().st_size, p.stat().st_mtime_ns] for p in paths if p.exists()}


# ------------------------------------------------------------------------------------ from Hugging Face


def from_hf(source: str, out: str) -> None:
    """Makes the run `out` of a checkpoint in Hugging Face's format.

    Raises:
      FormatError: config.json or tensors are not those of a model that maxds has; all that is wrong.
      UseError: there is no room for the run.
    """
    folder = pathlib.Path(source).expanduser()
    model = settings.read(folder)
    target = pathlib.Path(out).expanduser().absolute()
    text = _config_text(folder, target, model)
    config = _parse(text, folder)
    shapes = {name: tuple(shape) for name, shape in checkpoint.shapes(parts.abstract(config.model)).items()}
    rows = table(config.model, list(shapes))
    found = _tensors(folder, config)
    all_cells = cells(rows, shapes)
    check(found, all_cells, shapes, folder)
    todo = [cell for cell in all_cells if not cell.row.copy]
    dtypes = _dtypes(found, todo)
    stacked = {array: row.stacked for row in rows if not row.copy for array in row.arrays}

    def nbytes(cell: Cell) -> int:
        return sum(_size(shapes[a][len(cell.index) :], dtypes[a]) for a in cell.row.arrays)

    def prepare(partial: pathlib.Path) -> None:
        parts.create(config, partial, dtypes, stacked)
        (partial / "config.yaml").write_text(text)
        _carry(folder, partial, ("config.json", *SERVING))

    def open_(partial: pathlib.Path):
        arrays = parts.open_checkpoint(partial, 0, list(dtypes))

        def convert(cell: Cell) -> tuple[list[np.ndarray], list[int]]:
            wanted = [shapes[a][len(cell.index) :] for a in cell.row.arrays]
            kinds = [dtypes[a] for a in cell.row.arrays]
            return cell.row.to_arrays([quantized.read(found, name) for name in cell.tensors], wanted, kinds), []

        def write(cell: Cell, made: Sequence[np.ndarray]) -> None:
            for array, numbers in zip(cell.row.arrays, made, strict=True):
                arrays.write(array, cell.index, numbers)

        return convert, write, lambda cell: [arrays.read(a, cell.index) for a in cell.row.arrays]

    used = {t.file for t in found.values()} | {folder / name for name in ("config.json", *SERVING)}
    identity = {"from": _stamp(sorted(used)), "config": text}
    _check_target(out, sum(map(nbytes, todo)))
    Work(target, identity, prepare, open_, todo, nbytes).do()
    print(
        f"{out}: {sum(len(c.tensors) for c in todo)} tensors converted, {sum(map(nbytes, todo)) / 1e9:.2f} GB compared"
    )
    if not (folder / TOKENIZER).is_file():
        print(f"{folder} has no {TOKENIZER}: name a tokenizer as data.tokenizer in {out}/config.yaml")


def _tensors(folder: pathlib.Path, config: Config) -> dict[str, Tensor]:
    """The tensors of a folder, by the names of the table."""
    given = files.tensors(folder)
    if config.model.compress_ratios is None:
        return given
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in given.items():
        if (known := official(name)) in found:
            raise FormatError(f"{folder} has {names[known]} and {name}, which are names of the same; remove one")
        found[known], names[known] = tensor, name
    return found


def check(
    found: dict[str, Tensor], all_cells: Sequence[Cell], shapes: dict[str, tuple[int, ...]], folder: pathlib.Path
) -> None:
    """Raises FormatError, naming all tensors that are unknown, missing or misshapen, or copies that are none."""
    wanted = {
        name: cell.row.tensor_shape([shapes[a][len(cell.index) :] for a in cell.row.arrays])
        for cell in all_cells
        for name in cell.tensors
    }
    dtypes = {name: WEIGHTS + MATRICES if len(shape) == 2 else WEIGHTS for name, shape in wanted.items()}
    dtypes |= {name: TABLES for cell in all_cells if cell.row.below for name in cell.tensors}
    copies = {name for cell in all_cells if cell.row.copy for name in cell.tensors}
    for name in [n for n, t in found.items() if n in wanted and t.dtype in dtypes[n] and quantized.is_quantized(t)]:
        scale = f"{name}{quantized.SCALE}"
        wanted[name], wanted[scale] = quantized.stored(found[name].dtype, wanted[name])
        dtypes[scale] = quantized.SCALES
    unknown = [name for name in found if name not in wanted and not name.endswith(IGNORED)]
    missing = [name for name in wanted if name not in found and name not in copies]
    both = [(name, found[name]) for name in wanted if name in found]
    misshapen = [f"{n} {list(t.shape)}, not {list(wanted[n])}" for n, t in both if t.shape != wanted[n]]
    kinds = [f"{n} {t.dtype}, not {', '.join(dtypes[n])}" for n, t in both if t.dtype not in dtypes[n]]
    mistakes = [
        *_listed("unknown", unknown),
        *_listed("missing", missing),
        *_listed("misshapen", misshapen),
        *_listed("of another dtype", kinds),
    ]
    if not mistakes:
        mistakes = [
            *_listed("no copy of the model's own embedding or head", _altered(found, all_cells)),
            *_listed("no table of experts", _astray(found, all_cells)),
        ]
    if mistakes:
        raise FormatError("\n".join((f"{folder} does not hold the tensors of its config.json:", *mistakes)))


def _astray(found: dict[str, Tensor], all_cells: Sequence[Cell]) -> list[str]:
    """What tables give tokens that cannot be computed."""
    mistakes = []
    for name, below in [(name, cell.row.below) for cell in all_cells if cell.row.below for name in cell.tensors]:
        rows = np.sort(found[name].read(), axis=1)
        if rows.min() < 0 or rows.max() >= below:
            mistakes.append(f"{name} names experts {rows.min()} to {rows.max()}, not 0 to {below - 1}")
        if (twice := np.any(rows[:, 1:] == rows[:, :-1], axis=1)).any():
            mistakes.append(f"{name} gives token {np.argmax(twice)} the same expert twice")
    return mistakes


def _altered(found: dict[str, Tensor], all_cells: Sequence[Cell]) -> list[str]:
    original = {cell.row.arrays: cell.tensors[0] for cell in all_cells if not cell.row.copy}
    pairs = [(cell.tensors[0], original[cell.row.arrays]) for cell in all_cells if cell.row.copy]
    return [
        f"{a} (of {b})"
        for a, b in pairs
        if a in found and checksum([quantized.read(found, a)]) != checksum([quantized.read(found, b)])
    ]


def _listed(what: str, names: Sequence[str]) -> list[str]:
    return [f"  {what}: {name}" for name in names]


def _dtypes(found: dict[str, Tensor], todo: Sequence[Cell]) -> dict[str, np.dtype]:
    """Of each array: its tensors', or bfloat16 for quantized ones; float32 of the router bias and where they differ."""
    kinds: dict[str, set[np.dtype]] = {}
    for cell in todo:
        of = {files.DTYPES["BF16" if quantized.is_quantized(t := found[n]) else t.dtype] for n in cell.tensors}
        for array in cell.row.arrays:
            kinds.setdefault(array, set()).update({np.dtype(np.int32)} if cell.row.below else of)
    f32 = np.dtype(np.float32)
    state = {
        array for cell in todo for array in cell.row.arrays if not array.startswith("params.") and not cell.row.below
    }
    return {a: f32 if len(of) > 1 or a in state else next(iter(of)) for a, of in kinds.items()}


def _config_text(folder: pathlib.Path, target: pathlib.Path, model: dict[str, Any]) -> str:
    """The config of the run that a checkpoint becomes."""
    length = min(4096, model["max_position_embeddings"])
    loss = {"mtp": 0.1} if model.get("num_nextn_predict_layers") else {}
    loss |= {"indexer": 0.01} if model.get("index_topk") else {}
    tokenizer = str(target / TOKENIZER) if (folder / TOKENIZER).is_file() else "bytes"
    text = (
        f"# Converted from {folder}. Before training, set steps, data and optimizer, here or on the command line.\n",
        yaml.safe_dump({"run_dir": str(target), "steps": 1000}, sort_keys=False),
        yaml.safe_dump({"model": model}, sort_keys=False),
        yaml.safe_dump(
            {
                "data": {
                    "sources": [{"kind": "text", "path": "stdlib"}],
                    "tokenizer": tokenizer,
                    "sequence_length": length,
                    "global_batch": 16,
                },
                "optimizer": {"lr": 1e-5},
                **({"loss": loss} if loss else {}),
            },
            sort_keys=False,
        ),
    )
    return "\n".join(text)


def _parse(text: str, folder: pathlib.Path) -> Config:
    """Raises FormatError where the keys of config.json make no model."""
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "config.json"
        path.write_text(text)
        try:
            return loader.load(Config, path)[0]
        except loader.ConfigError as error:
            lines = [line.split(": ", 1)[1] for line in error.mistakes]
            raise FormatError("\n".join(f"{folder / path.name}: {line}" for line in lines)) from error


def _size(shape: Sequence[int], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


# -------------------------------------------------------------------------------------- to Hugging Face


def to_hf(run: str, out: str, step: int | None = None) -> None:
    """Makes the folder `out`, in Hugging Face's format, of a checkpoint of a run, the last or that of `step`.

    Raises:
      trained.MISTAKES: the run cannot be used, or there is no room.
      FormatError: transformers has no such model.
    """
    folder = _of_this_machine(run, "copy it to a folder of this machine, and convert that")
    config = dataclasses.replace(trained.read_config(run), run_dir=run)
    abstract = parts.abstract(config.model)
    with checkpoint.open_run(config, checkpoint.warn, read_only=True) as saved:
        step = saved.choose(step)
        checkpoint.check_shapes(about := saved.about(step), config, abstract)
    shapes = {name: tuple(shape) for name, shape in checkpoint.shapes(abstract).items()}
    rows = table(config.model, list(shapes))
    todo = cells(rows, shapes)
    arrays = parts.open_checkpoint(folder, step, sorted({a for row in rows for a in row.arrays}))
    dtypes = _computed_with(config, arrays)
    wanted = {}
    for cell in todo:
        shape = cell.row.tensor_shape([shapes[a][len(cell.index) :] for a in cell.row.arrays])
        dtype = np.result_type(*(dtypes[a] for a in cell.row.arrays), *([np.int64] if cell.row.below else []))
        wanted |= {name: (dtype, shape) for name in cell.tensors}
    tokenizer = pathlib.Path(config.data.tokenizer).expanduser()
    beside = tokenizer.parent if tokenizer.is_file() else folder
    said = settings.write(config.model, dtypes["params.embed"].name, _special_tokens(config, beside))

    saved_sums = Sums(about.checksums, shapes, todo)

    def nbytes(cell: Cell) -> int:
        return sum(_size(wanted[name][1], wanted[name][0]) for name in cell.tensors)

    def prepare(partial: pathlib.Path) -> None:
        files.lay_out(partial, wanted, FILE_BYTES)
        (partial / "config.json").write_text(said)
        _carry(beside, partial, SERVING)
        if tokenizer.is_file() and tokenizer.suffix == ".json":  # under whatever name
            shutil.copy(tokenizer, partial / TOKENIZER)

    def open_(partial: pathlib.Path):
        laid = files.tensors(partial)

        def convert(cell: Cell) -> tuple[list[np.ndarray], list[int]]:
            read = [arrays.read(a, cell.index) for a in cell.row.arrays]
            return cell.row.to_tensors(read, wanted[cell.tensors[0]][0]), saved_sums.of(cell, read)

        def write(cell: Cell, made: Sequence[np.ndarray]) -> None:
            for name, numbers in zip(cell.tensors, made, strict=True):
                laid[name].write(numbers)

        return convert, write, lambda cell: [laid[name].read() for name in cell.tensors]

    metadata = folder / "checkpoints" / str(step) / "_CHECKPOINT_METADATA"
    identity = {"from": _stamp([metadata]), "config": said}
    target = _check_target(out, sum(map(nbytes, todo)))
    Work(target, identity, prepare, open_, todo, nbytes, saved_sums.differing).do()
    print(f"{out}: {len(wanted)} tensors of step {step}, {sum(map(nbytes, todo)) / 1e9:.2f} GB compared")
    if config.data.tokenizer != "bytes" and not tokenizer.is_file():
        print(f"data.tokenizer={tokenizer} is not there: {out} has the tokenizer that {beside} has, if any")


def _computed_with(config: Config, arrays: parts.Parts) -> dict[str, np.dtype]:
    """Of each array, the smaller dtype of the one it is stored in, and the one that the run computes with it in."""
    declared = params.flatten(layout.declare(config.model))
    stored = {name: arrays.dtype(name) for name in arrays.arrays}
    used = {f"params.{path}": p.stored_in(config.precision.compute) for path, p in declared.items()}
    return {name: min(dtype, used.get(name, dtype), key=lambda d: d.itemsize) for name, dtype in stored.items()}


def _special_tokens(config: Config, beside: pathlib.Path) -> dict[str, Any]:
    """As the config.json beside the tokenizer has them, but that documents end as those of the training."""
    found: dict[str, Any] = dict.fromkeys(settings.TOKENS)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        given = json.loads((beside / "config.json").read_text("utf-8"))
        found = {key: given.get(key) for key in settings.TOKENS}
    ends = found["eos_token_id"] if isinstance(found["eos_token_id"], list) else [found["eos_token_id"]]
    with contextlib.suppress(DataError):
        eos = load_tokenizer(config.data.tokenizer).eos
        if ends == [None] or (config.data.tokenizer != "bytes" and eos not in ends):
            found["eos_token_id"] = eos
    return found


# ------------------------------------------------------------------------------------------ the command


def main(args: list[str]) -> int:
    """Runs the command; returns its exit code: 2 for a mistake, 1 for damage, 3 if interrupted."""
    jax.config.update("jax_platforms", "cpu")
    logging.set_verbosity(logging.ERROR)  # Orbax warns that there is nothing to merge
    try:
        match args[1:]:
            case ["from_hf", source, out]:
                from_hf(source, out)
            case ["to_hf", run, out]:
                to_hf(run, out, flags.FLAGS.step)
            case _:
                raise UseError(USAGE)
    except _MISTAKES as error:
        print(error, file=sys.stderr)
        return 2
    except (DamageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    flags.DEFINE_integer("step", None, "For to_hf: of the checkpoint; by default the latest.")
    command.run(main)
