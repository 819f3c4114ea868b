"""Meshes: derived sizes, what is refused, and how processes are told that they are several."""

import os
import re
import resource
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxds import mesh
from maxds.config import Mesh


def test_an_axis_of_minus_one_takes_what_is_left():
    assert mesh.sizes(Mesh(data=2, fsdp=-1, expert=2), 32) == {"data": 2, "fsdp": 8, "expert": 2}


def test_any_axis_can_take_what_is_left():
    assert mesh.sizes(Mesh(data=-1, fsdp=4, expert=2), 32) == {"data": 4, "fsdp": 4, "expert": 2}


@pytest.mark.parametrize("config", [Mesh(data=2, fsdp=2, expert=3), Mesh(data=3, fsdp=-1), Mesh(fsdp=16)])
def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_the_numbers(config):
    with pytest.raises(mesh.MeshError) as error:
        mesh.sizes(config, 8)
    assert "does not fit the 8 devices present" in str(error.value)


def test_a_mesh_that_is_refused_is_told_what_would_divide():
    with pytest.raises(mesh.MeshError, match=r"the fixed axes multiply to 12; .* divide 8: try 4$"):
        mesh.sizes(Mesh(data=12, fsdp=-1), 8)


@pytest.mark.parametrize(("rows", "group"), [(1, 1), (15, 1), (40, 1), (40, 4), (3, 4), (5, 8)])
def test_a_batch_that_devices_cannot_share_is_told_the_nearest_that_they_can(rows, group):
    def check(rows):
        mesh.check_rows(8, rows, per_device=2, what="rows", group=group)

    unit = 8 // group * 2  # of each device, or of those that share sequences
    if rows % unit == 0:
        return check(rows)
    with pytest.raises(mesh.MeshError, match=f"rows={rows} does not give each of the ") as error:
        check(rows)
    low, high = map(int, re.search(r"try (\d+) or (\d+)$", str(error.value)).groups())  # pyright: ignore
    assert (low % unit, high % unit) == (0, 0) and rows < high <= rows + unit
    assert high - unit < rows and low in (high, high - unit) and low > 0
    check(low)


class Slice:
    platform, device_kind, process_index = "cpu", "cpu", 0

    def __init__(self, slice_index):
        self.slice_index = slice_index


def test_an_axis_other_than_data_cannot_cross_slices():
    with pytest.raises(mesh.MeshError, match=r"mesh\.data=1 is not divisible by the 2 slices present"):
        mesh.make(Mesh(data=1, fsdp=-1), [Slice(i // 4) for i in range(8)])


def test_data_crosses_the_slices_and_the_other_axes_stay_inside():
    grid = mesh.make(Mesh(data=4, fsdp=-1), devices := [Slice(i % 2) for i in range(8)]).devices
    assert len(devices) == grid.size and grid.shape == (4, 2, 1)
    for replica in grid:
        assert len({device.slice_index for device in replica.flat}) == 1


class Host:
    platform = device_kind = "cpu"

    def __init__(self, process_index):
        self.process_index = process_index


@pytest.mark.parametrize(
    ("processes", "share"),
    [
        ([[0, 0], [0, 0], [1, 1], [1, 1]], (0, 2)),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], (0, 2)),  # 0 and 1 have parts of the same sequences
        ([[1, 2], [1, 2], [0, 3], [0, 3]], (0, 2)),
        ([[1, 0], [1, 0], [1, 0], [1, 0]], (0, 1)),
    ],
)
def test_processes_that_have_parts_of_the_same_sequences_read_the_same_share(processes, share):
    grid = np.array([[Host(process) for process in row] for row in processes])[None]
    assert mesh.share(NamedSharding(jax.sharding.Mesh(grid, mesh.AXES), mesh.SPLIT_BATCH), 16) == share


def test_sequences_that_processes_share_unevenly_are_refused():
    grid = np.array([[Host(0), Host(0)], [Host(0), Host(1)], [Host(1), Host(1)]])[None]
    with pytest.raises(mesh.MeshError, match=r"mesh\.expert=2 crosses processes unevenly"):
        mesh.share(NamedSharding(jax.sharding.Mesh(grid, mesh.AXES), mesh.SPLIT_BATCH), 12)


@pytest.mark.parametrize(
    ("kind", "places", "found"),
    [
        ("TPU v5", [(0, y, z) for y in range(4) for z in range(8)], (4, 8)),
        ("TPU v5", [(0, y, z) for z in range(8) for y in range(4)], (8, 4)),
        ("TPU v5", [(x, 0, 0) for x in range(4)], (4,)),
        ("TPU7x", [(0, y, z) for y in range(4) for z in range(8)], (32,)),
    ],
)
def test_v5p_gathers_over_one_dimension_of_the_torus_after_the_other(kind, places, found):
    devices = np.empty((1, len(places), 1), object)
    devices[0, :, 0] = [types.SimpleNamespace(device_kind=kind, coords=place) for place in places]
    assert mesh.rings(types.SimpleNamespace(devices=devices, shape={"fsdp": len(places)}), "fsdp") == found


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "a:1"}, True),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "2"}, True),
    ],
)
def test_the_environment_says_whether_there_are_other_processes(environment, several):
    assert mesh._is_one_of_several(environment) is several


def test_compiler_options_are_those_of_device_and_schedule_as_the_config_changes_them():
    offload = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    pipelines, slow = "xla_tpu_pipeline_memory_host_transfers", "xla_tpu_pcie_bandwidth_multiplier"
    assert mesh.compiler_options("cpu", "batch_split") == {}
    assert mesh.compiler_options("cpu", "plain", ("xla_a=false", "xla_b=2")) == {"xla_a": False, "xla_b": "2"}
    split, plain = (mesh.compiler_options("TPU v5", schedule) for schedule in ("batch_split", "plain"))
    assert (split.pop(pipelines), plain.pop(slow)) == (False, "0.002")
    assert split == plain and split[offload] is True
    changed = mesh.compiler_options("TPU v5", "plain", ("xla_a=1", f"{offload}="))
    assert changed["xla_a"] == "1" and offload not in changed


FAULTS = """
import resource, threading
import numpy as np
from maxds import config, mesh

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        thread = threading.Thread(target=np.ones, args=(1 << 24,))  # 128 MiB
        thread.start()
        thread.join()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults()
mesh.keep_freed_memory(config.Mesh(cpu_devices=1))
faults()
faults()
"""


def test_what_a_thread_frees_is_reused_once_memory_is_kept():
    env = os.environ | {"MALLOC_ARENA_MAX": "1"}  # of scripts/train
    run = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    _, growing, kept = map(int, run.stdout.split())
    pages = (1 << 27) // resource.getpagesize()
    assert growing < 1.5 * pages and kept < 0.1 * pages, run.stdout
