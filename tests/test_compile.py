"""The command, as people call it: a compilation for a TPU that is not here, and what it refuses."""

import collections
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from maxds.aot import cost, hlo

TINY = pathlib.Path(__file__).with_name("tiny.yaml")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_", "XLA_"))}
VMEM = "xla_tpu_scoped_vmem_limit_kib"
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPU, is not installed"
)


def command(*args, program=("-m", "maxds.compile")):
    return subprocess.run([sys.executable, *program, *map(str, args)], env=CLEAN, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Text and figures of a tiny model on the smallest topology, and the picture."""
    folder = tmp_path_factory.mktemp("compiled")
    files = f"--json={folder}/out.json", f"--plot={folder}/out.png", f"--aot={folder}/out.aot"
    result = command(TINY, "--topology=tpu7x:2x2x1", *files, "loss.balance=0", "schedule.keep=[attention]")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout, json.loads((folder / "out.json").read_text()), folder / "out.png"


@pytest.mark.newest
@needs_libtpu
def test_a_step_is_compiled_for_a_tpu_that_is_not_here(compiled):
    text, found, picture = compiled
    assert (found["devices"], found["device_kind"]) == (8, "TPU7x")
    assert (found["config"], found["overrides"]) == (str(TINY), ["loss.balance=0", "schedule.keep=[attention]"])
    assert found["mesh"] == {"data": 2, "fsdp": 2, "expert": 2}
    fit = found["fit"]
    assert fit["fits"] and 0 < fit["arguments"] < fit["total"] < fit["limit"]
    assert len(fit["buffers"]) == 10
    assert any("state.params" in buffer["op_name"] for buffer in fit["buffers"])
    assert text.startswith("tpu7x:2x2x1: 8 devices (TPU7x), data=2 fsdp=2 expert=2\n")
    assert "Fit: it fits" in text and "Assumptions" in text
    assert found["spare"]["overrides"] == ["schedule.keep=[attention,mlp_input,mlp_up,dispatch_input,expert_up]"]
    assert 0 < -found["spare"]["saved"] < found["spare"]["left"] == fit["limit"] - fit["peak"]
    left = f"{found['spare']['left'] / 2**30:.3f}"
    assert re.search(rf"what could be kept.*\n  'schedule\.keep=.*' +0\.000 +{left} +0\.000\n", text)
    assert picture.read_bytes().startswith(b"\x89PNG")


LOAD = """
import sys
from maxds import loader, mesh, step
from maxds.aot import executable, topology
from maxds.config import Config

topology.prepare()
config, _ = loader.load(Config, sys.argv[1], ["loss.balance=0", "schedule.keep=[attention]"])
stepper = step.make(config, mesh.make(config.mesh, topology.devices("tpu7x:2x2x1")))
try:
    executable.load(sys.argv[2], stepper)
except executable.ExecutableError as error:
    print(error)
"""


@pytest.mark.newest
@needs_libtpu
def test_its_executable_is_known_again_by_another_process_and_loaded_by_devices_only(compiled):
    text, _, picture = compiled
    path = picture.with_suffix(".aot")
    assert text.endswith(f" bytes, for python -m maxds.train … --aot={path}\n")
    result = command(TINY, path, program=("-c", LOAD))
    assert result.stdout.startswith(f"--aot={path} cannot be loaded (INVALID_ARGUMENT: PjRtCompiler must be")


@pytest.mark.newest
@needs_libtpu
def test_the_figures_agree_with_each_other(compiled):
    _, found, _ = compiled
    cost = found["cost"]
    step, exposed = cost["step_seconds"], cost["exposed_communication_seconds"]
    assert step == pytest.approx(cost["compute_seconds"] + exposed + cost["stalled_seconds"])
    assert exposed == pytest.approx(sum(c["exposed_seconds"] for c in cost["collectives"]))
    assert 0 < cost["mfu"] < 1
    assert cost["executed_flops"] >= cost["model_flops"] > 0
    tokens = 16 * 32 / 8
    assert cost["tokens_per_second_per_device"] == pytest.approx(tokens / step)
    assert cost["tokens_per_second_per_chip"] == pytest.approx(2 * tokens / step)


@pytest.mark.newest
@needs_libtpu
def test_communication_is_told_apart_by_mesh_axis(compiled):
    _, found, _ = compiled
    seen = {(c["collective"], *c["axes"]) for c in found["cost"]["collectives"]}
    assert {("all-gather", "fsdp"), ("all-gather", "expert"), ("reduce-scatter", "expert")} <= seen
    assert found["cost"]["dcn_bytes"] == 0


@pytest.mark.newest
@needs_libtpu
def test_every_source_is_in_the_package(compiled):
    _, found, _ = compiled
    sources = {entry["source"] for entry in found["cost"]["slowest"] if entry["source"]}
    assert sources and all(source.startswith("maxds/") for source in sources)


@pytest.mark.newest
@needs_libtpu
def test_in_float8_weights_and_tokens_are_gathered_by_the_byte_and_grouped_matmuls_read_bytes():
    program = (
        "import sys; from maxds import config, loader, mesh, step; from maxds.aot import topology\n"
        "topology.prepare(); c, _ = loader.load(config.Config, sys.argv[1], sys.argv[2:])\n"
        "stepper = step.make(c, mesh.make(c.mesh, topology.devices('tpu7x:2x2x1')))\n"
        "print(stepper.compile().as_text())"
    )
    one_layer = "model.num_hidden_layers=1", "model.first_k_dense_replace=0", "loss.balance=0"
    result = command(TINY, "precision.matmul=fp8", *one_layer, program=("-c", program))
    assert (result.returncode, result.stderr) == (0, "")
    module = hlo.parse(result.stdout)
    found = [(c, i) for c in module.computations.values() for i in c.instructions]
    gathers = collections.Counter(i.arrays[0].dtype for _, i in found if i.opcode.startswith("all-gather"))
    matrices = 11  # q_down, q_up, kv_down, k_rope, k_up, v_up, out; up and down of shared and of routed experts
    assert gathers["f8e4m3fn"] >= matrices + 2  # at least, whatever is gathered again: tokens of two microbatches
    assert gathers["f8e5m2"] == 4  # the gradients of combine, of the first round of experts and of further ones
    kernels = [(c, i) for c, i in found if cost.is_grouped_matmul(i)]
    assert kernels
    for computation, kernel in kernels:
        operands = [computation.by_name[name].arrays[0].dtype for name in kernel.operands]
        assert sum(dtype.startswith("f8") for dtype in operands) == 2, operands


@needs_libtpu
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--topology=ironwood:4x4x8"], "no TPU is named ironwood; known are v5p, v6e, tpu7x"),
        (["--topology=tpu7x:3x5x1"], "the compiler knows no such topology"),
        (["--topology=tpu7x:4x4x4", "mesh={data: 2, fsdp: 8, expert: 8}"], "4 x 4 x 4 chips x 2 devices: an axis"),
        (["--topology=tpu7x:2x2x1", "mesh.data=3"], "mesh.expert=2 does not fit the 8 devices"),
        (["--topology=tpu7x:2x2x1", "compiler_options=[xla_no_such=1]"], "does not know the option 'xla_no_such'"),
        (["--topology=v6e:2x4", f"compiler_options=[{VMEM}=abc]"], f"cannot read 'abc' as a value of {VMEM} of"),
        (["--topology=v6e:2x4", f"compiler_options=[{VMEM}=1]"], f"no tiles that fit into VMEM; raise {VMEM} of"),
        (["--topology=tpu7x:2x2x1", "--plot=layer.pdf"], "--plot=layer.pdf: give a file that ends in .png or .html"),
        (["--topology=tpu7x:2x2x1", "--plot=/dev/null/x.png"], "--plot=/dev/null/x.png cannot be written: File exists"),
        (["--topology=tpu7x:2x2x1", "--json=/dev"], "--json=/dev cannot be written: Is a directory"),
        ([], "usage: python -m maxds.compile CONFIG.yaml --topology="),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_a_line(args, message):
    result = command(TINY, *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_without_libtpu_the_remedy_is_named():
    program = "import sys; sys.modules['libtpu'] = None\nfrom maxds import command, compile; command.run(compile.main)"
    result = command(TINY, "--topology=tpu7x:2x2x1", program=("-c", program))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        '--topology=tpu7x:2x2x1 needs the TPU compiler, and libtpu is not installed: pip install "maxds[tpu]"\n'
    )


@needs_libtpu
def test_without_the_kernel_of_tokamax_the_remedy_is_named():
    missing = "tokamax._src.ops.ragged_gather_reduce"
    program = (
        f"import sys; sys.modules['{missing}'] = None\nfrom maxds import command, compile\ncommand.run(compile.main)"
    )
    result = command(TINY, "--topology=tpu7x:2x2x1", "precision.compute=bfloat16", program=("-c", program))
    assert (result.returncode, result.stdout) == (2, "")
    assert "the tokamax of Python 3.12" in result.stderr and "Traceback" not in result.stderr


TRACE = """
import sys
from maxds import loader, mesh, step
from maxds.aot import topology
from maxds.config import Config

topology.prepare()
config, _ = loader.load(Config, sys.argv[1], sys.argv[3:])
step.make(config, mesh.make(config.mesh, topology.devices(sys.argv[2]))).lower()
"""
BFLOAT16 = "precision.compute=bfloat16", "model.hidden_size=128"


@needs_libtpu
@pytest.mark.parametrize("name", ["v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_the_kernels_of_every_tpu_take_its_step_in_bfloat16(name):
    result = command(TINY, name, *BFLOAT16, program=("-c", TRACE))
    known = name.startswith("tpu7x") and sys.version_info < (3, 12)  # the kernel of tokamax is missing there
    assert (result.returncode, "KernelError" in result.stderr) == ((1, True) if known else (0, False)), result.stderr


KERNELS = """
import functools
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from maxds import loader, trial
from maxds.aot import topology
from maxds.config import Config
from maxds.model.tiles import Turn, causal, gates, groups, home, sums, window
from maxds.quantize import BACKWARD, FORWARD, Scaled

topology.prepare()
alone = topology.devices(sys.argv[2])[:1]
device = SingleDeviceSharding(alone[0])

def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

length, queries, f32 = 4096, 512, jnp.float32
qk, v, lse = of(8, length, 192), of(8, length, 128), of(8, length, dtype=f32)
keys = of(8, length, 128), of(length, 64)
segments, bits, limit = of(length, dtype=jnp.int32), of(length, length // 8, dtype=jnp.uint8), of(dtype=jnp.int32)
q, heads, k = of(8, length, 128), of(8, length, dtype=f32), of(length, 128)
cut = sums.Cut(of(2, dtype=jnp.int32), queries)
entries = 1024
of_entries = of(entries, dtype=jnp.int32)
of_bits, angles = of(length, entries // 8, dtype=jnp.uint8), of(length, 64, dtype=f32)
turn = Turn(angles, angles, 1e-6)
sight = window.Sight(segments, of_entries, of_entries, of_bits, turn, 128, 4)
wide, sinks = of(8, length, 512), of(8, dtype=f32)
of_window = wide, (of(length, 512), of(entries, 512)), sinks, sight, (wide, lse), wide
def of_rows(*args):
    return jax.tree.map(lambda a: of(2, *a.shape, dtype=a.dtype), args)

def of_long_rows(*args):
    return jax.tree.map(lambda a: of(1, *(131_072 if n == length else n for n in a.shape), dtype=a.dtype), args)

def attend_backward(q, k, v, sight, kept):
    return causal.attend_backward(q, k, v, sight, kept, kept[0])

of_all, of_selected = (causal.Sight(segments, selected, angles, angles) for selected in (None, bits))
gated = of(1024, 4096), of(1024, dtype=f32), limit, of(1024, 2048)
by_row = of(1024, 1, dtype=f32)
up, dy = Scaled(gated[0], by_row), Scaled(gated[3], by_row)
sizes = of(4, dtype=jnp.int32)

def grouped(*dtypes):
    x, dy, w = (of(*shape, dtype=d) for shape, d in zip(((1024, 7168), (1024, 4096), (4, 7168, 4096)), dtypes))
    return {
        lambda *args: groups.multiply(*args, jnp.bfloat16): (x, w, sizes),
        lambda *args: groups.multiply(*args, jnp.bfloat16, transposed=True): (dy, w, sizes),
        lambda *args: groups.multiply_transposed(*args, jnp.bfloat16): (x, dy, sizes),
    }

float8 = {
    **grouped(FORWARD, BACKWARD, FORWARD),
    lambda *args: gates.rounded(*args, 10.0): (up, *gated[1:3]),
    lambda *args: gates.rounded_backward(*args, None): (up, *gated[1:3], dy),
    gates.times: (of(1024, 4096, dtype=BACKWARD), by_row, limit),
} if sys.argv[2].startswith("tpu7x") else {}
long = {  # all that grows with the rows is a table of tiles, in scalar memory: one TPU will do
    functools.partial(causal.attend): of_long_rows(qk, keys, v, of_all),
    functools.partial(attend_backward): of_long_rows(qk, keys, v, of_all, (v, lse)),
} if sys.argv[2].startswith("tpu7x") else {}
for kernel, args in {
    causal.attend: of_rows(qk, keys, v, of_selected),
    causal.attend_backward: of_rows(qk, keys, v, of_selected, (v, lse), v),
    sums.index_scores: (q, heads, k, cut),
    sums.index_scores_backward: (q, heads, k, of(queries, length, dtype=f32), cut),
    functools.partial(sums.attention_to, length): (qk, lse, qk, None, cut),
    functools.partial(sums.attention_to, entries): (wide, lse, of(1, entries, 512), turn, cut),
    window.attend: of_window[:4],
    window.attend_backward: of_window,
    lambda *args: gates.gated(*args, 10.0): gated[:3],
    lambda *args: gates.gated_backward(*args, None): gated,
    functools.partial(causal.attend): of_rows(qk, keys, v, of_all),
    attend_backward: of_rows(qk, keys, v, of_all, (v, lse)),
    home.sum_rows: (of(1024, 7168), of(1024, dtype=jnp.int32), sizes),
    **grouped(*[jnp.bfloat16] * 3),
    **float8,
    **long,
}.items():
    assert "tpu_custom_call" in jax.jit(kernel).lower(*args).compile().as_text()

trials = trial._trials(loader.load(Config, sys.argv[1], [])[0].model, False)
with jax.set_mesh(Mesh(np.array(alone), "alone")):  # what the doctor tries are these
    fn, args = trials["attention"]
    assert "attend_backward" in jax.jit(fn).lower(*(of(*a.shape) for a in args)).as_text()
"""


@pytest.mark.newest
@needs_libtpu
@pytest.mark.parametrize("name", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_compiler_of_every_tpu_takes_the_kernels_that_are_our_own(name):
    result = command(TINY, name, program=("-c", KERNELS))
    assert result.returncode == 0, result.stderr


REPLICAS = ["mesh={data: 8, fsdp: 1, expert: 1}", "model.hidden_size=1024", "model.moe_intermediate_size=2048"]


@pytest.mark.newest
@needs_libtpu
def test_what_does_not_fit_is_a_result_and_what_should_is_told(tmp_path):
    layers = "model.num_hidden_layers=64"
    result = command(TINY, "--topology=v6e:2x4", f"--json={tmp_path}/out.json", *REPLICAS, layers)
    assert (result.returncode, result.stderr) == (8, "")
    assert "it DOES NOT FIT, by " in result.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    told = [remedy["overrides"] for remedy in found["remedies"]]  # of 40 GiB of arguments, 27 are moments
    assert told == [["mesh.data=2", "mesh.fsdp=4"], ["optimizer.state_memory=host"]]
    for remedy in found["remedies"]:
        assert remedy["total"] == found["fit"]["total"] - remedy["saved"] < found["fit"]["limit"]
    assert re.search(r"what should fit.*\n  mesh\.data=2 mesh\.fsdp=4 +39\.\d+ ", result.stdout)


@pytest.mark.newest
@needs_libtpu
def test_what_is_in_host_memory_comes_to_a_tpu_though_layers_are_more_than_all_else():
    layers = "model.num_hidden_layers=64"  # of the tiles' last dimension, no layer could be copied by itself
    result = command(TINY, "--topology=v6e:2x4", *REPLICAS[:1], layers, "optimizer.state_memory=host")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.aot
@needs_libtpu
def test_what_should_fit_does_when_it_is_compiled(tmp_path):
    args = TINY, "--topology=v6e:2x4", "--fix", f"--json={tmp_path}/out.json", *REPLICAS, "model.num_hidden_layers=64"
    result = command(*args)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["fit"]["fits"] and found["mesh"] == {"data": 2, "fsdp": 4, "expert": 1}
    assert found["overrides"][-2:] == ["mesh.data=2", "mesh.fsdp=4"]
