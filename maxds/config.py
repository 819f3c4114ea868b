"""Every knob of a run but its model's (`architecture.py`): its type, its default, its meaning, and the checks between.

A check lives in the smallest section that sees both sides of it; `loader.load` reports all of them together, with the
file and the line.
"""

import itertools
import math
from typing import Literal

from etils import epath

from maxds.architecture import Model
from maxds.section import positive, require, section


@section
class Mesh:
    """Device mesh. Sizes are numbers of devices; one axis may be -1: whatever is left."""

    data: int = 1  # replicas; across slices this axis runs over DCN
    fsdp: int = -1  # weights, gradients and optimizer state are split over it
    expert: int = 1  # routed experts are split over it
    context_parallel: bool = False  # and each sequence, too: for those of which a device cannot hold two
    cpu_devices: int | None = None  # train on this many virtual CPU devices

    def __post_init__(self):
        sizes = {"data": self.data, "fsdp": self.fsdp, "expert": self.expert}
        require(
            *positive(self, "cpu_devices?"),
            *((n > 0 or n == -1, f"{k}={n} must be positive, or -1 for what is left") for k, n in sizes.items()),
            (list(sizes.values()).count(-1) <= 1, f"only one axis may be -1, not {sizes}"),
        )


# What a decoder layer can keep for its backward pass, in the order it is produced (schedule.keep, schedule.offload).
KeptName = Literal[
    "attention_input", "q_latent", "kv_latent", "query", "key", "value", "attention", "mlp_input", "mlp_up",
    "dispatch_input", "shared_up", "dispatched", "expert_up", "everything",
]  # fmt: skip
# Of these, what `batch_split` can keep: what enters a stage, and what its kernels compute.
STAGE_NAMES = "attention_input", "attention", "mlp_input", "mlp_up", "dispatch_input", "expert_up"


@section
class Schedule:
    kind: Literal["plain", "batch_split"] = "batch_split"
    # Routed rows a device makes room for, as a multiple of its even share. Never drops a token:
    # what overflows is computed in further rounds.
    capacity: float = 1.5
    # Kept for the backward pass, which computes everything else again. A layer's input and its routing are always kept;
    # `everything` (of kind=plain) leaves nothing to compute again.
    keep: tuple[KeptName, ...] = STAGE_NAMES
    offload: tuple[KeptName, ...] = ()  # kept in host memory instead of the device's
    # Where Engram's tables lie, with their gradients and optimizer state; the host reads and updates what it has.
    tables: Literal["device", "host"] = "device"

    def __post_init__(self):
        unknown = [name for name in (*self.keep, *self.offload) if name not in STAGE_NAMES]
        require(
            (self.capacity > 0, f"capacity={self.capacity} must be positive"),
            (
                self.kind != "batch_split" or not unknown,
                f"{unknown} cannot be kept by kind=batch_split; it can keep {', '.join(STAGE_NAMES)}",
            ),
            (
                "everything" not in self.offload and ("everything" not in self.keep or not self.offload),
                f"keep={list(self.keep)} leaves nothing to offload={list(self.offload)}: name what is to be kept",
            ),
        )

    @property
    def on_device(self) -> tuple[KeptName, ...]:
        """What is kept in the device's memory."""
        return tuple(name for name in self.keep if name not in self.offload)


Dtype = Literal["float32", "bfloat16"]
_SMALLEST = 2.0**-126  # normal number of both


@section
class Precision:
    params: Dtype = "float32"  # in bfloat16, what a step changes is rounded up or down by chance, and right on average
    grads: Dtype = "float32"  # of gradients, to which those of each part of a batch are added
    compute: Dtype = "bfloat16"  # of activations and gathered weights; router, norms and losses stay in float32
    # fp8_experts: routed experts' matmuls, their gathered weights and dispatched tokens in float8: e4m3 forward, e5m2
    # gradients. fp8: the layers' other matmuls, too, but not router, attention kernel, embedding and head. TPU7x
    # multiplies in it; older TPUs and CPUs convert, to no gain.
    matmul: Literal["compute", "fp8_experts", "fp8"] = "compute"
    reduce: Dtype = "float32"  # of sums of gradients over `fsdp` and `expert`: ICI
    reduce_dcn: Dtype = "float32"  # of sums of gradients over `data`, which across slices is DCN

    @property
    def float8(self) -> bool:
        """Whether routed experts are in float8, and what travels for them."""
        return self.matmul != "compute"


LOSS_WEIGHTS = "z_loss", "mtp", "balance", "indexer", "router_bias_rate"


@section
class LossChange:
    """Weights of the loss from some step on; null: as before."""

    after_steps: int
    z_loss: float | None = None
    mtp: float | None = None
    balance: float | None = None
    indexer: float | None = None
    router_bias_rate: float | None = None

    @property
    def weights(self) -> dict[str, float]:
        """Those that it sets."""
        found = {name: getattr(self, name) for name in LOSS_WEIGHTS}
        return {name: value for name, value in found.items() if value is not None}

    def __post_init__(self):
        require(
            (self.after_steps > 0, f"after_steps={self.after_steps} must be positive"),
            (len(self.weights) > 0, f"after_steps={self.after_steps} without any of {', '.join(LOSS_WEIGHTS)}"),
            *((value >= 0, f"{name}={value} must not be negative") for name, value in self.weights.items()),
        )


@section
class Loss:
    chunk_tokens: int = 2048  # logits live for this many tokens of a device at a time
    z_loss: float = 0.0  # weight of mean(logsumexp(logits)^2)
    mtp: float = 0.0  # weight of the mean MTP loss (V3: 0.3, then 0.1)
    balance: float = 0.0  # sequence-wise balance loss, V3 eq. 17-20 (alpha; V3: 1e-4)
    indexer: float = 0.0  # how far indexers are from attention, V3.2 section 2.1.1: KL of a token, summed over layers
    router_bias_rate: float = 0.0  # aux-loss-free balancing (gamma; V3: 1e-3)
    later: tuple[LossChange, ...] = ()  # how these weights change, in the order of steps

    def __post_init__(self):
        require(
            (self.chunk_tokens > 0, f"chunk_tokens={self.chunk_tokens} must be positive"),
            *((getattr(self, k) >= 0, f"{k}={getattr(self, k)} must not be negative") for k in LOSS_WEIGHTS),
            *(
                (one.after_steps < next_one.after_steps, f"later: {next_one.after_steps} follows {one.after_steps}")
                for one, next_one in itertools.pairwise(self.later)
            ),
            *(
                (getattr(self, k) > 0, f"later=[{change.after_steps} steps: {k}] changes what is 0 at first")
                for change in self.later
                for k in change.weights
            ),
        )


@section
class Optimizer:
    kind: Literal["adamw", "muon"] = "adamw"
    lr: float
    lr_schedule: Literal["cosine", "wsd", "wsd_cosine", "deepseek_v3"] = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.1  # wsd, wsd_cosine: the share of the steps spent decaying
    min_lr_ratio: float = 0.1  # all but deepseek_v3: last learning rate / lr
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    # Newton-Schulz. jordan: 5 steps, after which singular values are near 1; deepseek_v4: 8, and 2 that make them 1
    muon_iteration: Literal["jordan", "deepseek_v4"] = "jordan"
    muon_rms: float = 0.2  # of an update: as AdamW's, so that it can keep its learning rate and decay; V4: 0.18
    weight_decay: float = 0.1
    clip: float | None = 1.0  # global gradient norm
    # Skip a step whose gradient norm exceeds this multiple of the running mean, where it then counts as that multiple:
    # norms that stay larger are spikes for some steps only
    skip_spike: float | None = None
    # QK-Clip: after a step, heads whose largest attention score (as the softmax is given it) exceeded this have their
    # queries and keys scaled down to it. 100 in Kimi K2. null: none
    qk_clip: float | None = None
    state_dtype: Dtype = "float32"
    # Where the state lies while gradients are computed; that of Engram's tables lies where these do.
    state_memory: Literal["device", "host"] = "device"
    # Where weights lie, but for Engram's tables; host, only with the state: devices compute with a copy, of what layers
    # multiply by in `precision.compute`, that is made anew each step.
    params_memory: Literal["device", "host"] = "device"
    accumulate_steps: int = 1  # the global batch is processed in this many parts
    # Which weights and router biases change: patterns of their paths, as --describe names them, where `*` matches dots
    # too. What is frozen has no decay, no optimizer state and no part in the gradient norm.
    train: tuple[str, ...] = ("*",)

    def __post_init__(self):
        least = math.sqrt(_SMALLEST / (1 - self.b2)) if self.b2 < 1 else 0.0  # else it is b2 that is refused
        require(
            *positive(self, "lr muon_rms clip? qk_clip? accumulate_steps"),
            (self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps} must not be negative"),
            (0 < self.decay_fraction <= 1, f"decay_fraction={self.decay_fraction} must be in (0, 1]"),
            (0 <= self.min_lr_ratio <= 1, f"min_lr_ratio={self.min_lr_ratio} must be in [0, 1]"),
            *((0 <= getattr(self, k) < 1, f"{k}={getattr(self, k)} must be in [0, 1)") for k in ("b1", "b2")),
            (0 <= self.muon_momentum < 1, f"muon_momentum={self.muon_momentum} must be in [0, 1)"),
            (
                self.eps >= least,
                f"eps={self.eps} must be {least:.1e} at least: squares of gradients as small are zero in float32",
            ),
            (self.weight_decay >= 0, f"weight_decay={self.weight_decay} must not be negative"),
            (
                self.skip_spike is None or self.skip_spike > 1,
                f"skip_spike={self.skip_spike} must exceed 1, or be null",
            ),
            (
                self.params_memory == "device" or self.state_memory == "host",
                "params_memory=host leaves the larger state on the devices; set state_memory=host, too",
            ),
            (bool(self.train), f"train={list(self.train)} leaves nothing to train; name some, such as ['*indexer*']"),
        )


_ONLY_OF = {"pattern": ("text", "arrayrecord"), "split": ("tfds",), "feature": ("tfds",), "documents": ("synthetic",)}


@section
class Source:
    """One component of the training data."""

    kind: Literal["text", "tfds", "arrayrecord", "synthetic"]
    # text, arrayrecord: files and folders, one document a file or a record; tfds: the folder of a prepared
    # dataset, its version included; text also knows `stdlib`: the sources of the running Python's standard library
    path: tuple[str, ...] = ()
    pattern: str = "*"  # text, arrayrecord: which files of a folder, by their path within it; `*` matches `/` too
    split: str = "train"  # tfds
    feature: str = "text"  # tfds: the key of the text
    documents: int = 4096  # synthetic: how many, of 288 tokens on average
    weight: float = 1.0  # share of the rows

    def __post_init__(self):
        require(
            *positive(self, "weight documents"),
            (
                bool(self.path) or self.kind == "synthetic",
                f"kind={self.kind} needs a path",
            ),
            (
                self.kind != "tfds" or len(self.path) <= 1,
                f"kind=tfds takes one path, not {list(self.path)}; make the others sources of their own",
            ),
            *(
                (
                    self.kind in kinds or getattr(self, key) == getattr(type(self), key),
                    f"{key}={getattr(self, key)} is of kind={' and '.join(kinds)} only, not of {self.kind}; drop it",
                )
                for key, kinds in _ONLY_OF.items()
            ),
        )


@section
class Ramp:
    """A smaller global batch, shorter sequences, or both, until so many batches are taken."""

    until_step: int  # batches that a run has gone back past count as taken
    global_batch: int | None = None  # null: the whole
    sequence_length: int | None = None  # rows of data.sequence_length are cut into sequences of it; null: the whole

    @property
    def sizes(self) -> dict[str, int]:
        """Those that it sets."""
        found = {"global_batch": self.global_batch, "sequence_length": self.sequence_length}
        return {name: size for name, size in found.items() if size is not None}

    def __str__(self) -> str:
        return f"{' '.join(f'{name}={size}' for name, size in self.sizes.items())} until {self.until_step}"

    def __post_init__(self):
        require(
            (self.until_step > 0, f"until_step={self.until_step} must be positive"),
            (len(self.sizes) > 0, f"until_step={self.until_step} without any of global_batch, sequence_length"),
            *((size > 0, f"{name}={size} must be positive") for name, size in self.sizes.items()),
        )


@section
class Data:
    sources: tuple[Source, ...]
    tokenizer: str = "bytes"  # or the path of a Hugging Face tokenizer.json or a SentencePiece .model
    sequence_length: int
    global_batch: int  # sequences in one optimizer step
    # Smaller batches at first, of fewer of the parts that optimizer.accumulate_steps makes, and shorter sequences: one
    # entry after the other, in the order of steps. Evaluation is of whole sequences
    ramp: tuple[Ramp, ...] = ()
    since_step: int = 0  # after which this data begins: what the checkpoint of that step has seen may be other data
    eval_fraction: float = 0.0  # share of the documents held out
    workers: int = 4  # reading threads of a process

    def __post_init__(self):
        require(
            *positive(self, "sequence_length global_batch workers"),
            (bool(self.sources), "sources is empty; name at least one"),
            (self.since_step >= 0, f"since_step={self.since_step} must not be negative"),
            (0 <= self.eval_fraction < 1, f"eval_fraction={self.eval_fraction} must be in [0, 1)"),
            *(
                (
                    one.until_step < following.until_step,
                    f"ramp=[…, {one}, {following}, …] is not in the order of steps",
                )
                for one, following in itertools.pairwise(self.ramp)
            ),
            *(
                (
                    size < getattr(self, name),
                    f"ramp=[…, {entry}, …] must be of less than {name}={getattr(self, name)}",
                )
                for entry in self.ramp
                for name, size in entry.sizes.items()
            ),
            *(
                (
                    self.sequence_length % (entry.sequence_length or 1) == 0,
                    f"ramp=[…, {entry}, …] must be of a length that divides sequence_length={self.sequence_length}",
                )
                for entry in self.ramp
            ),
        )

    @property
    def batch_sizes(self) -> list[int]:
        """Sequences of a batch, of each entry of `ramp` and of those that follow; cut or not, a row counts as one."""
        return [*(entry.global_batch or self.global_batch for entry in self.ramp), self.global_batch]

    def sequences(self, number: int) -> int:
        """How many the batch of this number, counted from 0, has."""
        return self.batch_sizes[sum(entry.until_step <= number for entry in self.ramp)]

    def sequences_before(self, number: int) -> int:
        """How many all batches before that of this number have."""
        ends = [0, *(min(entry.until_step, number) for entry in self.ramp), number]
        spans = zip(itertools.pairwise(ends), self.batch_sizes, strict=True)
        return sum((end - begin) * size for (begin, end), size in spans)

    @property
    def grows(self) -> bool:
        """Whether some batches have fewer sequences."""
        return min(self.batch_sizes) < self.global_batch

    def length(self, number: int) -> int:
        """What the sequences of the batch of this number are cut into; `sequence_length` where they are whole."""
        found = next((entry.sequence_length for entry in self.ramp if number < entry.until_step), None)
        return found or self.sequence_length


@section
class Eval:
    every_steps: int | None = None  # null: never
    batches: int = 8

    def __post_init__(self):
        require(
            *positive(self, "every_steps? batches"),
        )


@section
class Checkpoint:
    every_steps: int | None = 1000  # null: only at the end and when preempted
    every_minutes: float | None = None
    keep_last: int = 2
    keep_every: int | None = None  # steps; these are never deleted
    # Where loss or gradient are not finite five steps in a row, the run goes back to the newest checkpoint at least so
    # many steps before the first of them, and on with the data after the last. null: it ends, with exit code 4
    rollback_steps: int | None = None
    # A folder of each host, in memory or on a disk of its own, and every how many steps each process leaves there what
    # it holds of the state, twice at most: a restart goes on from there where that is newer than what run_dir has
    local_dir: str | None = None
    local_every_steps: int | None = None

    def __post_init__(self):
        back, every = self.rollback_steps, self.every_steps
        reach = None if every is None or self.every_minutes or self.keep_every else (self.keep_last - 1) * every + 1
        require(
            *positive(self, "every_steps? every_minutes? keep_every? rollback_steps? local_every_steps? keep_last"),
            (
                (self.local_dir is None) == (self.local_every_steps is None),
                f"local_dir={self.local_dir} with local_every_steps={self.local_every_steps}: set both, or neither",
            ),
            (
                self.local_dir is None or "://" not in self.local_dir,
                f"local_dir={self.local_dir} must be a folder of the host, such as /local",
            ),
            (
                back is None or every is not None or self.every_minutes is not None,
                f"rollback_steps={back} needs checkpoints to go back to; set every_steps or every_minutes",
            ),
            (
                back is None or reach is None or back <= reach,
                f"rollback_steps={back} may go further back than the oldest checkpoint: keep_last={self.keep_last} of "
                f"every_steps={every} reach {reach} steps for certain; raise keep_last, or set keep_every",
            ),
        )


@section
class Profile:
    """A trace of some steps, written to RUN/profile."""

    start: int
    steps: int = 3

    def __post_init__(self):
        require(
            (self.start >= 1, f"start={self.start} must be at least 1"),
            (self.steps > 0, f"steps={self.steps} must be positive"),
        )


@section
class Sample:
    """Text generated from the trained model at the end of the run, into RUN/sample.txt."""

    prompt: str
    tokens: int = 200
    temperature: float = 0.8  # 0: always the most probable token
    top_p: float = 0.95  # draws from the most probable tokens that together have this probability
    seed: int = 0

    def __post_init__(self):
        require(
            (bool(self.prompt), "prompt is empty; a model continues text, so give it some"),
            (self.tokens > 0, f"tokens={self.tokens} must be positive"),
            (self.temperature >= 0, f"temperature={self.temperature} must not be negative"),
            (0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]"),
        )


@section
class Config:
    run_dir: str  # a folder, or gs://…: checkpoints, metrics, config.yaml
    steps: int
    seed: int = 0
    model: Model
    data: Data
    optimizer: Optimizer
    loss: Loss
    mesh: Mesh
    schedule: Schedule
    precision: Precision
    eval: Eval
    checkpoint: Checkpoint
    # The folder of a run whose weights and router biases a new run begins with, at step 0 of its own; weights that it
    # has not are drawn, such as those of an indexer. A run that has checkpoints goes on with them instead.
    start_from: str | None = None
    profile: Profile | None = None
    sample: Sample | None = None
    log_every_steps: int = 1
    # json: each line is an object that names process and host, for what collects lines.
    log_format: Literal["text", "json"] = "text"
    # Every process serves the figures of its last step at http://HOST:PORT/metrics, for Prometheus. null: none does
    prometheus_port: int | None = None
    # The first process sends the config and what TensorBoard gets to this project of Weights & Biases, as the variables
    # WANDB_* say (WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE=offline, …). null: no one does
    wandb: str | None = None
    # Every so many steps, one is computed twice and compared to the bit, and so are the devices' copies of the state:
    # for chips that compute wrongly and say nothing. null: never
    verify_every_steps: int | None = None
    # A process that finishes no step, evaluated batch, restore or save for so long tells where it is, and exits with 6.
    # Opening the data, initializing and compiling the step may take longer. null: it waits for ever
    hang_seconds: float | None = 1800
    # A folder of compiled programs and of what else is worked out once. `auto`: RUN/compile_cache where run_dir is in a
    # bucket, for a restart may be on fresh machines; else ~/.cache/maxds, for new runs on this machine. null: none
    compile_cache: str | None = "auto"
    # Of the train step, `name=value` each, on top of what mesh.py sets for the kind of device; `name=` drops one.
    compiler_options: tuple[str, ...] = ()

    def __post_init__(self):
        require(*self._own(), *self._batch(), *self._model())

    def _own(self) -> tuple[tuple[bool, str], ...]:
        return (
            *positive(self, "steps log_every_steps verify_every_steps? hang_seconds?"),
            *(
                ("=" in option.lstrip("="), f"compiler_options={option} must be name=value, or name= to drop a default")
                for option in self.compiler_options
            ),
            (
                self.prometheus_port is None or 0 < self.prometheus_port < 2**16,
                f"prometheus_port={self.prometheus_port} must be from 1 to 65535, or null",
            ),
            (
                self.eval.every_steps is None or self.data.eval_fraction > 0,
                f"eval.every_steps={self.eval.every_steps} needs data.eval_fraction above 0",
            ),
        )

    def _batch(self) -> tuple[tuple[bool, str], ...]:
        data, parts = self.data, self.optimizer.accumulate_steps
        return (
            (
                data.sequence_length <= self.model.max_position_embeddings,
                f"data.sequence_length={data.sequence_length} exceeds "
                f"model.max_position_embeddings={self.model.max_position_embeddings}",
            ),
            (
                data.global_batch % parts == 0,
                f"data.global_batch={data.global_batch} is not divisible by optimizer.accumulate_steps={parts}",
            ),
            *(
                (
                    parts * (entry.global_batch or 0) % data.global_batch == 0,
                    f"data.ramp=[…, {entry}, …] is not of whole parts, of data.global_batch={data.global_batch} / "
                    f"optimizer.accumulate_steps={parts} sequences",
                )
                for entry in data.ramp
            ),
        )

    def _model(self) -> tuple[tuple[bool, str], ...]:
        """What other sections say of the model's kinds."""
        model, loss, mesh = self.model, self.loss, self.mesh
        return (
            (
                (loss.mtp > 0) == (model.num_nextn_predict_layers > 0),
                f"loss.mtp={loss.mtp} with model.num_nextn_predict_layers={model.num_nextn_predict_layers}: "
                f"set both, or neither",
            ),
            (
                (loss.indexer > 0) == (model.index_topk is not None),
                f"loss.indexer={loss.indexer} with model.index_topk={model.index_topk}: set both, or neither",
            ),
            (
                loss.router_bias_rate == 0 or model.has_router_bias,
                f"loss.router_bias_rate={loss.router_bias_rate} needs model.topk_method=noaux_tc, "
                f"not {model.topk_method}",
            ),
            (
                self.optimizer.qk_clip is None or model.compress_ratios is None,
                f"optimizer.qk_clip={self.optimizer.qk_clip} is of multi-head latent attention, and "
                f"model.compress_ratios of V4's, which normalizes its queries: set qk_clip to null",
            ),
            (
                self.schedule.tables == "device" or bool(model.engram_layer_ids),
                f"schedule.tables={self.schedule.tables} has no effect without model.engram_layer_ids",
            ),
            *(
                (
                    not (mesh.context_parallel and found),
                    f"mesh.context_parallel=true does not go with {what}, which needs the tokens before on the same "
                    f"device: set it to false",
                )
                for what, found in {
                    "model.index_topk": model.index_topk is not None,
                    "model.compress_ratios": model.compress_ratios is not None,
                    "model.engram_layer_ids": bool(model.engram_layer_ids),
                }.items()
            ),
            (
                mesh.expert < 1 or model.n_routed_experts % mesh.expert == 0,
                f"model.n_routed_experts={model.n_routed_experts} is not divisible by mesh.expert={mesh.expert}; "
                f"try mesh.expert={math.gcd(model.n_routed_experts, max(mesh.expert, 1))}",
            ),
        )

    @property
    def folder(self) -> epath.Path:
        """`run_dir`, whose `~` is the home folder."""
        return epath.Path(self.run_dir).expanduser()

    @property
    def in_bucket(self) -> bool:
        """Whether `run_dir` is the address of a folder of an object store, such as gs://…"""
        return "://" in self.run_dir

    @property
    def compile_cache_dir(self) -> str | None:
        """Where compiled programs are kept; None: nowhere."""
        if self.compile_cache != "auto":
            return self.compile_cache
        return f"{self.run_dir.rstrip('/')}/compile_cache" if self.in_bucket else "~/.cache/maxds"
