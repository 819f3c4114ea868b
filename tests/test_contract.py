"""What a layer costs: how often each kernel and each collective runs, what is kept, and what is computed again.

Read off the traced training step, so that it holds before any compiler has touched it.
"""

import collections
import dataclasses
import functools
import math
import operator
import typing
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
import tiny

from maxds import params, schedule
from maxds.config import STAGE_NAMES, KeptName
from maxds.model import moe, ops

pytestmark = pytest.mark.newest

MODEL = dataclasses.replace(tiny.V3, num_hidden_layers=3, first_k_dense_replace=0, num_nextn_predict_layers=0)
SPARSE = dataclasses.replace(
    MODEL, index_topk=tiny.V32.index_topk, index_n_heads=tiny.V32.index_n_heads, index_head_dim=tiny.V32.index_head_dim
)
CAPACITY = 1.5
configured = functools.partial(tiny.config, capacity=CAPACITY)  # with further rounds
LAYER = params.unstacked(tiny.layout.declare(MODEL).moe_layers)
SPLIT = {path: p for path, p in params.flatten(LAYER).items() if "fsdp" in p.spec}  # not the norms

# Multiplications of one microbatch by the weights of one layer: q_down, q_up, kv_down, k_rope, k_up, v_up, out;
# router, shared up, shared down. Each of them costs two in the backward pass.
PROJECTIONS = 10
ATTENTION, ATTENTION_BACKWARD = 2, 6
ROTATIONS = 2  # of queries and of the key: a matrix turns pairs by a right angle; one more each in the backward pass
COUNTING = 1  # the routing's places


def scans(config):
    """The scans over layers: forward, backward."""
    stepper = tiny.stepper(config)
    with tiny.strictly():
        program = jaxprs.live(stepper.loss_and_grads, *tiny.inputs(config), stepper.training)
    outer = [eqn for name, eqn, inside in jaxprs.equations(program) if name == "scan" and "scan" not in inside]
    forward, backward = (eqn for eqn in outer if jaxprs.count(eqn.params["jaxpr"].jaxpr)["multiply_groups"])
    assert (forward.params["reverse"], backward.params["reverse"]) == (False, True)
    return forward, backward


@functools.cache
def layers(kind, model=MODEL, **schedule):
    """The forward and the backward of one layer."""
    return tuple(scan.params["jaxpr"].jaxpr for scan in scans(configured(model, kind, (2, 2, 2), **schedule)))


def work(jaxpr):
    """How often the first round of a layer runs each operation; and each further round."""
    return (
        jaxprs.count(jaxpr, lambda inside: "while" not in inside),
        jaxprs.count(jaxpr, lambda inside: "while" in inside),
    )


def collectives(jaxpr):
    """Of the layer and its first round of experts."""
    names = ("all_gather", "reduce_scatter", "psum", "psum_invariant", "all_to_all", "ppermute")
    found = [(n, eqn.params) for n, eqn, inside in jaxprs.equations(jaxpr) if n in names and "while" not in inside]
    axes = [(name, p.get("axes", p.get("axis_name"))) for name, p in found]
    return collections.Counter((name, *((over,) if isinstance(over, str) else over)) for name, over in axes)


# ------------------------------------------------------------------------------------ batch_split


def test_forward_of_two_microbatches_multiplies_by_the_experts_four_times():
    first, further = work(layers("batch_split")[0])
    assert (first["multiply_groups"], first["multiply_groups_transposed"]) == (4, 0)  # up and down of each
    assert (further["multiply_groups"], further["multiply_groups_transposed"]) == (4, 0)


def test_backward_of_two_microbatches_multiplies_by_the_experts_eight_times():
    first, further = work(layers("batch_split")[1])
    assert (first["multiply_groups"], first["multiply_groups_transposed"]) == (4, 4)  # up and down of each: dx, dw
    again = (further["multiply_groups"], further["multiply_groups_transposed"])
    assert again == (6, 4)  # and up again, which is not kept


def test_backward_recomputes_projections_but_neither_attention_nor_what_follows_it():
    forward, _ = work(layers("batch_split")[0])
    backward, _ = work(layers("batch_split")[1])
    again = PROJECTIONS - 1  # not the output projection
    assert forward["dot_general"] == 2 * (PROJECTIONS + ROTATIONS + ATTENTION + COUNTING)
    assert backward["dot_general"] == 2 * (2 * PROJECTIONS + ATTENTION_BACKWARD + again + 2 * ROTATIONS)


def test_routing_is_decided_once():
    forward, _ = work(layers("batch_split")[0])
    backward, _ = work(layers("batch_split")[1])
    assert (forward["sort"], forward["argmax"]) == (2, 6)  # argmax: the best of groups, groups, experts
    assert (backward["sort"], backward["argmax"]) == (0, 0)


def test_keys_are_selected_once_and_the_indexer_s_loss_is_computed_once():
    forward, _ = work(layers("batch_split", SPARSE)[0])
    backward, _ = work(layers("batch_split", SPARSE)[1])
    projections, weights = 3, 1  # the indexer's q, k and heads; of the loss: attention's weights
    scores = 1  # twice: to select, and for the loss
    of_scores = 3  # gradients of q and k, and what they are multiplied by
    rotated = 1  # attention's queries, for the loss: where its kernel has done that too, the compiler makes it once
    dense = 2 * (PROJECTIONS + ROTATIONS + ATTENTION + COUNTING)
    assert forward["dot_general"] == dense + 2 * (projections + 2 * scores + weights + rotated)
    dense = 2 * (2 * PROJECTIONS + ATTENTION_BACKWARD + PROJECTIONS - 1 + 2 * ROTATIONS)
    # Projections again, and the gradients of their weights alone: none flows on to what the indexer reads.
    assert backward["dot_general"] == dense + 2 * (2 * projections + scores + weights + rotated + of_scores)
    assert (forward["bitcast_convert_type"], backward["bitcast_convert_type"]) == (2, 0)  # of scores, to be ordered


def test_forward_gathers_each_weight_once_and_exchanges_tokens_once():
    assert collectives(layers("batch_split")[0]) == {
        ("all_gather", "fsdp"): len(SPLIT),  # the next layer's
        ("all_gather", "expert"): 2 * 3,  # dispatch: choices, tokens, weights
        ("reduce_scatter", "expert"): 2,  # combine
    }


def test_backward_gathers_scatters_and_sums_each_weight_once():
    backward = layers("batch_split")[1]
    assert collectives(backward) == {
        ("all_gather", "fsdp"): len(SPLIT),  # the layer's below
        ("reduce_scatter", "fsdp"): len(SPLIT),  # gradients of the layer above
        ("psum", "expert"): 1,  # of all that are not split over it
        ("psum", "data"): len(SPLIT),  # gradients two layers above
        ("all_gather", "expert"): 2 * (2 + 1),  # dispatch again: tokens, weights; and of combine
        ("reduce_scatter", "expert"): 2 * 2,  # of dispatch: tokens, weights
    }
    (summed,) = (
        eqn for name, eqn, _ in jaxprs.equations(backward) if name == "psum" and "expert" in eqn.params["axes"]
    )
    shards = sum(p.size // 2 for p in SPLIT.values() if "expert" not in p.spec)
    assert [a.aval.shape for a in summed.invars] == [(shards,)]


def test_half_of_a_layer_s_weights_travels_at_once_and_the_rest_when_a_microbatch_has_attended():
    early = {path for path in SPLIT if path.startswith("dispatch.")} | {"experts.up"}
    sizes = {path: p.size // (2 if "expert" in p.spec else 1) for path, p in SPLIT.items()}
    halves = [sorted(n for path, n in sizes.items() if (path in early) == first) for first in (True, False)]
    for scan in scans(configured(MODEL, "batch_split", (2, 2, 2), keep=())):
        jaxpr, found = scan.params["jaxpr"].jaxpr, [[], []]
        products = {
            v for eqn in jaxpr.eqns if jaxprs.count(SimpleNamespace(eqns=[eqn]))["dot_general"] for v in eqn.outvars
        }
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "all_gather" and "fsdp" in eqn.params["axis_name"]:
                waits = not products.isdisjoint(jaxprs.ancestors(jaxpr, eqn))
                found[waits].append(eqn.outvars[0].aval.size)
        assert [sorted(of_half) for of_half in found] == halves


def test_the_second_half_of_a_layer_s_weights_follows_the_first():
    jaxpr = layers("batch_split")[0]
    gathers = [e for e in jaxpr.eqns if e.primitive.name == "all_gather" and "fsdp" in e.params["axis_name"]]
    before = [jaxprs.ancestors(jaxpr, eqn) for eqn in gathers]
    waits = [sum(not of.isdisjoint(other.outvars) for other in gathers) for of in before]
    first, second = waits.count(0), len(waits) - waits.count(0)
    assert first and second
    assert sorted(waits) == [0] * first + [first] * second


def test_no_microbatch_waits_for_the_tokens_of_the_other():
    jaxpr = layers("batch_split")[0]
    gathers = [e for e in jaxpr.eqns if e.primitive.name == "all_gather" and "expert" in e.params["axis_name"]]
    of_devices = (2 * tiny.LENGTH, MODEL.hidden_size)
    a, b = (eqn for eqn in gathers if eqn.outvars[0].aval.shape == of_devices)
    assert jaxprs.ancestors(jaxpr, b).isdisjoint(a.outvars)


def test_a_stage_whose_output_is_kept_is_replayed_before_the_next_one():
    """Before tokens travel there are the same products, but for b's output projection, then both."""

    def products_before_tokens(keep):
        jaxpr = layers("batch_split", keep=keep)[1]
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "all_gather" and eqn.outvars[0].aval.shape == (2 * tiny.LENGTH, MODEL.hidden_size):
                before = jaxprs.ancestors(jaxpr, eqn)
                there = SimpleNamespace(eqns=[e for e in jaxpr.eqns if not before.isdisjoint(e.outvars)])
                found.append(jaxprs.count(there)["dot_general"])
        return sorted(found)

    kept, again = (products_before_tokens(keep) for keep in (("attention", "dispatch_input"), ("attention",)))
    # The cotangent of what b's combine gave, dispatch of b and of a, the cotangent of a.
    assert [n - m for n, m in zip(again, kept, strict=True)] == [0, 1, 2, 2]
    assert kept[0] == 0 < kept[1]


def test_split_sequences_travel_once_each_way_and_are_multiplied_as_often():
    split = dataclasses.replace(MODEL, num_attention_heads=tiny.FOUR_HEADS.num_attention_heads)
    config = configured(split, "batch_split", (2, 2, 2), context_parallel=True)
    forward, backward = (scan.params["jaxpr"].jaxpr for scan in scans(config))
    whole = [collectives(jaxpr) for jaxpr in layers("batch_split")]
    assert collectives(forward) - whole[0] == {
        ("all_gather", "expert"): 2 * 3,  # latents of queries, of keys and values, and the rotated key
        ("all_to_all", "expert"): 2,  # what attention found
    }
    assert collectives(backward) - whole[1] == {
        ("all_gather", "expert"): 2 * 3,  # again
        ("reduce_scatter", "expert"): 2 * 3,  # gradients of these
        ("all_to_all", "expert"): 2 * 2,  # again, and its gradient
    }
    for found, before in zip((forward, backward), layers("batch_split"), strict=True):
        assert work(found)[0]["dot_general"] == work(before)[0]["dot_general"]


def rows():
    """Routed rows that a device makes room for, in one microbatch of one row."""
    even_share = tiny.LENGTH * MODEL.num_experts_per_tok
    return int(CAPACITY * even_share + 7) // 8 * 8


def of_each_microbatch(c=MODEL):
    """What a layer keeps whatever config says; and what of it each name adds."""
    b, s, k = 1, tiny.LENGTH, c.num_experts_per_tok
    always = {
        "{}.attention_input.h": ("float32", b, s, c.hidden_size),
        "{}.attention_input.balance": ("float32",),
        "{}.routing.0": ("int32", b * s * k),  # chosen
        "{}.routing.1.order": ("int32", 2 * b * s * k),  # of the two devices along `expert`
        "{}.routing.1.places": ("int32", 2 * b * s * k),
        "{}.routing.1.sizes": ("int32", c.n_routed_experts // 2),
        "{}.routing.1.most": ("int32",),
        "{}.routing.2": ("float32", b, c.n_routed_experts),  # what the balance loss has counted
    }
    named = {
        "attention": {
            "{}.attention.0": ("float32", b, c.num_attention_heads, s, c.v_head_dim),
            "{}.attention.1": ("float32", b, c.num_attention_heads, s),  # log-sum-exp
        },
        "dispatch_input": {
            "{}.dispatch_input.h": ("float32", b, s, c.hidden_size),
            "{}.dispatch_input.balance": ("float32",),
        },
        "expert_up": {"{}.expert_up": ("float32", rows(), 2 * c.moe_intermediate_size)},
    }
    return always, named


@pytest.mark.parametrize("keep", [(), ("attention",), ("dispatch_input",), ("expert_up",), STAGE_NAMES])
def test_a_layer_keeps_exactly_what_config_names(monkeypatch, keep):
    found = tape(monkeypatch, configured(MODEL, "batch_split", (2, 2, 2), keep=keep))
    always, named = of_each_microbatch()
    expected = functools.reduce(operator.or_, (named[name] for name in keep if name in named), always)
    assert found == {name.format(m): shape for name, shape in expected.items() for m in range(2)}


def tape(monkeypatch, config):
    """What a layer keeps: path -> (dtype, *shape)."""
    tapes, kept = [], schedule._Split.kept
    monkeypatch.setattr(schedule._Split, "kept", lambda *args: tapes.append(kept(*args)) or tapes[-1])
    stepper = tiny.stepper(config)
    jax.eval_shape(stepper.loss_and_grads, *tiny.inputs(config), stepper.training)
    return {params.name(path): (leaf.dtype.name, *leaf.shape) for path, leaf in jax.tree.leaves_with_path(tapes[0])}


def test_a_layer_with_an_indexer_also_keeps_a_bit_for_each_pair_of_tokens_and_its_loss(monkeypatch):
    found = tape(monkeypatch, configured(SPARSE, "batch_split", (2, 2, 2), keep=()))
    own = {
        "{}.attention_input.indexer": ("float32",),
        "{}.selection.0": ("uint8", 1, tiny.LENGTH, -(-tiny.LENGTH // 8)),
        "{}.selection.1": ("float32",),
    }
    expected = of_each_microbatch(SPARSE)[0] | own
    assert found == {name.format(m): shape for name, shape in expected.items() for m in range(2)}


@pytest.mark.parametrize("keep", [(), ("dispatch_input",), ("attention", "expert_up")])
def test_what_is_not_kept_is_computed_again_and_nothing_else(keep):
    """Beside the projections, once each; and the routing is never decided again."""
    backward, _ = work(layers("batch_split", keep=keep)[1])
    output_projection = "dispatch_input" not in keep
    again = PROJECTIONS - 1 + output_projection + ATTENTION * ("attention" not in keep)
    assert backward["dot_general"] == 2 * (2 * PROJECTIONS + ATTENTION_BACKWARD + again + 2 * ROTATIONS)
    assert backward["multiply_groups"] == 2 * (2 if "expert_up" in keep else 3)
    assert (backward["sort"], backward["argmax"]) == (0, 0)


def test_what_is_offloaded_goes_to_host_memory_and_comes_back():
    forward, backward = layers("batch_split", offload=("attention", "expert_up"))
    for jaxpr, space in ((forward, jax.memory.Space.Host), (backward, jax.memory.Space.Device)):
        moves = [eqn for name, eqn, _ in jaxprs.equations(jaxpr) if name == "device_put"]
        assert [set(eqn.params["devices"]) for eqn in moves] == [{space}] * 6  # per microbatch: output, lse, up
        assert not any(name == "device_put" for name, _, _ in jaxprs.equations(layers("batch_split")[0]))


def test_what_is_offloaded_has_arrived_before_the_last_stage_whose_rounds_no_transfer_crosses():
    """a's input when that has attended, b's with the rest of a's, the rest of b's last. Numbers stay where they are."""
    forward, _ = layers("batch_split", offload=("attention_input", "attention", "dispatch_input", "expert_up"))
    there = [eqn for eqn in forward.eqns if in_host_memory(eqn)]
    barriers = [eqn for eqn in there if eqn.primitive.name == "optimization_barrier"]
    sent = {v for eqn in there if eqn not in barriers for v in eqn.outvars}
    assert [in_host_memory(eqn) for eqn in barriers] == [2 * 5] * 3  # per microbatch: inputs, output, log-sum-exp, up
    assert [len(sent.intersection(eqn.invars)) for eqn in barriers] == [1, 4, 3]


def test_what_comes_back_from_host_memory_is_due_by_microbatch():
    _, backward = layers("batch_split", offload=("attention", "expert_up"))
    come = {id(v) for eqn in backward.eqns if eqn.primitive.name == "device_put" for v in eqn.outvars}
    barriers = [eqn for eqn in backward.eqns if eqn.primitive.name == "optimization_barrier"]
    due = [sum(id(v) in come for v in eqn.invars) for eqn in barriers]
    assert [n for n in due if n] == [3, 3]


def test_the_first_round_of_experts_does_not_wait_for_what_is_on_its_way():
    stream, rows, coming = (jax.ShapeDtypeStruct((n,), "float32") for n in (1, 2, 3))
    program = jax.make_jaxpr(moe.beside_stream)(moe.Computed(stream, rows, None), coming).jaxpr
    assert [(e.primitive.name, e.invars) for e in program.eqns] == [
        ("optimization_barrier", [program.invars[0], program.invars[2]])
    ]


@pytest.mark.parametrize("kind", ["batch_split", "plain"])
def test_an_evaluation_sends_nothing_to_host_memory(kind):
    config = configured(MODEL, kind, (2, 2, 2), offload=("attention_input", "expert_up"))
    program = jaxprs.live(tiny.stepper(config).eval_step, *tiny.inputs(config))
    assert not any(in_host_memory(eqn) for _, eqn, _ in jaxprs.equations(program))


def in_host_memory(eqn):
    """How many results of an operation lie there."""
    return sum(v.aval.memory_space == jax.memory.Space.Host for v in eqn.outvars)


@pytest.mark.parametrize(("ici", "dcn"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_only_the_router_travels_in_float32_and_gradients_are_summed_in_the_dtypes_of_reductions(ici, dcn):
    precision = {"compute": "bfloat16", "reduce": ici, "reduce_dcn": dcn}
    forward, backward = (
        s.params["jaxpr"].jaxpr for s in scans(configured(MODEL, "batch_split", (2, 2, 2), precision=precision))
    )

    def dtypes(jaxpr, collective, axis="fsdp"):
        found = [eqn for name, eqn, _ in jaxprs.equations(jaxpr) if name == collective]
        axes = [e.params["axis_name" if "axis_name" in e.params else "axes"] for e in found]
        return collections.Counter(e.invars[0].aval.dtype.name for e, a in zip(found, axes, strict=True) if axis in a)

    assert dtypes(forward, "all_gather") == {"bfloat16": len(SPLIT) - 1, "float32": 1}
    assert dtypes(backward, "reduce_scatter") == {ici: len(SPLIT)}
    assert dtypes(backward, "psum", "data") == {dcn: len(SPLIT)}


@pytest.mark.parametrize("kind", ["batch_split", "plain"])
def test_a_layer_s_backward_pass_begins_when_the_head_s_gradient_is_scattered(kind):
    """Of the main loss and MTP's: on every device it is a whole [D V] in float32."""
    stepper = tiny.stepper(configured(tiny.V3, kind, (1, 2, 2)))
    with tiny.strictly():
        program = jaxprs.live(stepper.loss_and_grads, *tiny.inputs(stepper.config), stepper.training)
    (program,) = (eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "shard_map")
    whole = stepper.abstract_state.params.head.shape
    (scattered,) = (
        eqn.outvars[0]
        for eqn in program.eqns
        if eqn.primitive.name == "reduce_scatter" and eqn.invars[0].aval.shape == whole
    )
    backward = [eqn for eqn in program.eqns if eqn.primitive.name == "scan" and eqn.params["reverse"]]
    assert len(backward) == 3  # dense layers, MoE layers, MTP
    for scan in backward:
        assert scattered in jaxprs.ancestors(program, scan)


@pytest.mark.parametrize("kind", ["batch_split", "plain"])
def test_gradients_of_layers_are_not_added_to_those_of_the_parts_before_as_a_whole(kind):
    config = configured(MODEL, kind, (1, 2, 2), optimizer={"accumulate_steps": 2})
    stepper = tiny.stepper(config)
    with tiny.strictly():
        program = jaxprs.live(stepper.loss_and_grads, *tiny.inputs(config), stepper.training)
    experts = stepper.abstract_state.params.moe_layers["experts"]
    stacks = [a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(experts)]
    sums = [e for name, e, _ in jaxprs.equations(program) if name in ("add", "add_any")]
    assert len(stacks) == 2 and not any(e.outvars[0].aval.shape in stacks for e in sums)


# ----------------------------------------------------------------------------------------- float8

FLOAT8 = configured(MODEL, "batch_split", (2, 2, 2), precision={"compute": "bfloat16", "matmul": "fp8"})


def travelling(jaxpr, collective, axis):
    """Dtypes of what travels, of the layer and its first round of experts."""
    found = [
        e
        for name, e, inside in jaxprs.equations(jaxpr)
        if name == collective and axis in e.params["axis_name"] and "while" not in inside
    ]
    return collections.Counter(e.invars[0].aval.dtype.name for e in found)


def test_in_float8_a_weight_of_a_matmul_travels_in_a_byte_and_no_scale_with_it():
    for scan in scans(FLOAT8):
        found = travelling(scan.params["jaxpr"].jaxpr, "all_gather", "fsdp")
        assert found == {"float8_e4m3fn": len(SPLIT) - 1, "float32": 1}  # the router; scales were there before


def test_experts_alone_in_float8_travel_and_are_multiplied_so_and_no_other_weight():
    config = configured(MODEL, "batch_split", (2, 2, 2), precision={"compute": "bfloat16", "matmul": "fp8_experts"})
    for scan, all_of_it in zip(scans(config), scans(FLOAT8), strict=True):
        jaxpr = scan.params["jaxpr"].jaxpr
        found = travelling(jaxpr, "all_gather", "fsdp")
        assert found == {"float8_e4m3fn": 2, "bfloat16": len(SPLIT) - 3, "float32": 1}  # up and down; the router
        assert travelling(jaxpr, "all_gather", "expert") == travelling(
            all_of_it.params["jaxpr"].jaxpr, "all_gather", "expert"
        )
        for name, eqn, _ in jaxprs.equations(jaxpr):
            if name in ("dot_general", *jaxprs.KERNELS):
                narrow = [v.aval.dtype.itemsize == 1 for v in eqn.invars[:2]]
                assert narrow == [name != "dot_general"] * 2, eqn


def test_in_float8_tokens_travel_beside_their_scales_and_sums_in_the_compute_dtype():
    forward, backward = (scan.params["jaxpr"].jaxpr for scan in scans(FLOAT8))
    # Of each microbatch: tokens, their scales, the weights that the experts' outputs are combined with; choices.
    dispatch = collections.Counter(float8_e4m3fn=2, bfloat16=2, float32=2)
    assert travelling(forward, "all_gather", "expert") == dispatch + collections.Counter(int32=2)
    # Again, and the gradients of combine with their scales.
    combine = collections.Counter(float8_e5m2=2, bfloat16=2)
    assert travelling(backward, "all_gather", "expert") == dispatch + combine
    assert travelling(forward, "reduce_scatter", "expert") == {"bfloat16": 2}
    assert travelling(backward, "reduce_scatter", "expert") == {"bfloat16": 2, "float32": 2}
    assert travelling(backward, "reduce_scatter", "fsdp") == {"float32": len(SPLIT)}


def test_in_float8_all_is_multiplied_but_router_attention_embedding_and_head():
    def operands(eqn):
        return tuple(v.aval.dtype.name for v in eqn.invars[:2])

    forward, backward = (scan.params["jaxpr"].jaxpr for scan in scans(FLOAT8))
    kinds = ("dot_general", "multiply_groups", "multiply_groups_transposed")
    first = [
        collections.Counter(
            operands(e) for name, e, inside in jaxprs.equations(jaxpr) if name in kinds and "while" not in inside
        )
        for jaxpr in (forward, backward)
    ]
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    matrices = PROJECTIONS - 1  # not the router
    assert first[0][e4m3, e4m3] == 2 * (matrices + 2)
    assert first[1][e4m3, e4m3] == 2 * (matrices - 1)  # again: not the output projection
    assert first[1][e5m2, e4m3] + first[1][e4m3, e5m2] == 2 * 2 * (matrices + 2)
    others = [sum(n for dtypes, n in counts.items() if not any("float8" in d for d in dtypes)) for counts in first]
    others_twice = 2 * (1 + ROTATIONS + ATTENTION + COUNTING), 2 * (1 + 2 + 2 * ROTATIONS + ATTENTION_BACKWARD)
    assert tuple(others) == others_twice  # 1, 2: of the router

    stepper = tiny.stepper(FLOAT8)
    program = jaxprs.live(stepper.loss_and_grads, *tiny.inputs(FLOAT8), stepper.training)
    found = [e for name, e, _ in jaxprs.equations(program) if name == "all_gather"]
    vocabulary = [e.invars[0].aval.dtype.name for e in found if MODEL.vocab_size in e.invars[0].aval.shape]
    assert vocabulary == ["bfloat16", "bfloat16"]  # embedding, head


# ------------------------------------------------------------------------------------------ plain


def products(kind, **schedule):
    """Multiplications of the backward pass: (dense, grouped, grouped transposed), first round only."""
    backward, _ = work(layers(kind, **schedule)[1])
    return backward["dot_general"], backward["multiply_groups"], backward["multiply_groups_transposed"]


NECESSARY = np.array([2 * PROJECTIONS + ATTENTION_BACKWARD + ROTATIONS, 2, 2])


def test_plain_that_keeps_everything_recomputes_nothing():
    assert products("plain", keep=("everything",)) == tuple(NECESSARY)


def test_plain_that_keeps_nothing_recomputes_the_forward_pass_once():
    """All of it but the routed experts' down product, on which no gradient depends. Nor does one on that of the shared
    experts, which only the compiler sees: rounds are given it, to add to.
    """
    assert products("plain", keep=()) == tuple(NECESSARY + np.array([PROJECTIONS + ROTATIONS + ATTENTION, 1, 0]))


def test_plain_recomputes_nothing_of_what_it_is_told_to_keep():
    kept = products("plain", keep=("attention", "expert_up"))
    assert kept == tuple(NECESSARY + np.array([PROJECTIONS + ROTATIONS - 1, 0, 0]))


def residuals(**schedule):
    """What the forward scan of `plain` hands to the backward one: (dtype, shape) of a layer."""
    forward, _ = scans(configured(MODEL, "plain", (2, 2, 2), **schedule))
    results = zip(forward.params["jaxpr"].jaxpr.outvars, forward.outvars, strict=True)
    kept = [one.aval for one, all_layers in results if one.aval.shape != all_layers.aval.shape]
    return collections.Counter((aval.dtype.name, *aval.shape) for aval in kept)


@pytest.mark.parametrize("name", sorted(set(typing.get_args(KeptName)) - {"everything", "mlp_input", "mlp_up"}))
def test_plain_keeps_exactly_what_config_names(name):
    c, tokens = MODEL, (2, tiny.LENGTH)
    heads = (2, c.num_attention_heads, tiny.LENGTH)
    shapes = {
        "attention_input": [],  # always kept, and not twice
        "q_latent": [(*tokens, c.q_lora_rank)],
        "kv_latent": [(*tokens, c.kv_lora_rank), (*tokens, c.qk_rope_head_dim)],
        "query": [(*heads, c.qk_head_dim)],
        "key": [(*heads, c.qk_nope_head_dim)],
        "value": [(*heads, c.v_head_dim)],
        "attention": [(*heads, c.v_head_dim), heads],
        "dispatch_input": [(*tokens, c.hidden_size)],
        "shared_up": [(*tokens, 2 * c.n_shared_experts * c.moe_intermediate_size)],
        "dispatched": [(2 * rows(), c.hidden_size)],
        "expert_up": [(2 * rows(), 2 * c.moe_intermediate_size)],
    }
    added = residuals(keep=(name,)) - residuals(keep=())
    assert added == collections.Counter(("float32", *shape) for shape in shapes[name])


def test_plain_that_keeps_values_keeps_the_routing_that_orders_them():
    backward, _ = work(layers("plain", keep=("expert_up",))[1])
    assert (backward["sort"], backward["argmax"]) == (0, 0)


def test_plain_that_keeps_everything_keeps_no_weight():
    """Neither gathered nor as a shard, whatever its shape or dtype. No activation here has a weight's shape."""
    forward, _ = scans(configured(MODEL, "plain", (1, 2, 2), keep=("everything",), precision={"compute": "bfloat16"}))
    results = zip(forward.params["jaxpr"].jaxpr.outvars, forward.outvars, strict=True)
    kept = {one.aval for one, all_layers in results if one.aval.shape != all_layers.aval.shape}
    kept = {aval.shape for aval in kept if aval.dtype != "int32"}  # the routing
    assert len(kept) > 10
    for path, p in SPLIT.items():
        axes = (*p.spec, *[None] * (len(p.shape) - len(p.spec)))
        shard = tuple(n // 2 if axis else n for n, axis in zip(p.shape, axes, strict=True))
        gathered = tuple(n // 2 if axis == "expert" else n for n, axis in zip(p.shape, axes, strict=True))
        for shape in (shard, gathered):
            flattened = {(*shape[:i], math.prod(shape[i:])) for i in range(len(shape))}
            assert not kept & {shape, *flattened}, path


@pytest.mark.parametrize("keep", [("everything",), ()])
def test_plain_gathers_weights_again_for_the_backward_pass(keep):
    forward, backward = (collectives(jaxpr) for jaxpr in layers("plain", keep=keep))
    assert forward["all_gather", "fsdp"] == backward["all_gather", "fsdp"] == len(SPLIT)


def test_the_head_multiplies_what_it_is_made_of_and_never_float32():
    h, head, targets = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((4, 16), jnp.bfloat16), jnp.zeros(8, jnp.int32)

    def loss(h, head):
        return ops.cross_entropy(h, head, targets, (1.0, 0.0), 4)[0]

    traced = jaxprs.live(jax.grad(loss, (0, 1)), h, head)
    products = [e for name, e, _ in jaxprs.equations(traced) if name == "dot_general"]
    assert len(products) == 3
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype(jnp.bfloat16)}
