"""scripts/environment chooses an interpreter and never leaves a half-made environment that looks complete."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = "bash cat cp dirname echo env mkdir rm sort xargs".split()

# Answers as Python does, makes environments of itself, and installs unless $ROOT/broken exists.
PYTHON = """#!/usr/bin/env bash
set -euo pipefail
case "$1 ${2:-}" in
  "-c "*) echo "VERSION $0" ;;
  "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip") echo install >>log; [[ ! -e broken ]] ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with the script and what it reads, and a PATH with a few tools and no Python."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    for path in "scripts/environment", "pyproject.toml", "maxds/__init__.py":
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    return tmp_path


def python(path, version):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.replace("VERSION", version))
    path.chmod(0o755)
    return path


def environment(repository, *args, **variables):
    variables = {"PATH": str(repository / "bin"), "HOME": str(repository), **variables}
    return subprocess.run([repository / "scripts/environment", *args], env=variables, capture_output=True, text=True)


def installs(repository):
    log = repository / "log"
    return log.read_text().count("install") if log.exists() else 0


def test_prefers_the_newest_and_passes_over_what_does_not_run(repository):
    python(repository / "bin/python3", "3.11")
    python(repository / "bin/python3.12", "3.12").write_text("#!/usr/bin/env bash\nexit 127\n")  # an empty shim
    own = python(repository / ".pyenv/versions/3.12.1/bin/python3", "3.12")
    listed = environment(repository, "--list").stdout.splitlines()
    assert listed == [f"3.12 {own}", f"3.11 {repository}/bin/python3"]
    assert environment(repository).stdout == f"{repository}/.venv-3.12/bin/python\n"


def test_refuses_in_words_where_there_is_no_interpreter(repository):
    python(repository / "bin/python3", "3.10")
    result = environment(repository)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "maxds: no Python with the venv module among: 3.12 3.11; install one, or set MAXDS_PYTHON\n"
    )


def test_named_interpreter_wins_and_must_be_supported(repository):
    python(repository / "bin/python3.12", "3.12")
    named = python(repository / "elsewhere/python", "3.11")
    old = python(repository / "elsewhere/python-old", "3.9")
    assert environment(repository, MAXDS_PYTHON=str(named)).stdout == f"{repository}/.venv-3.11/bin/python\n"
    refused = environment(repository, MAXDS_PYTHON=str(old))
    assert (refused.returncode, refused.stderr) == (1, "maxds: MAXDS_PYTHON is Python 3.9; supported: 3.12 3.11\n")
    assert "does not run" in environment(repository, MAXDS_PYTHON=str(repository / "none")).stderr


def test_installs_once_and_again_when_the_constraints_change(repository):
    python(repository / "bin/python3.12", "3.12")
    assert [environment(repository).returncode, environment(repository).returncode] == [0, 0]
    assert installs(repository) == 1
    with (repository / "constraints/py312.txt").open("a") as file:
        file.write("another==1.0\n")
    environment(repository)
    assert installs(repository) == 2


def test_failed_renewal_is_taken_up_again(repository):
    python(repository / "bin/python3.12", "3.12")
    assert environment(repository).returncode == 0
    project = repository / "pyproject.toml"
    before = project.read_text()
    project.write_text(before + "# changed\n")
    (repository / "broken").touch()
    failed = environment(repository)
    assert (failed.returncode, failed.stdout) == (1, "")
    (repository / "broken").unlink()
    project.write_text(before)  # what the environment was complete for, before the renewal failed
    assert environment(repository).returncode == 0
    assert installs(repository) == 3
