"""Eight virtual CPU devices for every test."""

import jax
import pytest
import running
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # programs run once here: compiling is what takes time


@pytest.fixture(scope="module", autouse=True)
def no_compile_cache():
    """A cache that a test has trained with in this process is not that of later ones."""
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    running.end_all()


@pytest.fixture(scope="session")
def process_cache(tmp_path_factory):
    """Compiled programs, shared by the processes that tests start."""
    return tmp_path_factory.mktemp("process_cache")


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory, process_cache):
    """The folder of a run, a process of its own, that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    code, _, err = running.finish(running.start(folder, process_cache, *running.LONG))
    assert code == 0, err
    return folder


@pytest.fixture(scope="session")
def straight(straight_run):
    """Its losses."""
    return running.losses(straight_run)
