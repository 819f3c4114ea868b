"""The doctor, as a user calls it: what it says of sound and of unsound runs, alone and as one of several processes."""

import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from etils import epath
from google.cloud import storage
from running import free_port

from maxds import describe, doctor, loader, mesh, shards, step
from maxds.config import Config

ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "tests/tiny.yaml"
ALONE = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}


def start(*args, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "maxds.doctor", *map(str, args)],
        cwd=ROOT,
        env={**ALONE, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), err


def verdicts(lines):
    """Name of the check -> its verdict."""
    return {line.split()[1]: line.split()[0] for line in lines}


def load(*overrides):
    return loader.load(Config, TINY, overrides)[0]


def test_a_sound_run_is_found_so_on_one_screen_and_nothing_is_left_in_its_folder(tmp_path):
    overrides = f"run_dir={tmp_path}/run", "compile_cache=null", "mesh.cpu_devices=8"
    overrides += f"checkpoint.local_dir={tmp_path}/local", "checkpoint.local_every_steps=1"
    code, lines, err = finish(start(TINY, *overrides))
    assert (code, err) == (0, "")
    wanted = dict.fromkeys(("devices", "versions", "mesh", "memory", "run_dir", "local", "data"), "ok")
    wanted |= dict.fromkeys(("kernels", "cache"), "note")
    assert verdicts(lines) == wanted
    assert not [*(tmp_path / "run").iterdir(), *(tmp_path / "local").iterdir()]


def test_every_fault_has_a_line_with_its_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    code, lines, err = finish(
        start(
            TINY,
            f"run_dir={tmp_path}/file/run",
            f"compile_cache={tmp_path}/file/cache",
            f"data.sources=[{{kind: text, path: {tmp_path}/absent}}]",
            "mesh={cpu_devices: 8, fsdp: 3}",
        )
    )
    assert (code, err) == (2, "")
    said = {line.split()[1]: line for line in lines}
    unsound = dict.fromkeys(("mesh", "run_dir", "data"), "FAULT") | dict.fromkeys(
        ("memory", "kernels", "cache"), "note"
    )
    assert verdicts(lines) == {"devices": "ok", "versions": "ok"} | unsound
    assert "mesh.fsdp=3 x mesh.expert=2 does not fit the 8 devices present: set mesh.fsdp=-1" in said["mesh"]
    assert f"{tmp_path}/file/run cannot be written and read (Not a directory): set another" in said["run_dir"]
    assert f"{tmp_path}/absent is neither a file nor a folder; correct the path of the source" in said["data"]
    assert "every start compiles" in said["cache"]


def test_a_mistaken_config_is_told_as_training_tells_it():
    code, lines, err = finish(start(TINY, "optimiser.lr=1"))
    assert (code, lines) == (2, [])
    assert err.startswith("override optimiser.lr=1: unknown key optimiser")


def test_devices_that_do_not_start_are_a_fault_and_no_traceback():
    code, lines, err = finish(start(JAX_PLATFORMS="no_such"))
    assert code == 2 and "Traceback" not in err
    assert verdicts(lines) == {"devices": "FAULT", "versions": "ok"}


def pair(*different):
    several = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    arguments = TINY, "mesh.cpu_devices=4", "compile_cache=null"
    return [
        finish(process)
        for process in [start(*arguments, own, **several, JAX_PROCESS_ID=str(i)) for i, own in enumerate(different)]
    ]


def test_two_processes_see_each_other_s_devices_and_clocks(tmp_path):
    (code, first, _), (other, second, _) = pair(f"run_dir={tmp_path}", f"run_dir={tmp_path}")
    assert (code, other) == (0, 0)
    assert any("8 of cpu; slices: 1; processes: 2" in line for line in first)
    assert first[-1].startswith("ok     processes  2, clocks within 0.")
    assert [line for line in second if line.startswith(("ok", "note", "FAULT"))] == []


def test_a_fault_of_one_process_is_told_by_it_and_known_to_the_others(tmp_path):
    (tmp_path / "file").write_text("")
    (code, first, _), (other, second, _) = pair(f"run_dir={tmp_path}", f"run_dir={tmp_path}/file/run")
    assert (code, other) == (2, 2)
    assert first[-1].startswith("FAULT  processes  at fault in processes 1, each of which has said why")
    (line,) = [line for line in second if line.startswith("FAULT")]
    assert line.startswith(f"FAULT  run_dir    in process 1: {tmp_path}/file/run cannot be written")


def test_clocks_that_are_apart_are_a_fault(monkeypatch):
    now = 1_795_000_000
    rows = np.array([[0, *divmod(now, 2**16), 0], [0, *divmod(now + 70, 2**16), 500_000_000]], np.int32)
    monkeypatch.setattr(doctor.multihost_utils, "sync_global_devices", lambda name: None)
    monkeypatch.setattr(doctor.multihost_utils, "process_allgather", lambda mine: rows)
    with pytest.raises(doctor.DoctorError, match=r"clocks are 70\.5 s apart, that of process 1 ahead"):
        doctor.compare(0)
    monkeypatch.setattr(doctor, "MAX_SKEW", 71)
    assert doctor.compare(0) == "2, clocks within 70.50 s"


def test_a_state_that_a_device_cannot_hold_is_a_fault_before_anything_is_allocated():
    assert "GiB of a device for weights, optimizer and gradients" in doctor.memory(load())
    with pytest.raises(doctor.DoctorError, match=r"optimizer\.state_dtype=bfloat16"):
        doctor.memory(load("model.vocab_size=4_000_000_000"))


def needed(config):
    return sum(describe.held(config, {"data": 2, "fsdp": 2, "expert": 2}).values())


def test_devices_of_this_host_share_its_memory(monkeypatch):
    for room, verdict in ((8 * needed(load()), "ok"), (8 * needed(load()) - 8, "FAULT")):
        monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda total=room: types.SimpleNamespace(total=total))
        assert doctor.look("memory", lambda: doctor.memory(load())).verdict == verdict


@pytest.mark.parametrize(
    ("stats", "room", "verdict"),
    [({"bytes_limit": 0}, 94.74 * 2**30, "ok"), (None, 94.74 * 2**30, "ok"), ({"bytes_limit": 2**10}, 2**10, "FAULT")],
)
def test_an_accelerator_has_the_memory_that_it_tells_or_else_that_of_its_kind(stats, room, verdict, monkeypatch):
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU7x", memory_stats=lambda: stats)
    monkeypatch.setattr(doctor.jax, "local_devices", lambda: [device])
    finding = doctor.look("memory", lambda: doctor.memory(load()))
    assert finding.verdict == verdict and f", {room / 2**30:,.2f} of its memory" in finding.text


def test_a_folder_that_returns_something_else_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(epath, "Path", pathlib.Path)
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda _: b"other")
    with pytest.raises(doctor.DoctorError, match="does not return what was written to it: set another"):
        doctor.probe(str(tmp_path))


def test_of_buckets_and_of_no_folder_it_is_tried_whether_they_can_be_looked_up(tmp_path, monkeypatch):
    looked_up = []
    monkeypatch.setattr(doctor, "_look_up", looked_up.append)
    doctor.probe(str(tmp_path))
    assert looked_up == []
    monkeypatch.setattr(epath, "Path", lambda url: pathlib.Path(url.replace("gs://bucket", str(tmp_path))))
    doctor.probe("gs://bucket/run")
    assert looked_up == [tmp_path / "run"]


def test_a_folder_of_local_checkpoints_that_is_too_small_is_a_fault(tmp_path, monkeypatch):
    config = load(f"checkpoint.local_dir={tmp_path}", "checkpoint.local_every_steps=1")
    needed = 2 * shards.size(step.make(config, mesh.make(config.mesh)).abstract_state)
    for room, verdict in ((needed, "ok"), (needed - 1, "FAULT")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, total=room: types.SimpleNamespace(total=total))
        finding = doctor.look("local", lambda: doctor.local(config))
        assert finding.verdict == verdict, finding.text


@pytest.mark.parametrize(("found", "verdict"), [(0.004, "ok"), (0.3, "FAULT"), (float("nan"), "FAULT")])
def test_kernels_that_compute_something_else_than_the_cpu_are_a_fault(found, verdict, monkeypatch):
    monkeypatch.setattr(
        doctor.jax, "local_devices", lambda **_: [types.SimpleNamespace(platform="tpu", device_kind="T")]
    )
    monkeypatch.setattr(doctor.trial, "differences", lambda *_: {"sum of rows": 0.0, "attention": found})
    finding = doctor.look("kernels", lambda: doctor.hold(load()))
    assert finding.verdict == verdict and f"sum of rows 0.00%, attention {found:.2%}" in finding.text
    assert ("do not train" in finding.text) == (verdict == "FAULT")


def test_kernels_that_do_not_compile_are_a_fault_and_no_traceback(monkeypatch):
    monkeypatch.setattr(
        doctor.jax, "local_devices", lambda **_: [types.SimpleNamespace(platform="tpu", device_kind="T")]
    )
    monkeypatch.setattr(doctor.trial, "differences", raising(jax.errors.JaxRuntimeError("INTERNAL: Mosaic\nmore")))
    finding = doctor.look("kernels", lambda: doctor.hold(load()))
    assert (finding.verdict, "INTERNAL: Mosaic;" in finding.text) == ("FAULT", True)


def test_a_bucket_that_cannot_be_looked_up_is_a_fault(monkeypatch):
    monkeypatch.setattr(storage, "Client", raising(PermissionError("403 storage.buckets.get")))
    with pytest.raises(
        doctor.DoctorError, match=r"gs://b/run: .* \(403 storage.buckets.get\).*roles/.*Reader of b has"
    ):
        doctor._look_up(epath.Path("gs://b/run"))


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_a_batch_or_a_model_that_the_mesh_does_not_divide_is_a_fault():
    assert doctor.fit(load()) == "data=2 fsdp=2 expert=2"
    assert doctor.look("mesh", lambda: doctor.fit(load("data.global_batch=24"))).verdict == "FAULT"


def test_versions_other_than_the_tested_ones_are_named(monkeypatch):
    assert doctor.versions().endswith("all as tested")
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.0.1" if name == "optax" else found(name))
    finding = doctor.look("versions", doctor.versions)
    assert finding.verdict == "note" and "not those tested: optax 0.0.1, not " in finding.text
