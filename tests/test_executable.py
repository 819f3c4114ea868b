"""A step that one process compiles and another trains with, and the files that are refused instead."""

import functools
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from running import ONE_LAYER

from maxds import loader, mesh, step
from maxds.aot import executable
from maxds.config import Config

pytestmark = pytest.mark.newest

TINY = pathlib.Path(__file__).with_name("tiny.yaml")
WRITE = """
import sys
from maxds import loader, mesh, step
from maxds.aot import executable
from maxds.config import Config

config, _ = loader.load(Config, sys.argv[1], sys.argv[3:])
mesh.initialize(config.mesh)
stepper = step.make(config, mesh.make(config.mesh))
executable.write(sys.argv[2], stepper, stepper.compile())
"""


def python(*args):
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The tiny step, compiled for eight virtual CPU devices by a process of its own."""
    path = tmp_path_factory.mktemp("written") / "folder" / "step.aot"
    result = python("-c", WRITE, TINY, path, "mesh.cpu_devices=8", *ONE_LAYER)
    assert (result.returncode, result.stderr) == (0, "")
    assert [left.name for left in path.parent.iterdir()] == ["step.aot"]
    return path


@functools.cache
def stepper(*overrides):
    config, _ = loader.load(Config, TINY, [*ONE_LAYER, *overrides])
    return step.make(config, mesh.make(config.mesh))


def train(run_dir, *args):
    cache = run_dir / "cache"
    overrides = f"run_dir={run_dir}", f"compile_cache={cache}", "mesh.cpu_devices=8", *ONE_LAYER
    ran = python("-m", "maxds.train", TINY, *overrides, *args)
    return ran, {entry.name.partition("-")[0] for entry in cache.glob("*")}


def test_a_step_compiled_elsewhere_is_not_compiled_again_and_trains_to_the_same_bits(written, tmp_path):
    ahead, compiled_with = train(tmp_path / "ahead", f"--aot={written}")
    here, compiled_without = train(tmp_path / "here")
    assert (ahead.returncode, ahead.stderr, here.returncode) == (0, "", 0)
    assert f"compiled ahead: {written}" in ahead.stdout
    assert "jit_train_step" in compiled_without - compiled_with  # others, where they took long enough to be kept
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("ahead", "here")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 12


def test_what_jax_adds_to_the_compiler_s_flags_on_hosts_of_tpus_makes_no_other_program(written, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " --xla_tpu_use_enhanced_launch_barrier=true")
    executable.load(str(written), stepper())


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.lr=2e-3", "optimizer.lr: 0.001 -> 0.002"),
        ("mesh={data: 1, fsdp: 4, expert: 2}", "mesh.data: 2 -> 1; mesh.fsdp: 2 -> 4"),
        ("compiler_options=[xla_cpu_enable_fast_min_max=true]", "compiler_options.xla_cpu_enable_fast_min_max"),
    ],
)
def test_of_another_program_the_difference_is_told(written, override, told):
    with pytest.raises(executable.ExecutableError) as error:
        executable.load(str(written), stepper(override))
    assert told in str(error.value) and "train without --aot" in str(error.value)
    assert "\n" not in str(error.value)


def test_of_devices_in_another_order_and_of_other_flags_the_difference_is_told(written, monkeypatch):
    config, _ = loader.load(Config, TINY, ONE_LAYER)
    turned = step.make(config, mesh.make(config.mesh, jax.devices()[::-1]))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_other=1")
    with pytest.raises(executable.ExecutableError) as error:
        executable.load(str(written), turned)
    assert re.search(r"environment\.LIBTPU_INIT_ARGS: \[\] -> \[--xla_other=1\]; device_order: ", str(error.value))


def test_another_version_of_the_compiler_is_refused(written, tmp_path):
    magic, head, code = written.read_bytes().split(b"\n", 2)
    about = json.loads(head)
    about["for"]["versions"]["jaxlib"] = "0.1"
    (tmp_path / "old.aot").write_bytes(b"\n".join([magic, json.dumps(about).encode(), code]))
    with pytest.raises(executable.ExecutableError, match=r"something else: versions\.jaxlib: '?0\.1'? -> "):
        executable.load(str(tmp_path / "old.aot"), stepper())


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: content[:-1], "is damaged or not whole"),
        (lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "is damaged or not whole"),
        (lambda content: content[:100], "is damaged or not whole, at 100 bytes"),
        (lambda content: b"", "is not an executable of maxds"),
        (lambda content: b"\x80\x04" + content, "is not an executable of maxds"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_is_refused(written, tmp_path, damage, told):
    path = tmp_path / "step.aot"
    if damage is not None:
        path.write_bytes(damage(written.read_bytes()))
    with pytest.raises(executable.ExecutableError, match=told):
        executable.load(str(path), stepper())


def test_what_is_refused_exits_with_2_before_anything_is_written(written, tmp_path):
    ran = python(
        *("-m", "maxds.train", TINY, f"run_dir={tmp_path}/run", "mesh.cpu_devices=8", "compile_cache=null"),
        *(*ONE_LAYER, "optimizer.lr=1e-2", f"--aot={written}"),
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"--aot={written} was compiled for something else: program: ")
    assert ran.stderr.count("\n") == 1 and not any(tmp_path.iterdir())
