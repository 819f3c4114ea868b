"""Engram: hashes to the bit, documents apart, and tables that stay where they are."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import oracle
import pytest
import tiny

from maxds import data, describe, flops, host, loader, mesh, optimizer, params, step, train
from maxds.config import Config, Optimizer
from maxds.data import DataError
from maxds.data.packing import pack
from maxds.hf import settings
from maxds.hf.files import FormatError
from maxds.model import engram, layout, residual

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
MODELS = {"one stream": tiny.ENGRAM, "hyper-connections": tiny.ENGRAM_HYPER}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)

# ------------------------------------------------------------------------------------------ hashes


def model(**changes):
    return dataclasses.replace(tiny.ENGRAM, **changes)


# Sizes of the paper, of a released model, and the most that fit: remainders by 20, 24 and 28 bits.
SIZES = {
    "paper": model(vocab_size=129280, engram_compressed_vocab_size=None, engram_vocab_size=(646400, 646400)),
    "V4.1": model(
        vocab_size=129280,
        num_hidden_layers=40,
        engram_layer_ids=(1, 14),
        engram_max_ngram_size=4,
        engram_vocab_size=(16_000_000,) * 3,
        engram_n_heads=8,
        engram_compressed_vocab_size=99092,
        engram_seed=0,
    ),
    "largest": model(
        vocab_size=2,
        engram_pad_token_id=1,
        engram_compressed_vocab_size=None,
        engram_vocab_size=(2_000_000, 997_000_000),
    ),
}


def packed(c, lengths, length=40):
    """A row of documents of these lengths, and its padding."""
    rng = np.random.default_rng(5)
    return pack([rng.integers(0, c.vocab_size, n, np.int32) for n in lengths], length)


@pytest.mark.parametrize("c", SIZES.values(), ids=SIZES)
def test_rows_are_those_of_integers_of_any_size_within_each_document(c):
    row, rng = packed(c, [17, 1, 2, 9]), np.random.default_rng(6)
    classes = rng.integers(0, c.engram_compressed_vocab_size or c.vocab_size, c.vocab_size, np.int32)
    for layer in c.engram_layer_ids:
        with tiny.strictly():
            look = jax.jit(functools.partial(engram.rows, c, layer))
            found = np.asarray(look(classes, row["tokens"][None], row["segments"][None]))[0]
        for document in range(1, 5):
            own = row["segments"] == document
            np.testing.assert_array_equal(found[own], oracle.engram_rows(c, layer, classes, row["tokens"][own]))


def test_the_tables_of_v41_have_the_rows_that_its_config_states():
    assert [found.rows for found in engram.hashes(SIZES["V4.1"]).values()] == [384_006_168, 384_016_682]


# ------------------------------------------------------------------------------------------ module


def remembered(c, streams, memory, segments):
    """What the last layer's Engram makes of the streams [B n S D]."""
    x = residual.with_streams(residual.enter(c, streams[:, 0]), streams)
    weights = tiny.weights(c).engrams[str(c.engram_layer_ids[-1])]
    with tiny.strictly():
        look_back = jax.jit(functools.partial(engram.remember, c))
        return np.asarray(residual.streams(look_back(weights, x, memory, segments)))


@every_model
def test_a_packed_document_gets_what_it_gets_alone(model):
    length, rng = 40, np.random.default_rng(7)
    segments = packed(model, [17, 1, 2, 9])["segments"]
    streams = rng.standard_normal((1, model.hc_mult or 1, length, model.hidden_size), np.float32)
    memory = rng.standard_normal((1, length, model.engram_dim), np.float32)
    together = remembered(model, streams, memory, segments[None])
    for document in range(1, 5):
        own = segments == document
        count = own.sum()
        alone = np.zeros_like(streams), np.zeros_like(memory)
        alone[0][:, :, :count], alone[1][:, :count] = streams[:, :, own], memory[:, own]
        found = remembered(model, *alone, (np.arange(length) < count)[None].astype(np.int32))
        np.testing.assert_allclose(found[:, :, :count], together[:, :, own], rtol=0, atol=1e-6 * np.abs(together).max())


@every_model
def test_where_what_is_looked_up_is_nothing_gradients_are_numbers(model):
    streams = np.ones((1, model.hc_mult or 1, 3, model.hidden_size), np.float32)
    weights = tiny.weights(model).engrams[str(model.engram_layer_ids[-1])]

    def let_in(weights, streams, memory):
        x = residual.with_streams(residual.enter(model, streams[:, 0]), streams)
        return jnp.sum(jnp.square(residual.streams(engram.remember(model, weights, x, memory, np.ones((1, 3))))))

    nothing = np.zeros((1, 3, model.engram_dim), np.float32)
    found = jax.jit(jax.grad(let_in, argnums=(0, 1, 2)))(weights, streams, nothing)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_it_starts_without_a_convolution_and_its_tables_never_decay():
    first = engram.declare(tiny.ENGRAM, 0)
    assert (first.conv.std, first.table.decay, first.table.dims) == (0.0, False, "")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_tables_are_trained_by_adam_at_five_times_the_learning_rate(kind):
    table = dataclasses.replace(engram.declare(tiny.ENGRAM, 0).table, shape=(3, 4))
    declared = {"table": table, "embed": dataclasses.replace(table, rate=1.0)}
    transform = optimizer.make(Optimizer(kind=kind, lr=0.1, clip=None), declared, None)
    weights = {name: jnp.ones((3, 4)) for name in declared}
    grads = {name: jnp.arange(12.0).reshape(3, 4) - 5.5 for name in declared}
    found = transform.update(grads, transform.init(weights), weights)[0]
    np.testing.assert_allclose(found["embed"], np.sign(grads["embed"]), rtol=1e-6)
    np.testing.assert_allclose(found["table"], 5 * found["embed"], rtol=1e-6)


@pytest.mark.newest
def test_tables_in_host_memory_are_trained_as_those_on_devices_and_stay_there():
    """One of the two; the other is frozen.

    With room for all pairs in one round: of further ones, which here one replica takes and the other does not, XLA's
    CPU runtime may start the collectives in another order on each device, and stand still.
    """
    trained = "[!e]*", "engrams.0.*"

    def of(tables):
        optimizer = {"accumulate_steps": 2, "weight_decay": 0.1, "clip": 0.5, "train": trained}
        return tiny.config(tiny.ENGRAM, "plain", (2, 1, 2), tables=tables, capacity=8.0, optimizer=optimizer)

    on_devices, on_host = tiny.stepper(of("device")), tiny.stepper(of("host"))
    here = tiny.state(of("device"))
    for draw in range(2):
        # Both steps begin alike: the second would show how Adam enlarges the first one's rounding.
        there = jax.tree.map(lambda a, b: jax.device_put(np.asarray(a), b.sharding), here, on_host.abstract_state)
        inputs = tiny.inputs(of("device"), draw)[2]
        here, metrics = on_devices.train(here, inputs, on_devices.training)
        there, metrics_there = on_host.train(there, inputs, on_host.training)
        assert metrics.pop("applied") and metrics_there.pop("applied")
        judged = on_devices.evaluate(here.params, here.router_bias, inputs)
        judged_there = on_host.evaluate(there.params, there.router_bias, inputs)
        pair = (here, metrics, judged), (there, metrics_there, judged_there)
        assert tiny.largest_error(*(jax.tree.map(np.asarray, found) for found in pair))[0] < 1e-6
    kinds = {params.name(path): a.sharding.memory_kind for path, a in jax.tree_util.tree_leaves_with_path(there)}
    assert all((kind == host.KIND) == name.endswith(".table") for name, kind in kinds.items())
    assert sum(kind == host.KIND for kind in kinds.values()) == 2 + 2  # moments are of the one


# ------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("name", ["V3", "V4", "HYPER"])
def test_an_engram_cuts_a_stack_and_moves_no_layer(name):
    c = dataclasses.replace(getattr(tiny, name), num_hash_layers=2, num_hidden_layers=6)
    sizes = {"engram_vocab_size": (5, 7)}
    one_by_one = [kind for stack in layout.stacks(c).values() for kind in stack.kinds * stack.count]
    for layers in [(0,), (1,), (5,), (2, 4), tuple(range(6))]:
        cut, first = layout.stacks(dataclasses.replace(c, engram_layer_ids=layers, **sizes)), 0
        for stack in cut.values():
            assert stack.engram == (first if first in layers else None)
            first += stack.count * len(stack.kinds)
        assert [kind for stack in cut.values() for kind in stack.kinds * stack.count] == one_by_one


def test_a_cut_moves_no_table_of_a_hash_layer():
    plain = dataclasses.replace(tiny.HYPER, num_hidden_layers=5, num_hash_layers=3)
    cut = dataclasses.replace(plain, engram_layer_ids=(2,), engram_vocab_size=(5, 7))
    whole, parts = layout.router_bias(plain), layout.router_bias(cut)
    assert {name: table.shape[0] for name, table in parts.items() if "hash" in name} == {
        "hash_layers": 1,
        "hash_layers_2": 2,
    }
    joined = np.concatenate([parts["hash_layers"], parts["hash_layers_2"]])
    np.testing.assert_array_equal(joined, whole["hash_layers"])


def test_no_table_travels_and_each_is_read_and_written_once():
    config = tiny.config(tiny.ENGRAM, "batch_split", (2, 2, 2))
    stepper = tiny.stepper(config)
    program = jaxprs.live(stepper.loss_and_grads, *tiny.inputs(config), stepper.training)
    declared = [engram.table for engram in stepper.network.declared.engrams.values()]
    shards = [(table.shape[0] // 4, table.shape[1]) for table in declared]
    whole = {table.shape[0] for table in declared} | {rows for rows, _ in shards}

    def touched(operation):
        shapes = [e.invars[0].aval.shape for name, e, _ in jaxprs.equations(program) if name == operation]
        return [shape for shape in shapes if whole & set(shape)]

    assert [touched(name) for name in ("all_gather", "all_to_all", "reduce_scatter")] == [[], [], []]
    assert [touched(name) for name in ("gather", "scatter-add", "psum")] == [shards, shards, []]  # of 2 x 2 devices


# ----------------------------------------------------------------------------------------- classes


def tokenizer_file(folder, words):
    from tokenizers import Tokenizer, decoders, models

    model = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["</s>"])
    model.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_tokens_of_one_text_but_for_case_accents_width_and_blanks_are_of_one_class(tmp_path):
    # As ByteLevel spells them: Ġ is a blank, Ċ a new line, Ã© the two bytes of é, and à and © its halves.
    words = ["the", "ĠThe", "THE", "e", "Ã©", "Ã", "©", "Ġ", "Ċ", "ĠĊ", "ï¼¡", "a", "ĠA", "the.", "Ġthe"]
    name = tokenizer_file(tmp_path, words)
    found = data.classes(name, data.load_tokenizer(name), 18, 8)
    assert found.tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 4, 4, 5, 5, 5, 6, 0, 7, 0, 0]  # then </s>, and what is no token


def test_bytes_have_classes_too():
    found = data.classes("bytes", data.load_tokenizer("bytes"), 257, 228)
    assert found[ord("A")] == found[ord("a")] != found[ord("b")]
    assert len({int(found[i]) for i in (*range(128, 256), 256)}) == 129  # parts of characters; the end of a document


def test_the_state_of_a_run_has_the_classes_of_its_tokenizer_and_another_number_is_refused():
    tokenizer = data.load_tokenizer("bytes")
    config = tiny.config(dataclasses.replace(tiny.ENGRAM, vocab_size=260, engram_compressed_vocab_size=228))
    state = step.TrainState(0, None, None, {"engrams": jnp.zeros(260, jnp.int32), "mtp": 1}, 0)
    assert train.know_tokens(state, config, tokenizer).router_bias["mtp"] == 1
    found = train.know_tokens(state, config, tokenizer).router_bias["engrams"]
    np.testing.assert_array_equal(found, data.classes("bytes", tokenizer, 260, 228))
    wrong = dataclasses.replace(config, model=dataclasses.replace(config.model, engram_compressed_vocab_size=227))
    with pytest.raises(DataError, match=r"=227, but data.tokenizer=bytes has tokens of 228 classes; set it to 228, or"):
        train.know_tokens(state, wrong, tokenizer)


# ------------------------------------------------------------------------------------- arithmetic


def test_of_the_preset_the_parameters_are_those_of_its_sizes():
    """By hand: V3.2's layers, what mixes the streams, and of each Engram tables, projections, norms and convolution."""
    c, d = loader.load(Config, CONFIGS / "deepseek-custom.yaml")[0].model, 1024
    query, key = d * 384 + 384 + 384 * 16 * 48, d * (128 + 16) + 128 + 128 * 16 * (32 + 128)
    indexer = 384 * 16 * 64 + d * 64 + 2 * 64 + d * 16
    attention = d + query + key + 16 * 128 * d + indexer
    experts = d + d * 16 + 16 + (16 + 1) * 3 * d * 512
    dense, mixing = d + 3 * d * 2048, 4 * d * 24 + 3 + 24
    layers = 6 * (attention + 2 * mixing) + dense + 5 * experts
    rows, looked_up = 885 * 4096 + 886 * 4096, 2 * 8 * 512
    assert [found.rows for found in engram.hashes(c).values()] == [885 * 4096 - 3158, 886 * 4096 - 3970]
    module = 5 * looked_up * d + 3 * 4 * d + 4 * 4 * d
    around = 2 * 129280 * d + d + 4 * d * 4 + 1 + 4 + 129280
    total = layers + rows * 512 + 2 * module + around
    found = describe.counts(c)
    assert found["total"] == total == 4_226_588_057
    assert found["active"] == total - 5 * 14 * 3 * d * 512 - rows * 512 + 2 * looked_up == 402_447_769


def test_keys_and_values_of_what_is_looked_up_are_flops():
    c = loader.load(Config, CONFIGS / "deepseek-custom.yaml")[0].model
    assert flops.per_token(c, 4096)["engrams"] == 3 * 2 * 2 * (4 + 1) * (2 * 8 * 512) * 1024
    one_stream = dataclasses.replace(c, hc_mult=None)
    assert flops.per_token(one_stream, 4096)["engrams"] == 3 * 2 * 2 * (1 + 1) * (2 * 8 * 512) * 1024


# --------------------------------------------------------------------------------- what is refused


def test_converting_is_refused():
    with pytest.raises(FormatError, match=r"model.engram_layer_ids=\[0, 1\]: Engram is not converted yet"):
        settings.write(tiny.ENGRAM, "float32", None)


def test_a_mesh_that_cannot_split_the_rows_of_tables_is_refused():
    with pytest.raises(mesh.MeshError, match=r"table has 4096 to split over mesh.fsdp=3 x mesh.expert=8"):
        params.check({"table": engram.declare(tiny.ENGRAM, 0).table}, {"data": 1, "fsdp": 3, "expert": 8})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engram_layer_ids": (1, 0)}, r"engram_layer_ids=\[1, 0\] must be different layers, in order, from 0 to 1"),
        ({"engram_layer_ids": (2,)}, r"engram_layer_ids=\[2\] must be different layers, in order, from 0 to 1"),
        ({"engram_layer_ids": ()}, r"engram_vocab_size=\[30, 50\] has no effect without engram_layer_ids"),
        ({"engram_vocab_size": (30,)}, r"=\[30\] must be a number above 1 for each size of n-grams, 2 to .*=3"),
        ({"engram_vocab_size": (10**9, 1)}, "must be a number above 1"),
        ({"engram_vocab_size": (10**9, 10**9)}, "with engram_n_heads=2 makes more than 2,000,000,000 rows a layer"),
        ({"engram_pad_token_id": 61}, "engram_pad_token_id=61 must be a token, 0 to 60"),
        ({"engram_compressed_vocab_size": 62}, "engram_compressed_vocab_size=62 must be 1 to vocab_size=61, or null"),
        ({"engram_kernel_size": 0}, "engram_kernel_size=0 must be positive"),
        ({"engram_seed": -1}, "engram_seed=-1 must not be negative"),
    ],
)
def test_a_mistake_is_told(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_a_model_without_tables_has_none_in_host_memory():
    with pytest.raises(ValueError, match=r"schedule\.tables=host has no effect without model\.engram_layer_ids"):
        tiny.config(tables="host")


def test_the_keys_go_through_a_file_and_back(tmp_path):
    config = tiny.config(tiny.ENGRAM)
    (tmp_path / "config.yaml").write_text(loader.render(config, loader.load(Config, written(tmp_path, config))[1]))
    assert loader.load(Config, tmp_path / "config.yaml")[0] == config


def written(folder, config):
    import yaml

    path = folder / "first.yaml"
    path.write_text(yaml.safe_dump(loader.plain(config)))
    return path
