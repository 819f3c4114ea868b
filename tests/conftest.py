"""Eight virtual CPU devices for every test."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # programs run once here: compiling is what takes time


@pytest.fixture(scope="session")
def process_cache(tmp_path_factory):
    """Compiled programs, shared by the processes that tests start."""
    return tmp_path_factory.mktemp("process_cache")
