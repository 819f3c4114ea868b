"""A run in a bucket, of an emulated Google Cloud Storage, is the run in a folder, and leaves nothing here."""

import os
import pathlib
import subprocess
import sys
import urllib.parse
import urllib.request
from typing import NamedTuple

import pytest
from gcp_storage_emulator.server import create_server
from running import LONG, ROOT, STEPS, checksums, finish, free_port, losses, start, start_several, wait_for_steps

RUN = "gs://bucket/runs/a"
COMMITTED = "commit_success.txt"  # a bucket renames no folder: Orbax writes this into one that is whole

pytestmark = pytest.mark.newest


class Bucket(NamedTuple):
    """How processes reach it, and where the emulator keeps what is in RUN."""

    environment: dict[str, str]
    run: pathlib.Path

    def delete(self, name):
        address, path = self.environment["STORAGE_EMULATOR_HOST"], urllib.parse.quote(f"runs/a/{name}", safe="")
        request = urllib.request.Request(f"{address}/storage/v1/b/bucket/o/{path}", method="DELETE")
        urllib.request.urlopen(request).close()


@pytest.fixture
def bucket(tmp_path):
    port = free_port()
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google what kind of bucket this is
    }
    with create_server("127.0.0.1", port, data_dir=str(tmp_path), default_bucket="bucket"):
        yield Bucket(environment, tmp_path / ".cloudstorage" / "bucket" / "runs" / "a")


def files(folder):
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_run_goes_on_from_its_bucket_and_is_the_straight_one(bucket, straight, straight_run):
    arguments = [*LONG, "checkpoint.every_steps=20"]
    killed = start(RUN, "auto", *arguments, **bucket.environment)
    wait_for_steps(killed, bucket.run, 20)
    killed.kill()
    finish(killed)
    compiled = files(bucket.run / "compile_cache")
    assert compiled

    code, out, err = finish(start(RUN, "auto", *arguments, **bucket.environment))
    assert code == 0, err
    assert "initialized" not in out
    assert losses(bucket.run) == straight
    assert checksums(bucket.run) == checksums(straight_run)
    assert files(bucket.run / "compile_cache") == compiled
    assert files(bucket.run) >= {"config.yaml", "time.jsonl", "report.png"}
    assert not (ROOT / "gs:").exists()

    bucket.delete(f"checkpoints/{STEPS}/{COMMITTED}")  # as of a save that was killed
    code, out, err = finish(start(RUN, "auto", *arguments, **bucket.environment))
    assert code == 0, err
    assert f"{STEPS} is a half-written checkpoint and is skipped" in out
    assert "step 41/60" in out
    assert losses(bucket.run) == straight
    assert checksums(bucket.run) == checksums(straight_run)
    assert (bucket.run / "checkpoints" / str(STEPS) / COMMITTED).exists()


def test_two_processes_save_to_a_bucket_and_it_is_reported_and_read(bucket, program_cache):
    arguments = [*LONG, "steps=2"]
    several = start_several(2, RUN, program_cache, *arguments, devices=4, **bucket.environment)
    for code, _, err in [finish(process) for process in several]:
        assert code == 0, err
    assert len(losses(bucket.run)) == 2
    environment = os.environ | bucket.environment
    for module, *options in (["report"], ["generate", "--prompt=a", "--tokens=1"]):
        command = [sys.executable, "-m", f"maxds.{module}", RUN, *options]
        assert subprocess.run(command, env=environment, cwd=ROOT).returncode == 0
