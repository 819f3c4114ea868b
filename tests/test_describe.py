"""What --describe says of a config is exact, and said without a device."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from maxds import describe, loader, mesh, params
from maxds.config import Config
from maxds.model import layout

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def load(name, *overrides):
    return loader.load(Config, CONFIGS / f"{name}.yaml", overrides)[0]


def row(text, start):
    """The cells of the first row that starts so."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return re.split(r" {2,}", line.strip())


@pytest.mark.parametrize(
    ("name", "total", "active", "mtp"),
    [
        ("deepseek2-16b", 15_706_484_224, 2_661_150_208, 0),
        ("deepseek2-236b", 235_741_434_880, 21_375_800_320, 0),
        ("deepseek3-671b", 671_026_419_200, 37_552_297_472, 11_610_068_224),
        ("kimi-k2-1t", 1_026_408_232_448, 32_861_500_928, 0),
    ],
)
def test_counts_are_the_published_ones(name, total, active, mtp):
    found = describe.counts(load(name).model)
    assert (found["total"], found["active"], found["mtp"]) == (total, active, mtp)


def test_the_active_parameters_of_mtp_leave_out_the_experts_that_are_not_chosen():
    found = describe.counts(load("deepseek3-671b").model)
    assert found["mtp"] - found["mtp_active"] == (256 - 8) * 3 * 7168 * 2048


@pytest.mark.parametrize(
    ("name", "weights", "routed", "experts"),
    [("deepseek4-284b", 284_332_230_231, 40, 256), ("deepseek4-1.6t", 1_572_997_179_491, 58, 384)],
)
def test_v4_has_the_weights_that_transformers_counts_and_biases_and_tables_of_its_routers(
    name, weights, routed, experts
):
    biases, tables = routed * experts, 3 * 129280 * 6
    assert describe.counts(load(name).model)["total"] == weights + biases + tables


def test_v4_s_mtp_module_has_the_numbers_of_its_released_tensors():
    attention = 1024 * 4096 + 32768 * 1024 + 512 * 4096 + 2 * 8192 * 4096 + 64 + 512 + 1024
    streams = 2 * (24 * 16384 + 24 + 3) + 4 * 16384 + 4 + 1
    experts, joined = 257 * 3 * 2048 * 4096 + 256 * 4096 + 256, 2 * 4096**2 + 5 * 4096
    assert describe.counts(load("deepseek4-284b").model)["mtp"] == attention + streams + experts + joined


@pytest.mark.parametrize("name", ["deepseek3-671b", "deepseek4-284b"])
def test_the_weights_of_the_table_sum_to_the_counts(name):
    model = load(name).model
    rows = list(describe._weights(model))
    weights = [int(cells[3].replace(",", "")) for cells in rows if " x " not in cells[0]]
    found = describe.counts(model)
    assert sum(weights) == found["total"] + found["mtp"]


def test_a_stack_is_shown_by_the_layer_and_as_a_whole():
    text = describe.describe(load("deepseek3-671b"), 256)
    assert row(text, "moe_layers") == ["moe_layers x 58", "11,507,286,272", "667,422,603,776"]
    experts = ["experts.down", "256 x 2048 x 7168", "3,758,096,384", "217,969,590,272", "expert fsdp"]
    assert row(text, "  experts.down") == experts
    assert row(text, "  router_bias") == ["router_bias", "256", "256", "14,848", "-"]
    assert row(text, "embed") == ["embed", "129280 x 7168", "926,679,040", "fsdp"]


def test_flops_are_those_of_the_causal_formula():
    text = describe.describe(load("deepseek2-16b"))
    assert row(text, "experts") == ["experts", "10.7961", "65.8%"]
    assert re.search(r"^total +16\.4065  100\.0%$", text, re.MULTILINE)


@pytest.mark.parametrize(("state_dtype", "width"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize(("kind", "moments_of_a_matrix"), [("adamw", 2), ("muon", 1)])
def test_bytes_of_the_optimizer_are_its_moments(kind, moments_of_a_matrix, state_dtype, width):
    whole = ["mesh.data=1", "mesh.fsdp=1", "mesh.expert=1", "mesh.cpu_devices=1"]
    config = load("quickstart", f"optimizer.kind={kind}", f"optimizer.state_dtype={state_dtype}", *whole)
    weights = params.flatten(layout.declare(config.model)).values()
    moments = sum(p.size * (moments_of_a_matrix if p.dims else 2) for p in weights)
    held = int(row(describe.describe(config), "optimizer state")[1].replace(",", ""))
    assert 0 <= held - width * moments <= 32  # scalars


def test_bytes_of_a_device_shrink_with_the_axes_that_split_it():
    text = describe.describe(load("deepseek3-671b"), 256)
    routed = 59 * 256 * 3 * 7168 * 2048
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168 + (5 * 7168 + 1536 + 512)
    others = 671_026_419_200 + 11_610_068_224 - 59 * 256 - routed - norms
    assert row(text, "parameters, float32")[1] == f"{4 * (routed // 256 + others // 32 + norms):,}"


def test_a_device_holds_nothing_of_tables_that_lie_in_host_memory():
    config = load("deepseek-custom")
    numbers = sum(e.table.size for e in layout.declare(config.model).engrams.values())
    here, there = (
        describe.held(load("deepseek-custom", f"schedule.tables={where}"), {"data": 1, "fsdp": 8, "expert": 2})
        for where in ("device", "host")
    )
    gone = {name: size - there[name] for name, size in here.items()}
    own = numbers // 16 * 4
    assert gone["parameters, float32"] == gone["gradients, float32"] == own
    assert 2 * own <= gone["optimizer state, muon in float32"] <= 2 * own + 32  # and scalars
    assert sum(gone.values()) <= 4 * own + 32


def test_a_device_holds_no_optimizer_state_that_lies_in_host_memory_but_that_of_its_tables():
    axes, name = {"data": 1, "fsdp": 8, "expert": 2}, "optimizer state, muon in float32"
    config = load("deepseek-custom", "optimizer.state_memory=host")
    numbers = sum(e.table.size for e in layout.declare(config.model).engrams.values())
    scalars = 32
    assert 0 <= describe.held(config, axes)[name] - 2 * numbers // 16 * 4 <= scalars
    both = load("deepseek-custom", "optimizer.state_memory=host", "schedule.tables=host")
    assert describe.held(both, axes)[name] <= scalars
    plain = describe.held(load("deepseek3-671b", "optimizer.state_memory=host"), axes)
    assert plain["optimizer state, adamw in bfloat16"] <= scalars


def test_gathered_layers_are_in_the_compute_dtype_and_experts_stay_split():
    split, plain = (
        describe.describe(load("deepseek3-671b", f"schedule.kind={k}"), 256) for k in ("batch_split", "plain")
    )
    norms, router, experts = 2 * 7168 + 1536 + 512, 7168 * 256, 256 * 3 * 7168 * 2048
    rest = 11_507_286_272 - 256 - norms - router - experts
    layer = 4 * (norms + router) + 2 * (rest + experts // 8)
    assert row(plain, "MoE layers gathered at a time: 1")[1] == f"{layer:,}"
    assert row(split, "MoE layers gathered at a time: 2")[1] == f"{2 * layer:,}"


def test_float8_gathers_a_byte_of_each_weight_of_a_matmul_and_holds_as_much_of_the_shards():
    text = describe.describe(load("deepseek3-671b", "precision.matmul=fp8", "schedule.kind=plain"), 256)
    norms, router, experts = 2 * 7168 + 1536 + 512, 7168 * 256, 256 * 3 * 7168 * 2048
    matrices = 11_507_286_272 - 256 - norms - router - experts
    layer = 4 * (norms + router) + matrices + experts // 8
    assert row(text, "MoE layers gathered at a time: 1")[1] == f"{layer:,}"
    dense, projection = matrices + 3 * 7168 * (18432 - 2048), 2 * 7168 * 7168
    shards = (3 * dense + 59 * matrices + projection) // 32 + 59 * experts // 256
    assert row(text, "parameters of matmuls, float8")[1] == f"{shards:,}"


def test_float8_of_experts_alone_holds_theirs_alone():
    text = describe.describe(load("deepseek3-671b", "precision.matmul=fp8_experts", "schedule.kind=plain"), 256)
    norms, router, experts = 2 * 7168 + 1536 + 512, 7168 * 256, 256 * 3 * 7168 * 2048
    matrices = 11_507_286_272 - 256 - norms - router - experts
    layer = 4 * (norms + router) + 2 * matrices + experts // 8
    assert row(text, "MoE layers gathered at a time: 1")[1] == f"{layer:,}"
    assert row(text, "parameters of matmuls, float8")[1] == f"{59 * experts // 256:,}"


@pytest.mark.parametrize("matmul", ["compute", "fp8_experts", "fp8"])
def test_the_sum_of_the_bytes_is_their_sum(matmul):
    text = describe.describe(load("deepseek3-671b", f"precision.matmul={matmul}"), 256)
    lines = text.splitlines()[:-1]
    first = next(i for i, line in enumerate(lines) if line.startswith("a device of")) + 1
    cells = [row(line, "")[1] for line in lines[first:]]
    *held, total = (int(cell.replace(",", "")) for cell in cells)
    assert sum(held) == total


def gradients(kind, parts):
    """Bytes of a device."""
    overrides = f"schedule.kind={kind}", f"optimizer.accumulate_steps={parts}"
    text = describe.describe(load("deepseek2-16b", *overrides), 16)
    return int(row(text, "gradients, float32")[1].replace(",", ""))


def test_accumulation_holds_gradients_twice_but_for_layers_that_batch_split_adds_to():
    assert gradients("plain", 2) == 2 * gradients("plain", 1)
    around = 2 * 102_400 * 2048 // 4 + 2048  # embedding and head, over fsdp, and the last norm
    assert gradients("batch_split", 2) == gradients("batch_split", 1) + 4 * around


def test_an_unknown_number_of_devices_is_assumed_aloud():
    assert "data=1 fsdp=1 expert=8; the axis of -1 counts as 1" in describe.describe(load("deepseek3-671b"))
    assert "data=1 fsdp=32 expert=8  " in describe.describe(load("deepseek3-671b"), 256)
    assert "data=2 fsdp=2 expert=2  " in describe.describe(load("quickstart"))  # mesh.cpu_devices


def test_a_mesh_that_does_not_fit_is_an_error():
    with pytest.raises(mesh.MeshError, match="does not fit the 7 devices"):
        describe.describe(load("deepseek3-671b"), 7)
    with pytest.raises(mesh.MeshError, match=r"to split over mesh.fsdp=3"):
        describe.describe(load("deepseek3-671b"), 24)


def test_no_device_is_touched():
    program = (
        "import sys; from maxds import config, describe, loader\n"
        "for path in sys.argv[1:]: print(describe.describe(loader.load(config.Config, path)[0]))"
    )
    args = [sys.executable, "-c", program, *map(str, CONFIGS.glob("*.yaml"))]
    result = subprocess.run(args, env=os.environ | {"JAX_PLATFORMS": "none-such"}, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "37,552,297,472" in result.stdout
