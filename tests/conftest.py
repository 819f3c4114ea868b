"""Eight virtual CPU devices for every test."""

import functools
import gc
import os

import hypothesis
import jax
import pytest
import running
from jax.experimental.compilation_cache import compilation_cache
from xdist.scheduler import LoadFileScheduling

from maxds.model.tiles import causal, gates, groups, home, sums, window

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Programs run once here: compiling is what takes time. So it is in the processes that tests start.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# A program in one piece, not in 32 that threads compile: less work, and pytest's own processes fill the cores.
os.environ["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 12):  # XLA's older way to emit a fusion takes half as long; later it has no other
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Tracing makes millions of objects that stay: going through them every 700 would be a tenth of the suite's time.
gc.set_threshold(100_000)

# Of inputs that are made up: a few in the suite, the same each time; many with --hypothesis-profile=fuzz.
hypothesis.settings.register_profile("suite", max_examples=25, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "fuzz",
    max_examples=10_000,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("suite")


class ByPrograms(LoadFileScheduling):
    """The tests of a file go to one of pytest's workers; so do those of files that ask for the same `tiny.outcome`."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "outcomes" if file.endswith(("test_oracle.py", "test_schedule.py", "test_step.py")) else file


def pytest_xdist_make_scheduler(config, log):
    return ByPrograms(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def no_programs_left():
    """Later tests have neither the cache that one has trained with, nor its programs: Linux lets few be mapped."""
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels for TPU are run by Pallas' interpreter."""
    for module, names in (
        (causal, ("attend", "attend_backward")),
        (gates, ("gated", "gated_backward", "rounded", "rounded_backward", "times")),
        (groups, ("multiply", "multiply_transposed")),
        (home, ("sum_rows",)),
        (sums, ("index_scores", "index_scores_backward", "attention_to")),
        (window, ("attend", "attend_backward")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=True))


@pytest.fixture
def collected():
    """What Orbax left is collected here, not in a later test: it does not wait for the other reads when one fails."""
    gc.freeze()  # what was there before, for that takes a second
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    running.end_all()


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory, worker_id):
    """Of trainings in processes of their own and in those of pytest: what one has compiled, the others find."""
    own = tmp_path_factory.getbasetemp()
    cache = (own if worker_id == "master" else own.parent) / "program_cache"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory, program_cache):
    """The folder of a run, a process of its own, that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    code, _, err = running.finish(running.start(folder, program_cache, *running.LONG))
    assert code == 0, err
    return folder


@pytest.fixture(scope="session")
def straight(straight_run):
    """Its losses."""
    return running.losses(straight_run)
