"""What Prometheus fetches of a run is what its other files say, and nobody who fetches can hold it up."""

import socket
import time
import urllib.request

import pytest
import running
import test_metrics
from prometheus_client.parser import text_string_to_metric_families

from maxds import exporter, loader, metrics
from maxds.config import Config


def fetched(port):
    """Samples by name, each a list of labels and values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_port_that_is_taken_is_told_before_anything_begins(tmp_path, program_cache):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = running.finish(running.start(tmp_path / "run", program_cache, f"prometheus_port={port}"))
    assert (code, out) == (2, "")
    assert err == (
        f"prometheus_port={port} cannot be served on {socket.gethostname()} (Address already in use); "
        f"set another, or null\n"
    )
    assert not (tmp_path / "run").exists()


def test_processes_other_than_the_first_serve_what_they_know_and_write_nothing(tmp_path):
    port = running.free_port()
    with metrics.Log(test_metrics.load(tmp_path / "run", f"prometheus_port={port}"), primary=False) as log:
        log.start(0, "cpu", 1)
        assert "maxds_step" not in fetched(port)
        log.step(4, test_metrics.values(loss=1.5) | log.spent({"step": 0.5}, 0.0, step=4), seconds=0.5)
        log.step(5, test_metrics.values(loss=float("nan"), failed_saves=2), seconds=0.5)
        log.eval(5, {"main": 3.0})
        found = {name: [value for _, value in samples] for name, samples in fetched(port).items()}
    assert found["maxds_step"] == [5] and str(found["maxds_loss"]) == "[nan]"
    assert (found["maxds_failed_saves"], found["maxds_eval"]) == ([2], [3.0])
    assert "maxds_goodput" not in found and "maxds_mfu" not in found
    assert abs(found["maxds_step_timestamp_seconds"][0] - time.time()) < 60
    assert not (tmp_path / "run").exists()
    with pytest.raises(OSError):
        fetched(port)


def test_figures_say_what_they_are_of_in_the_units_of_their_names():
    port, own = running.free_port(), {"process": "3", "host": socket.gethostname()}
    told = {"seconds": 0.5, "tokens": 7, "terms/main": 2.0, "terms/mtp_1": 3.0, "spent/data": 0.25, "late/max": 4.0}
    with exporter.Exporter(port, 3) as served:
        served.show(1, told)
        found = fetched(port)
    assert found["maxds_step_seconds"] == [(own, 0.5)] and found["maxds_step_tokens"] == [(own, 7.0)]
    assert found["maxds_terms"] == [(own | {"name": "main"}, 2.0), (own | {"name": "mtp_1"}, 3.0)]
    assert found["maxds_spent_seconds"] == [(own | {"name": "data"}, 0.25)]
    assert found["maxds_late_seconds"] == [(own | {"name": "max"}, 4.0)]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_a_mistake(port):
    with pytest.raises(loader.ConfigError, match=f"prometheus_port={port} must be from 1 to 65535, or null"):
        loader.load(Config, running.TINY, [f"prometheus_port={port}"])
