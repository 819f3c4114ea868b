"""The commands that use a trained model, on a run that was saved without training."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from etils import epath

from maxds import checkpoint, generate, host, loader, mesh, score, step, trained
from maxds.config import Config, Mesh, Sample
from maxds.data import load_tokenizer

CONFIG = """
run_dir: {folder}
steps: 5
model:
  vocab_size: 257
  hidden_size: 16
  intermediate_size: 32
  moe_intermediate_size: 8
  num_hidden_layers: 1
  first_k_dense_replace: 0
  num_attention_heads: 2
  q_lora_rank: null
  kv_lora_rank: 8
  qk_nope_head_dim: 4
  qk_rope_head_dim: 2
  v_head_dim: 4
  n_routed_experts: 8
  n_shared_experts: 0
  num_experts_per_tok: 2
  scoring_func: sigmoid
  topk_method: noaux_tc
  norm_topk_prob: true
  routed_scaling_factor: 2.5
  max_position_embeddings: 32
data: {{sources: [{{kind: synthetic}}], sequence_length: 16, global_batch: 16}}
optimizer: {{lr: 1e-3}}
mesh: {{data: 2, fsdp: 2, expert: 2}}
precision: {{compute: float32}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with checkpoints of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    config, _ = loader.load(Config, folder / "config.yaml")
    stepper = step.make(config, mesh.make(config.mesh))
    for at in (3, 5):
        save_state(drawn(stepper, at), config)
    return folder


def drawn(stepper, at):
    random, state = np.random.RandomState(at), stepper.abstract_state
    found = jax.tree.map(lambda a: put(a, 0.3 * random.standard_normal(a.shape)), state)
    return found.replace(step=put(state.step, at))


def save_state(state, config):
    with checkpoint.open_run(config, print) as saved:
        saved.save(state, int(state.step), config, "fingerprint")


def put(abstract, value):
    return jax.device_put(np.asarray(value, abstract.dtype), abstract.sharding)


def save(path, array):
    np.save(path, array)
    return str(path)


TOKENS = np.random.RandomState(0).randint(0, 257, (11, 7))


def test_logits_are_those_of_the_checkpoint_whatever_the_number_of_rows(run, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "CHUNK_TOKENS", 1)  # 8 rows at a time, on 8 devices
    out = tmp_path / "new" / "logits.npy"
    score.score(str(run), save(tmp_path / "tokens.npy", TOKENS), str(out), step=3)
    found = np.load(out)
    assert found.shape == (11, 7, 257) and found.dtype == np.float32
    assert [path.name for path in out.parent.iterdir()] == ["logits.npy"]

    config = dataclasses.replace(trained.read_config(str(run)), mesh=Mesh(cpu_devices=4))
    stepper, state = trained.load(config, str(run), 3)
    assert stepper.mesh.size == 1
    np.testing.assert_allclose(found, np.concatenate(list(score.logits(stepper, state, TOKENS))), atol=1e-4)


def test_a_run_in_a_bucket_is_read_there(run, monkeypatch):
    monkeypatch.setattr(epath, "Path", lambda url: pathlib.Path(str(url).replace("store://bucket", str(run.parent))))
    assert trained.read_config(f"store://bucket/{run.name}") == trained.read_config(str(run))
    with pytest.raises(trained.UseError, match="store://bucket/another is not a run, for there is no "):
        trained.read_config("store://bucket/another")

    def refused(_):
        raise ConnectionError("403 Forbidden")

    monkeypatch.setattr(pathlib.Path, "is_file", refused)
    with pytest.raises(trained.UseError, match=r"store://bucket/run cannot be reached \(403 Forbidden\); look after"):
        trained.read_config("store://bucket/run")


def test_a_mesh_that_does_not_fit_the_devices_gives_way_to_one_that_does(run):
    config = trained.read_config(str(run))
    eleven = dataclasses.replace(config.mesh, fsdp=11)
    stepper, state = trained.load(dataclasses.replace(config, mesh=eleven), str(run))
    assert dict(stepper.mesh.shape) == {"data": 1, "fsdp": 8, "expert": 1}
    sizes = {a.sharding.mesh.size for a in jax.tree.leaves((state.params, state.router_bias))}
    assert sizes == {8} and int(state.step) == 5


def test_a_run_continues_a_text(run):
    text = generate.continue_text(str(run), Sample(prompt="héllo", tokens=6, temperature=0))
    assert text.startswith("héllo") and len(text) > len("héllo")


def test_the_prompt_must_suit_the_model(run):
    config, tokenizer = trained.read_config(str(run)), load_tokenizer("bytes")
    with pytest.raises(trained.UseError, match=r"a prompt of 3 tokens and tokens=30 more exceed .*=32; ask for 29"):
        generate.encode(config.model, tokenizer, Sample(prompt="abc", tokens=30))
    assert generate.encode(config.model, tokenizer, Sample(prompt="abc", tokens=29)).tolist() == [97, 98, 99]
    small = dataclasses.replace(config.model, vocab_size=99)
    with pytest.raises(trained.UseError, match=r"tokens up to 99, beyond model\.vocab_size=99"):
        generate.encode(small, tokenizer, Sample(prompt="abc", tokens=1))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((2, 3), np.float32), r"holds float32 \[2, 3\]; it must be int32 \[N, S\]"),
        (np.zeros(3, np.int32), r"holds int32 \[3\]"),
        (np.zeros((0, 3), np.int32), r"holds int32 \[0, 3\]"),
        (np.zeros((2, 33), np.int32), r"rows of 33 tokens, beyond model\.max_position_embeddings=32"),
        (np.array([[0, 1], [256, 257]]), r"token 257 at \[1, 1\], but model\.vocab_size=257 knows 0 to 256"),
        (np.array([[0, -1]]), r"token -1 at \[0, 1\]"),
    ],
)
def test_tokens_must_suit_the_model(run, tmp_path, tokens, message):
    path = save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(trained.UseError, match=message):
        score.read_tokens(path, trained.read_config(str(run)).model)


def test_tokens_up_to_the_last_of_the_vocabulary_and_of_positions_are_taken(run, tmp_path):
    tokens = np.full((2, 32), 256, np.uint16)
    found = score.read_tokens(save(tmp_path / "tokens.npy", tokens), trained.read_config(str(run)).model)
    assert found.dtype == np.int32 and (found == tokens).all()


def test_what_is_not_an_array_is_refused(run, tmp_path):
    (tmp_path / "text").write_text("not an array")
    for name in ("text", "absent.npy"):
        with pytest.raises(trained.UseError, match=r"--tokens=.* cannot be read"):
            score.read_tokens(str(tmp_path / name), trained.read_config(str(run)).model)


def test_a_failure_leaves_no_file(tmp_path):
    def chunks():
        yield np.zeros((1, 2), np.float32)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        score.write(str(tmp_path / "out.npy"), chunks(), (2, 2))
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file/out.npy", "."):
        with pytest.raises(trained.UseError, match=r"--out=.* cannot be written"):
            score.write(str(tmp_path / name), iter([np.zeros((1, 2), np.float32)]), (1, 2))


def test_checkpoints_that_are_not_there_are_refused(run, tmp_path):
    config = trained.read_config(str(run))
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint of step 4 .* it has 3, 5"):
        trained.load(config, str(run), 4)
    with pytest.raises(checkpoint.CheckpointError, match="has no checkpoint yet"):
        trained.load(config, str(tmp_path))


ENGRAM = """
  engram_layer_ids: [0]
  engram_vocab_size: [11]
  engram_max_ngram_size: 2
  engram_n_heads: 1
  engram_head_dim: 8
"""


def test_tables_begin_where_they_are_to_lie_whatever_run_they_come_from(run, tmp_path):
    def started(where, other, seed):
        folder, notes = tmp_path / where, []
        folder.mkdir()
        text = CONFIG.format(folder=folder).replace("data:", f"schedule: {{tables: {where}}}\ndata:", 1)
        (folder / "config.yaml").write_text(text.replace("model:\n", f"model:{ENGRAM}", 1))
        config, _ = loader.load(Config, folder / "config.yaml")
        stepper = step.make(config, mesh.make(config.mesh))
        state = trained.start(str(other), stepper, drawn(stepper, seed), notes.append)
        save_state(state, config)
        return state.params.engrams["0"].table, notes

    on_host, notes = started("host", run, 7)  # which has none
    assert any("drawn: engrams.0." in note for note in notes)
    on_device, notes = started("device", tmp_path / "host", 9)
    assert (on_host.sharding.memory_kind, on_device.sharding.memory_kind, notes) == (host.KIND, "device", [])
    np.testing.assert_array_equal(on_device, on_host)


def test_a_mistake_ends_a_command_with_one_line_and_exit_code_2(tmp_path):
    for module, options in (("score", ["--tokens=t.npy", "--out=o.npy"]), ("generate", ["--prompt=a"])):
        command = [sys.executable, "-m", f"maxds.{module}", str(tmp_path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"{tmp_path} is not a run") and done.stderr.count("\n") == 1
