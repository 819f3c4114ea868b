"""What `to_hf` writes, transformers loads, and computes as maxds does; and the other way."""

import dataclasses
import pathlib
import subprocess

import converted
import jax
import numpy as np
import pytest
import test_reference as reference
import tiny

from maxds import convert, score, trained

pytestmark = reference.pytestmark
WORKER = pathlib.Path(__file__).with_name("hf_worker.py")
MODELS = {f"{build}-{i}": model for build in converted.BUILDS for i, model in enumerate(converted.drawn(build))}


def logits(run, tokens):
    return np.concatenate(list(score.logits(*trained.load(trained.read_config(str(run)), str(run)), tokens)))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_scores_what_is_written_and_what_it_saves_scores_the_same(name, tmp_path):
    model = MODELS[name]
    run, hf, out, saved, back = (tmp_path / name for name in ("run", "hf", "out.npy", "saved", "back"))
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (8, 40))
    np.save(tmp_path / "tokens.npy", tokens)
    converted.run(run, model)
    convert.to_hf(str(run), str(hf))
    subprocess.run([reference.PYTHON, WORKER, hf, tmp_path / "tokens.npy", out, saved], check=True)
    expected, found = np.load(out), logits(run, tokens)
    print(f"{name}: standard deviation {expected.std():.2f}, largest error {np.abs(found - expected).max():.1e}")
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    if model.num_nextn_predict_layers:
        return  # it saves no MTP modules
    convert.from_hf(str(saved), str(back))
    (first, second) = (trained.load(trained.read_config(str(r)), str(r))[1] for r in (run, back))
    jax.tree.map(np.testing.assert_array_equal, *((s.params, s.router_bias) for s in (first, second)))


def test_mtp_modules_compute_what_those_of_transformers_do(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.nn.functional import cross_entropy
    from transformers.modeling_layers import MtpModel

    model = dataclasses.replace(converted.draw(tiny.V3, 0), num_nextn_predict_layers=2)
    transformers = pytest.importorskip("transformers")
    run, hf = str(tmp_path / "run"), str(tmp_path / "hf")
    converted.run(tmp_path / "run", model)
    convert.to_hf(run, hf)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(hf, **options).eval()
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (8, 40))
    stepper, state = trained.load(trained.read_config(run), run)
    loaded._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[45]\."]  # it knows the modules of 61 layers only
    modules, ids = MtpModel.from_pretrained(loaded).eval(), torch.tensor(tokens)
    expected = {}
    with torch.no_grad():
        h = loaded.model(ids).last_hidden_state
        for depth in range(2):
            positions = torch.arange(depth + 1, ids.shape[1])[None]
            h = modules.forward_layer(depth, h[:, :-1], positions, None, input_ids=ids[:, depth + 1 :])
            logits, targets = loaded.lm_head(h[:, :-1]), ids[:, depth + 2 :]
            expected[f"mtp_{depth + 1}"] = cross_entropy(
                logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
            ).item()

    ones = np.ones_like(tokens[:, 1:])
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": ones, "positions": np.cumsum(ones, 1) - 1}
    found, at_once = [], stepper.config.data.global_batch
    for i in range(0, len(tokens), at_once):
        batch = stepper.batch({name: values[i : i + at_once].astype(np.int32) for name, values in rows.items()})
        found.append(stepper.evaluate(state.params, state.router_bias, batch))
    total = jax.tree.map(lambda *parts: sum(map(float, parts)), *({k: f[k] for k in ("sums", "counts")} for f in found))
    for term, value in expected.items():
        assert total["sums"][term] / total["counts"][term] == pytest.approx(value, rel=1e-6)
