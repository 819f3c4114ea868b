"""The package and the files that install it agree with each other."""

import importlib.metadata
import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import maxds

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = sorted((ROOT / "constraints").glob("py3*.txt"))
SCRIPTS = sorted(path for path in [ROOT / ".ci/run", *(ROOT / "scripts").iterdir()] if path.is_file())


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_installed_version_is_the_version_of_the_sources():
    assert importlib.metadata.version("maxds") == maxds.__version__


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_stops_at_the_first_error(path):
    interpreter, *lines = path.read_text().splitlines()
    assert os.access(path, os.X_OK)
    assert interpreter.startswith("#!")
    assert "bash" not in interpreter or "set -euo pipefail" in lines


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_every_dependency_within_its_bounds(path):
    pins = {normal(name): version for name, version in (line.split("==") for line in path.read_text().split())}
    python = f"3.{path.stem.removeprefix('py3')}"
    names = "test", "dev", "tpu", "wandb"
    extras = [line for name in names for line in PROJECT["optional-dependencies"][name]]
    wanted = [Requirement(line) for line in PROJECT["dependencies"] + extras if not line.startswith("maxds[")]
    wanted = [r for r in wanted if r.marker is None or r.marker.evaluate({"python_version": python})]
    assert [r.name for r in wanted if not r.specifier.contains(Version(pins[normal(r.name)]))] == []


def test_the_image_installs_what_is_locked_before_it_has_the_sources_and_runs_as_no_root():
    stage = (ROOT / "Dockerfile").read_text().replace("\\\n", "").rpartition("\nFROM ")[2].splitlines()
    steps = [tuple(line.split(maxsplit=1)) for line in stage[1:] if line and not line.startswith("#")]
    (install,) = [i for i, (word, rest) in enumerate(steps) if word == "RUN" and "pip install" in rest]
    copied = " ".join(rest for word, rest in steps[:install] if word == "COPY").split()
    assert set(copied) == {"pyproject.toml", "LICENSE", "./", "constraints", "maxds/__init__.py", "maxds/"}
    assert "-c constraints/py312.txt" in steps[install][1]
    said = dict(steps)
    assert said["USER"].isdigit() and said["USER"] != "0"
    assert said["ENTRYPOINT"] == '["python", "-m", "maxds.train"]'
