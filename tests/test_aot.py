"""What is read off a compiled program: small programs written by hand, with answers worked out by hand.

A cycle is a nanosecond here, every network moves 1 GB/s (a byte in a nanosecond), and so does HBM; so all times are
small integers of nanoseconds.
"""

import base64
import dataclasses
import itertools
import pathlib
import re
import types
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from maxds import flops, loader
from maxds import host as host_lib
from maxds.aot import cost, fit, hlo, network, picture, report, timeline, topology
from maxds.aot.topology import GIB
from maxds.config import Config

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
CHIP = topology.Chip("toy", 1, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 0.5e9, 4)
MESH = {"data": 2, "fsdp": 2, "expert": 2}
GATHER = "replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}"  # over fsdp


def cycles(n):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{n}"}}}}'


def program(entry, *others):
    """A program, out of the lines of its entry and whole other computations."""
    head = "HloModule toy, is_scheduled=true, num_partitions=8\n"
    body = entry.strip("\n")
    return hlo.parse("\n\n".join([head, *others, f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"]))


def walk(module, peak=1e9, trips=None):
    """The timeline, with every collective as long as its result has bytes."""

    def route(i, opcode):
        axes, _ = network.replica_axes(i.attributes, MESH)
        size = sum(a.bytes for a in i.arrays)
        return timeline.Route(axes, "ici", size, size / 1e9)

    found = timeline.walk(module, cost.Costs(module, CHIP, peak), route, trips)
    parts = found.compute_seconds + found.exposed + found.stalled
    assert found.step == pytest.approx(parts, abs=1e-15)
    assert found.step >= found.compute_seconds
    assert found.exposed <= found.communication + 1e-15
    return found


def ns(seconds):
    return round(seconds * 1e9, 6)


# ------------------------------------------------------------------------------------------ parser


def test_shapes_have_types_sizes_layouts_and_memory_spaces():
    module = program("""
  %p = f32[8]{0:T(256)} parameter(0)
  ROOT %t = (bf16[3,130]{1,0:T(8,128)(2,1)S(1)}, (s32[]{:T(128)}, pred[4]{0:S(5)})) tuple(%p)""")
    (first,), (scalar, flags) = module.entry.root.elements
    assert (first.dims, first.bytes, first.space) == ((3, 130), 780, hlo.VMEM)
    assert first.padded_bytes == 8 * 256 * 2
    assert (scalar.dims, scalar.bytes, flags.space, flags.bytes) == ((), 4, hlo.HOST, 4)
    fp8 = program("  ROOT %p = f8e4m3fn[16]{0} parameter(0)").entry.root.arrays[0]
    assert fp8.bytes == 16


def test_attributes_of_a_pallas_call_may_span_lines():
    module = program("""
  %p = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
    "a": {"b": 1
}}
}, metadata={op_name="jit(f)/attention/k" source_file="f.py" source_line=7}, backend_config={"custom_call_config":\
{"body":"abc","cost_estimate":{"flops":"600","transcendentals":"0","bytes_accessed":"50"}}}
  ROOT %r = f32[8]{0} add(%k, %k)""")
    kernel = module.entry.by_name["k"]
    assert [i.name for i in module.entry.instructions] == ["p", "k", "r"]
    assert (kernel.target, kernel.cost_estimate, kernel.op_name) == ("tpu_custom_call", (600, 50), "jit(f)/attention/k")
    assert module.sources(kernel) == ["f.py:7"]
    found = walk(module)
    assert ns(found.compute["cost estimate"].seconds) == ns(600e-9 / cost.SCHEDULED_ELSE)  # slower than the bytes
    assert found.flops == 600


def test_sources_are_found_through_the_stack_frames():
    text = """HloModule toy

FileNames
1 "a.py"
2 "b.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10}
2 {file_name_id=2 function_name_id=2 line=20 end_line=20}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0), metadata={op_name="x" stack_frame_id=2}
}
"""
    module = hlo.parse(text)
    assert module.sources(module.entry.root) == ["b.py:20", "a.py:10"]


def test_a_program_says_how_many_devices_run_it_and_what_it_may_overwrite():
    text = (
        "HloModule toy, num_partitions=8, input_output_alias={ {0}: (2, {}, may-alias), {1, 0}: (0, {}, must-alias) }"
    )
    module = hlo.parse(f"{text}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  ROOT %p = f32[8]{{0}} parameter(0)\n}}\n")
    assert (module.partitions, module.donated) == (8, {0, 2})


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule empty\n")


# ---------------------------------------------------------------------------------------- replica groups


@pytest.mark.parametrize(
    ("attributes", "axes", "size"),
    [
        ("replica_groups=mesh['data'=2,'fsdp'=2,'expert'=2] {'fsdp'}", ("fsdp",), 2),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'expert'=2] {'data','expert'}, dimensions={0}", ("data", "expert"), 4),
        ("replica_groups=mesh['all'=8] {'all':(2)2}", ("fsdp",), 2),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("fsdp",), 2),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}", ("data", "fsdp", "expert"), 8),
        ("replica_groups=[4,2]<=[8]", ("expert",), 2),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), 2),
        ("replica_groups={}", ("data", "fsdp", "expert"), 8),
        ("source_target_pairs={{0,2},{2,0}}", ("fsdp",), 2),
    ],
)
def test_replica_groups_are_mesh_axes(attributes, axes, size):
    found, group = network.replica_axes(attributes, MESH)
    assert (found, len(group)) == (axes, size)


@dataclasses.dataclass(frozen=True)
class Device:
    coords: tuple
    core_on_chip: int


def torus(x, y, z, chip):
    """A mesh (data, fsdp, expert) = (x, y·z, devices of a chip)."""
    places = itertools.product(range(x), range(y), range(z), range(chip.per_chip))
    devices = np.array([Device((i, j, k), core) for i, j, k, core in places], dtype=object)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    shape = (x, y * z, chip.per_chip)
    return type("Mesh", (), {"devices": grid.reshape(shape), "axis_names": tuple(MESH), "size": len(devices)})()


def test_the_links_of_an_axis_follow_from_where_its_devices_are():
    chip = topology.CHIPS["TPU7x"]
    links = network.Network(torus(4, 4, 8, chip), chip, 256)
    assert links.link(["data"]).bandwidth == 2 * chip.ici / 2  # a closed ring, and both dies of a chip have their own
    assert links.link(["fsdp"]).bandwidth == 4 * chip.ici / 2  # two closed rings
    assert links.link(("fsdp", "expert")).bandwidth == 4 * chip.ici
    assert (links.link(["expert"]).network, links.link(["expert"]).bandwidth) == ("die", chip.die)


@pytest.mark.parametrize(
    ("kind", "shape", "along_x", "along_y_and_z"),
    [
        ("TPU v5", (4, 4, 8), 2, 4),
        ("TPU v5", (4, 2, 4), 1, 2),  # less than a cube of 4 x 4 x 4 has no links that lead around
        ("TPU v6 lite", (16, 8, 1), 2, 1),
        ("TPU v6 lite", (8, 8, 1), 1, 1),
    ],
)
def test_a_torus_closes_where_its_chips_say(kind, shape, along_x, along_y_and_z):
    chip = topology.CHIPS[kind]
    links = network.Network(torus(*shape, chip), chip, np.prod(shape))
    found = [links.link([axis]).bandwidth / chip.ici for axis in ("data", "fsdp")]
    assert found == [along_x, along_y_and_z]


def test_an_all_to_all_takes_as_long_as_what_crosses_the_middle_of_its_longest_dimension():
    v5p, tpu7x = topology.CHIPS["TPU v5"], topology.CHIPS["TPU7x"]
    for chip, shape, group, expected in (
        (v5p, (4, 4, 8), range(32), 4000 * 8 / 4 / 2),  # along y and z: 8 of z have two links there
        (v5p, (4, 4, 8), range(0, 32, 8), 4000 * 4 / 4 / 2),
        (v5p, (2, 2, 2), range(2), 4000 / 2),  # a line
        (tpu7x, (4, 4, 4), range(32), 4000 * 2 * 4 / 4 / 2),  # both dies of a chip send over its links
        (tpu7x, (4, 4, 4), range(0, 32, 2), 4000 * 2 * 4 / 4 / 2),
    ):
        over = f"replica_groups={{{{{','.join(map(str, group))}}}}}"
        links = network.Network(torus(*shape, chip), chip, np.prod(shape) * chip.per_chip)
        found = links.route(collective("all-to-all", "f32[1000]{0}", over), "all-to-all")
        assert found.seconds == pytest.approx(expected / chip.ici)


def test_a_permutation_takes_the_link_between_its_devices():
    chip = topology.CHIPS["TPU7x"]
    links = network.Network(torus(2, 2, 2, chip), chip, 16)
    for pairs, network_, rate in (("{{0,1},{1,0}}", "die", chip.die), ("{{0,2},{2,0}}", "ici", chip.ici)):
        sent = collective("collective-permute", "f32[1000]{0}", f"source_target_pairs={pairs}")
        found = links.route(sent, "collective-permute")
        assert (found.network, found.seconds) == (network_, 4000 / rate)


def test_a_part_of_an_axis_has_the_links_of_its_own_devices_only():
    chip = topology.CHIPS["TPU v5"]
    links = network.Network(torus(4, 4, 8, chip), chip, 128)
    # Along z, along y, both; and a part of a ring, which closes over others' links.
    for group, ways in ((range(8), 2), (range(0, 32, 8), 2), (range(32), 4), (range(4), 1)):
        over = f"replica_groups={{{{{','.join(map(str, group))}}}}}"
        gather = links.route(collective("all-gather", "f32[1000]{0}", over), "all-gather")
        assert gather.axes == ("fsdp",)
        assert gather.seconds == pytest.approx(4000 * (len(group) - 1) / len(group) / (ways * chip.ici))
    assert [link.about.partition(": ")[2] for link in links.used.values()] == [
        "2 along z",
        "2 along y",
        "2 along y + 2 along z",
        "1 along z",
    ]


def collective(opcode, shape, attributes):
    return program(f"  ROOT %c = {shape} {opcode}(%p), {attributes}").entry.root


def test_collectives_move_all_but_a_device_s_own_share():
    chip = topology.CHIPS["TPU7x"]
    links = network.Network(torus(2, 2, 1, chip), chip, 8)
    over = "replica_groups={{0,2},{1,3},{4,6},{5,7}}"
    gather = links.route(collective("all-gather", "f32[100]{0}", over), "all-gather")
    scatter = links.route(collective("reduce-scatter", "f32[50]{0}", over), "reduce-scatter")
    reduce = links.route(collective("all-reduce", "f32[100]{0}", over), "all-reduce")
    start = collective("all-gather-start", "(f32[50]{0}, f32[100]{0})", over)
    assert gather.bytes == scatter.bytes == links.route(start, "all-gather").bytes == 200
    start = collective("all-reduce-start", "f32[100]{0}", over)  # which returns no operands
    assert reduce.bytes == links.route(start, "all-reduce").bytes == 400
    assert gather.seconds == 200 / (chip.ici / 2)
    assert (gather.axes, gather.network, gather.lanes) == (("fsdp",), "ici", ("ici fsdp",))


@pytest.mark.parametrize(("slices", "times"), [(2, 1), (4, 1.5)])
def test_what_is_summed_with_other_slices_takes_the_dcn(slices, times):
    chip = topology.CHIPS["TPU v5"]
    links = network.Network(torus(slices, 2, 2, chip), chip, 4)
    gather = links.route(collective("all-gather", "f32[100]{0}", "replica_groups={}"), "all-gather")
    assert (gather.axes, gather.network, gather.bytes) == (("fsdp",), "ici", 300)  # of one slice
    sent = links.route(collective("send", "(f32[100]{0}, u32[], token[])", "channel_id=1"), "send")
    assert (sent.axes, sent.network, sent.bytes) == (("data",), "dcn", 400 * times)
    assert sent.seconds == sent.bytes / chip.dcn


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [
        ("tpu7:4x4x8", 1, "did you mean tpu7x?"),
        ("gpu:8", 1, "known are v5p, v6e, tpu7x"),
        ("tpu7x", 1, "give chips as tpu7x:4x4x8"),
        ("tpu7x:2x2", 1, "give chips as tpu7x:4x4x8"),
        ("tpu7x:0x2x2", 1, "give chips as tpu7x:4x4x8"),  # of which the compiler would die
        ("v6e:4x4x4", 1, "give chips as v6e:16x16"),
        ("tpu7x:2x2x1", 0, "slices from 1"),
    ],
)
def test_a_topology_that_is_none_is_refused(name, slices, message):
    with pytest.raises(topology.TopologyError, match=re.escape(message)):
        topology.devices(name, slices)


# ---------------------------------------------------------------------------------------- timeline


def test_a_synchronous_collective_is_exposed_whole():
    found = walk(
        program(f"""
  %p = f32[8]{{0}} parameter(0)
  %a = f32[8]{{0}} add(%p, %p), {cycles(100)}
  ROOT %g = f32[10]{{0}} all-gather(%a), {GATHER}""")
    )
    assert (ns(found.step), ns(found.exposed), ns(found.communication)) == (140, 40, 40)
    assert list(found.collectives) == [("all-gather", ("fsdp",), "ici")]


def overlapped(work, size=10):
    return program(f"""
  %p = f32[8]{{0}} parameter(0)
  %s = (f32[8]{{0}}, f32[{size}]{{0}}) all-gather-start(%p), {GATHER}
  %a = f32[8]{{0}} add(%p, %p), {cycles(work)}
  ROOT %d = f32[{size}]{{0}} all-gather-done(%s)""")


def test_an_asynchronous_collective_is_exposed_by_what_no_compute_hides():
    hidden, partly = walk(overlapped(100)), walk(overlapped(30))  # 32 bytes of operand and 40 of result, in `route`
    assert (ns(hidden.step), ns(hidden.exposed), ns(hidden.communication)) == (100, 0, 72)
    assert (ns(partly.step), ns(partly.exposed)) == (72, 42)


def test_collectives_of_one_axis_wait_for_each_other_and_those_of_two_do_not():
    def both(second):
        return program(f"""
  %p = f32[8]{{0}} parameter(0)
  %s = f32[10]{{0}} all-reduce-start(%p), {GATHER}
  %u = f32[10]{{0}} all-reduce-start(%p), {second}
  %d = f32[10]{{0}} all-reduce-done(%s)
  ROOT %e = f32[10]{{0}} all-reduce-done(%u)""")

    assert ns(walk(both(GATHER)).step) == 80
    assert ns(walk(both("replica_groups={{0,1},{2,3},{4,5},{6,7}}")).step) == 40
    assert ns(walk(both("replica_groups={{0,1,2,3},{4,5,6,7}}")).step) == 80  # over both axes


SPARSE = f"""%gather (q: f32[8]) -> f32[10] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %ag = f32[10]{{0}} all-gather(%q), {GATHER}
}}, execution_thread="sparsecore\""""


def test_a_call_on_the_sparse_cores_begins_when_its_operands_arrive():
    module = program(
        f"""
  %p = f32[8]{{0}} parameter(0)
  %s = ((), (), u32[]) call-start(), async_execution_thread="sparsecore", to_apply=%gather
  %a = f32[8]{{0}} add(%p, %p), {cycles(100)}
  %u = ((f32[8]{{0}}), f32[10]{{0}}, u32[]) call-update(%s, %a)
  %b = f32[8]{{0}} add(%p, %p), {cycles(10)}
  ROOT %d = f32[10]{{0}} call-done(%u)""",
        SPARSE,
    )
    found = walk(module)
    assert (ns(found.step), ns(found.exposed)) == (140, 30)


NESTED = """%rows (t: f32[8,4], n: s32[20]) -> f32[20,4] {
  %t = f32[8,4]{1,0} parameter(0)
  %n = s32[20]{0} parameter(1)
  ROOT %g = f32[20,4]{1,0} gather(%t, %n), offset_dims={1}
}

%taken (t: f32[8,4], n: s32[20]) -> f32[20,4] {
  %t = f32[8,4]{1,0} parameter(0)
  %n = s32[20]{0} parameter(1)
  ROOT %f = f32[20,4]{1,0} fusion(%t, %n), kind=kCustom, calls=%rows
}, execution_thread="sparsecore"

%offloaded (t: f32[8,4], n: s32[20]) -> f32[20,4] {
  %t = f32[8,4]{1,0} parameter(0)
  %n = s32[20]{0} parameter(1)
  %s = ((f32[8,4]{1,0}, s32[20]{0}), f32[20,4]{1,0}, u32[]) call-start(%t, %n), to_apply=%taken
  ROOT %d = f32[20,4]{1,0} call-done(%s)
}, execution_thread="sparsecore\""""


def test_what_the_sparse_cores_move_counts_once_and_a_row_as_often_as_it_is_taken():
    module = program(
        """
  %p = f32[8,4]{1,0} parameter(0)
  %n = s32[20]{0} parameter(1)
  %s = ((f32[8,4]{1,0}, s32[20]{0}), f32[20,4]{1,0}, u32[]) call-start(%p, %n), to_apply=%offloaded
  ROOT %d = f32[20,4]{1,0} call-done(%s)""",
        NESTED,
    )
    assert walk(module).others["SparseCore"].bytes == 80 + 2 * 320  # indices; rows of 16 bytes, read and written


def loop(body, trips="constant(5)", compare="lt"):
    condition = f"""%condition (c: (s32[])) -> pred[] {{
  %c = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] {trips}
  ROOT %{compare} = pred[] compare(%i, %n), direction=LT
}}"""
    return condition, f"%body (x: (s32[])) -> (s32[]) {{\n{body}\n}}"


WHILE = """
  %p = f32[8]{0} parameter(0)
  %t = (s32[]) tuple(%p)
  ROOT %w = (s32[]) while(%t), condition=%condition, body=%body"""


def test_a_loop_takes_its_trips_times_as_long():
    body = f"""  %x = (s32[]) parameter(0)
  %a = f32[8]{{0}} add(%x, %x), {cycles(7)}
  %g = f32[10]{{0}} all-reduce(%a), {GATHER}
  ROOT %r = (s32[]) tuple(%x)"""
    found = walk(program(WHILE, *loop(body)))
    assert (ns(found.step), ns(found.compute_seconds), ns(found.exposed)) == (5 * 47, 35, 200)
    assert found.loops["body"].trips == 5
    assert ns(found.loops["body"].end - found.loops["body"].start) == 47
    known = WHILE + ', backend_config={"known_trip_count":{"n":"9"}}'
    assert ns(walk(program(known, *loop(body))).step) == 9 * 47


def test_a_loop_may_count_from_a_constant():
    body = f"""  %x = (s32[]) parameter(0)
  %a = f32[8]{{0}} add(%x, %x), {cycles(7)}
  ROOT %r = (s32[]) tuple(%x)"""
    entry = WHILE.replace("%t = (s32[]) tuple(%p)", "%one = s32[] constant(1)\n  %t = (s32[]) tuple(%one)")
    assert ns(walk(program(entry, *loop(body))).step) == 4 * 7


def test_a_loop_that_counts_down_counts_as_none_aloud():
    body = f"  %x = (s32[]) parameter(0)\n  ROOT %a = (s32[]) tuple(%x), {cycles(7)}"
    entry = WHILE.replace("%t = (s32[]) tuple(%p)", "%nine = s32[] constant(9)\n  %t = (s32[]) tuple(%nine)")
    found = walk(program(entry, *loop(body)))
    assert (found.step, [i.name for i in found.skipped]) == (0, ["w"])


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(train_step)/shard_map/jvp(layers)/while/body/eval_jaxpr/attention/bsd,dq->bsq/dot_general",) * 2,
        ("jit(train_step)/transpose(jvp(layers))/while/body/transpose(jvp(mlp))/bsd,df->bsf/dot_general",) * 2,
        ("jit(train_step)/experts/dispatch/while/body/eval_jaxpr/jit(_take)/gather", "jit(_take)/gather"),
        ("jit(train_step)/jit(_where)/select_n", "select_n"),
        ("", ""),
    ],
)
def test_an_operation_is_told_by_what_its_stage_does_there(op_name, expected):
    assert timeline.within_stage(op_name) == "/".join(expected.split("/")[-2:])


def test_what_is_sent_without_a_name_is_told_by_what_made_it():
    named = 'metadata={op_name="jit(train_step)/experts/ecd,edf->ecf/dot_general" source_file="x.py" source_line=5}'
    module = program(f"""
  %p = f32[8]{{0}} parameter(0)
  %a = f32[8]{{0}} add(%p, %p), {named}, {cycles(1)}
  %b = f32[8]{{0}} bitcast(%a)
  %g = f32[10]{{0}} all-reduce(%b), {GATHER}
  ROOT %r = f32[8]{{0}} add(%p, %p), {cycles(1)}""")
    (told,) = report._most_exposed(module, walk(module))
    assert (told["name"], told["source"]) == ("g", "x.py:5") and told["op_name"].endswith("ecd,edf->ecf/dot_general")


def test_so_it_may_if_the_counter_is_copied_and_is_not_the_first_of_its_state():
    condition = """%condition (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}"""
    body = f"""%body (x: (s32[], s32[])) -> (s32[], s32[]) {{
  %x = (s32[], s32[]) parameter(0)
  %a = f32[8]{{0}} add(%x, %x), {cycles(7)}
  ROOT %r = (s32[], s32[]) tuple(%x)
}}"""
    entry = """
  %zero = s32[] constant(0)
  %two = s32[] constant(2)
  %copied = s32[] copy(%two), backend_config={"window_config":{"estimated_cycles":"0"}}
  %t = (s32[], s32[]) tuple(%zero, %copied)
  ROOT %w = (s32[], s32[]) while(%t), condition=%condition, body=%body"""
    assert ns(walk(program(entry, condition, body)).step) == 3 * 7


def test_a_loop_s_comparison_may_be_within_a_fusion():
    body = f"  %x = (s32[]) parameter(0)\n  ROOT %a = (s32[]) tuple(%x), {cycles(7)}"
    compared = """%compared (i: s32[], n: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %n = s32[] parameter(1)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}"""
    condition, body = loop(body)
    condition = condition.replace("compare(%i, %n), direction=LT", "fusion(%i, %n), kind=kLoop, calls=%compared")
    assert walk(program(WHILE, compared, condition, body)).loops["body"].trips == 5


def test_what_a_loop_calls_and_the_branch_it_takes_count_in_each_trip():
    def called(name, n):
        add = f"  ROOT %{name}_a = f32[8]{{0}} add(%{name}_x, %{name}_x), {cycles(n)}"
        return f"%{name} (x: f32[8]) -> f32[8] {{\n  %{name}_x = f32[8]{{0}} parameter(0)\n{add}\n}}"

    body = """  %x = (s32[]) parameter(0)
  %c = f32[8]{0} call(%x), to_apply=%sub
  %b = f32[8]{0} conditional(%x, %x, %x), branch_computations={%one, %two}
  ROOT %r = (s32[]) tuple(%x)"""
    found = walk(program(WHILE, called("sub", 3), called("one", 5), called("two", 90), *loop(body)))
    assert (ns(found.step), ns(found.compute_seconds)) == (5 * 93, 5 * 93)
    assert found.instructions["sub_a"].times == found.instructions["two_a"].times == 5


def handed_on(then, end="s"):
    """The body of a loop that waits for a transfer, and hands on the one that it begins, or what `then` makes."""
    return f"""  %x = (s32[], (f32[8]{{0}}, f32[10]{{0}})) parameter(0)
  %h = (f32[8]{{0}}, f32[10]{{0}}) get-tuple-element(%x), index=1
  %d = f32[10]{{0}} all-gather-done(%h)
  %s = (f32[8]{{0}}, f32[10]{{0}}) all-gather-start(%d), {GATHER}
  %i = s32[] get-tuple-element(%x), index=0
{then}
  ROOT %r = (s32[], (f32[8]{{0}}, f32[10]{{0}})) tuple(%i, %{end})"""


HANDED_ON = f"""
  %p = f32[8]{{0}} parameter(0)
  %first = (f32[8]{{0}}, f32[10]{{0}}) all-gather-start(%p), {GATHER}
  %t = (s32[], (f32[8]{{0}}, f32[10]{{0}})) tuple(%p, %first)
  %w = (s32[], (f32[8]{{0}}, f32[10]{{0}})) while(%t), condition=%condition, body=%body
  %last = (f32[8]{{0}}, f32[10]{{0}}) get-tuple-element(%w), index=1"""


def test_a_lane_that_a_loop_leaves_busy_is_busy_after_all_its_trips():
    body = handed_on(f"  %a = f32[8]{{0}} add(%d, %d), {cycles(10)}")
    entry = f"""{HANDED_ON}
  %u = f32[10]{{0}} all-reduce-start(%p), {GATHER}
  %d2 = f32[10]{{0}} all-gather-done(%last)
  ROOT %e = f32[10]{{0}} all-reduce-done(%u)"""
    assert ns(walk(program(entry, *loop(body))).step) == 6 * 72 + 40  # one after the other


def test_a_loop_within_a_loop_hands_its_own_last_transfer_on():
    inner = loop(handed_on(f"  %a = f32[8]{{0}} add(%d, %d), {cycles(50)}"))
    inner = (text.replace("%body", "%inner").replace("%condition", "%until") for text in inner)
    outer = """  %t = (s32[], (f32[8]{0}, f32[10]{0})) tuple(%i, %s)
  %v = (s32[], (f32[8]{0}, f32[10]{0})) while(%t), condition=%until, body=%inner
  %k = (f32[8]{0}, f32[10]{0}) get-tuple-element(%v), index=1"""
    entry = f"""{HANDED_ON}
  ROOT %e = f32[10]{{0}} all-gather-done(%last)"""
    found = walk(program(entry, *inner, *loop(handed_on(outer, "k"))))
    assert ns(found.step) == ns(found.communication) == 72 * (1 + 5 * (1 + 5))  # each is waited for


def test_a_loop_that_runs_as_often_as_the_data_says_counts_as_none_aloud():
    body = f"  %x = (s32[]) parameter(0)\n  ROOT %a = (s32[]) tuple(%x), {cycles(7)}"
    found = walk(program(WHILE, *loop(body, "get-tuple-element(%c), index=0")))
    assert (found.step, [i.name for i in found.skipped]) == (0, ["w"])


def test_a_loop_over_the_parts_of_a_ramp_s_batch_takes_those_of_a_whole_one():
    body = f"""  %x = (s32[]) parameter(0)
  %a = f32[8]{{0}} add(%x, %x), {cycles(7)}
  ROOT %r = (s32[]) tuple(%x)"""
    found = walk(program(WHILE, *loop(body, "get-tuple-element(%c), index=0")), trips=3)
    assert (ns(found.step), found.skipped) == (3 * 7, [])


def test_a_transfer_may_end_in_the_next_iteration():
    body = handed_on(f"  %a = f32[8]{{0}} add(%d, %d), {cycles(50)}")
    entry = f"""{HANDED_ON}
  ROOT %d2 = f32[10]{{0}} all-gather-done(%last)"""
    found = walk(program(entry, *loop(body)))
    # Six transfers of 72: the first is waited for in full, the others are hidden by 50 each.
    assert ns(found.communication) == 6 * 72
    assert ns(found.exposed) == 72 + 5 * 22
    assert ns(found.step) == 5 * 50 + 72 + 5 * 22


def test_the_slowest_branch_of_a_conditional_counts():
    def branch(name, n):
        add = f"  ROOT %a = f32[8]{{0}} add(%x, %x), {cycles(n)}"
        return f"%{name} (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{add}\n}}"

    entry = """
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} conditional(%p, %p, %p), branch_computations={%one, %two}"""
    assert ns(walk(program(entry, branch("one", 5), branch("two", 90))).step) == 90


def test_branches_that_are_tried_leave_no_lane_busy():
    def branch(name, line):
        return f"%{name} (x: f32[8]) -> f32[10] {{\n  %x = f32[8]{{0}} parameter(0)\n  ROOT %{name}_r = {line}\n}}"

    one = branch("one", f"f32[10]{{0}} all-gather(%x), {GATHER}")
    two = branch("two", f"f32[10]{{0}} add(%x, %x), {cycles(5)}")
    entry = """
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[10]{0} conditional(%p, %p, %p), branch_computations={%one, %two}"""
    assert ns(walk(program(entry, one, two)).step) == 40


def test_copies_into_vmem_count_among_the_bytes_of_hbm_and_those_to_the_host_do_not():
    module = program("""
  %p = f32[8]{0} parameter(0)
  %s = (f32[8]{0:S(1)}, f32[8]{0}, u32[]) copy-start(%p)
  %d = f32[8]{0:S(1)} copy-done(%s)
  %t = (f32[4]{0:S(5)}, f32[4]{0}, u32[]) copy-start(%p)
  ROOT %e = f32[4]{0:S(5)} copy-done(%t)""")
    found = walk(module)
    assert (found.hbm_bytes, found.others[timeline.HOST_DMA].bytes) == (32, 16)


def test_copies_to_the_host_run_beside_the_compute():
    module = program(f"""
  %p = f32[8]{{0}} parameter(0)
  %s = (f32[8]{{0:S(5)}}, f32[8]{{0}}, u32[]) copy-start(%p)
  %a = f32[8]{{0}} add(%p, %p), {cycles(50)}
  ROOT %d = f32[8]{{0:S(5)}} copy-done(%s)""")
    found = walk(module)
    assert ns(found.others[timeline.HOST_DMA].seconds) == 64  # 32 bytes at 0.5 GB/s
    assert (ns(found.step), ns(found.stalled), found.exposed) == (64, 14, 0)


def test_slices_of_host_memory_count_as_what_they_move():
    module = program("""
  %p = f32[8]{0} parameter(0)
  %h = f32[4,8]{1,0:S(5)} parameter(1)
  %s = ((f32[4,8]{1,0:S(5)}, f32[1,8]{1,0}, s32[]), f32[4,8]{1,0:S(5)}, u32[]) dynamic-update-slice-start(%h, %p)
  %d = f32[4,8]{1,0:S(5)} dynamic-update-slice-done(%s)
  %t = ((f32[4,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]) dynamic-slice-start(%d)
  ROOT %e = f32[1,8]{1,0} dynamic-slice-done(%t)""")
    host = walk(module).others[timeline.HOST_DMA]
    assert (host.times, host.bytes, ns(host.exposed)) == (2, 64, 128)


def test_what_is_sent_to_another_slice_ends_where_it_is_received():
    meet = 'frontend_attributes={_xla_host_transfer_rendezvous="sum"}'
    module = program(f"""
  %p = f32[8]{{0}} parameter(0)
  %k = token[] after-all()
  %s = (f32[8]{{0}}, u32[], token[]) send(%p, %k), channel_id=1, {meet}
  %a = f32[8]{{0}} add(%p, %p), {cycles(20)}
  %r = (f32[8]{{0}}, u32[], token[]) recv(%k), channel_id=2, {meet}
  %d = (f32[8]{{0}}, token[]) recv-done(%r), channel_id=2
  ROOT %e = token[] send-done(%s), channel_id=1""")
    found = walk(module)
    assert found.collectives["send", tuple(MESH), "ici"].times == 1
    assert ns(found.step) == 36  # the bytes of its result: 32, and 4 of context


def test_what_has_no_estimate_is_kept_in_sight():
    module = program("""
  %p = f32[8]{0} parameter(0)
  ROOT %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call\"""")
    assert walk(module).compute["none"].times == 1


def test_a_large_copy_is_listed_with_what_it_changes():
    module = program("""
  %p = f32[8,8]{1,0:T(8,128)} parameter(0)
  %a = f32[8,8]{1,0:T(8,128)} copy(%p)
  %b = f32[8,8]{1,0:T(2,128)} copy(%a)
  %c = f32[8,8]{0,1:T(8,128)} copy(%b)
  ROOT %d = f32[4]{0} slice(%c), slice={[0:4]}""")
    changes = {found["why"]: found for found in report._copies(module, walk(module), least=256)}
    assert set(changes) == {"is memory of its own", "has other tiles", "is turned"}
    assert changes["is turned"]["bytes"] == 256 and changes["is turned"]["times"] == 1
    assert not list(report._copies(module, walk(module), least=257))


# -------------------------------------------------------------------------------------------- cost


def only(line, *others, filled=1.0):
    module = program(
        f"""
  %x = bf16[64,16]{{1,0}} parameter(0)
  %w = bf16[16,32]{{1,0}} parameter(1)
  %g = bf16[4,16,32]{{2,1,0}} parameter(2)
  %y = bf16[64,32]{{1,0:S(1)}} parameter(3)
  ROOT %r = {line}""",
        *others,
    )
    return cost.Costs(module, CHIP, 1e9, filled).of(module.entry, module.entry.root)


@pytest.mark.parametrize(
    "line",
    [
        "bf16[64,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "bf16[64,32]{1,0} convolution(%x, %w), dim_labels=bf_io->bf",
        'bf16[64,32]{1,0} custom-call(%x, %g), frontend_attributes={ragged_dot_tiling="8,8,8"}',
        'bf16[4,16,32]{2,1,0} custom-call(%x, %y), frontend_attributes={ragged_dot_tiling="8,8,8"}',
    ],
)
def test_flops_of_products(line):
    assert only(line).flops == 2 * 64 * 16 * 32


def test_flops_of_a_batched_product_are_not_those_of_its_window():
    module = program("""
  %x = bf16[8,64,16]{2,1,0} parameter(0)
  %w = bf16[8,16,32]{2,1,0} parameter(1)
  ROOT %r = bf16[8,64,32]{2,1,0} convolution(%x, %w), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf""")
    assert cost.Costs(module, CHIP, 1e9).of(module.entry, module.entry.root).flops == 8 * 2 * 64 * 16 * 32


def test_taps_of_a_convolution_that_meet_padding_are_not_multiplied():
    """Every other of 8 tokens sees itself and the three before: of 16 pairs, 3 + 1 are with what is not there."""
    module = program("""
  %x = bf16[2,8,16]{2,1,0} parameter(0)
  %w = bf16[4,16,32]{2,1,0} parameter(1)
  ROOT %r = bf16[2,4,32]{2,1,0} convolution(%x, %w), window={size=4 stride=2 pad=3_0}, dim_labels=b0f_0io->b0f""")
    assert cost.Costs(module, CHIP, 1e9).of(module.entry, module.entry.root).flops == 2 * 2 * (16 - 4) * 16 * 32


def test_taps_that_meet_values_are_those_of_a_table_of_all_pairs():
    extents = (1, 4), (1, 3, 5), (1, 4), (1, 3), (0, 2), (1, 3), (1, 2)
    for values, taps, outputs, stride, before, gap, spread in itertools.product(*extents):
        place = np.arange(outputs)[:, None] * stride + np.arange(taps) * spread - before
        met = (place % gap == 0) & (place >= 0) & (place <= (values - 1) * gap)
        assert cost._taps(values, taps, outputs, (stride, before, gap, spread)) == met.sum()
    many = 2**15  # a batch that is a window; the table would take gigabytes
    assert cost._taps(many, many, many, (many - 1, 0, many, 1)) == many


def test_a_grouped_matmul_without_cost_is_estimated_by_its_shapes():
    found = only('bf16[64,32]{1,0} custom-call(%x, %g), frontend_attributes={ragged_dot_tiling="8,8,8"}')
    assert (found.basis, ns(found.seconds)) == ("grouped matmul", 2 * 64 * 16 * 32)


@pytest.mark.parametrize(
    ("left", "right", "rate"), [("f8e4m3fn", "f8e5m2", 2), ("bf16", "f8e5m2", 1), ("bf16", "bf16", 1)]
)
def test_a_grouped_matmul_of_two_float8_operands_is_as_fast_as_the_chip_multiplies_these(left, right, rate):
    module = program(f"""
  %n = s32[4]{{0}} parameter(0)
  %x = {left}[64,16]{{1,0}} parameter(1)
  %g = {right}[4,16,32]{{2,1,0}} parameter(2)
  ROOT %r = bf16[64,32]{{1,0}} custom-call(%n, %x, %g), frontend_attributes={{ragged_dot_tiling="8,8,8"}}""")
    chip = dataclasses.replace(CHIP, hbm=1e12, float8=2.0)
    found = cost.Costs(module, chip, 1e9).of(module.entry, module.entry.root)
    assert (found.flops, ns(found.seconds)) == (2 * 64 * 16 * 32, 2 * 64 * 16 * 32 / rate)


@pytest.mark.parametrize(("filled", "rows"), [(1.0, 64), (0.5, 64 / 2 + 3 * 8), (0.9, 64)])
@pytest.mark.parametrize("result", ["bf16[64,32]{1,0} custom-call(%x, %g)", "bf16[4,16,32]{2,1,0} custom-call(%x, %y)"])
def test_a_grouped_matmul_visits_the_tiles_that_tokens_fill_and_one_twice_where_a_group_ends(result, filled, rows):
    kernel = base64.b64encode(b"iteration_bounds = array<i64: 8, -9223372036854775808, 1>").decode()
    told = f'"body":"{kernel}","cost_estimate":{{"flops":"65536","bytes_accessed":"7"}}'
    found = only(
        f'{result}, frontend_attributes={{ragged_dot_tiling="8,16,32"}}, backend_config={{{told}}}', filled=filled
    )
    assert (found.basis, found.flops) == ("grouped matmul", 2 * rows * 16 * 32)
    assert ns(found.seconds) == found.flops > 7


@pytest.mark.parametrize(("tiling", "sides"), [("8,16,32", 16 * 32), ("8,12,20", 24 * 40), ("8,16,24", 16 * 48)])
@pytest.mark.parametrize("result", ["bf16[64,32]{1,0} custom-call(%x, %g)", "bf16[4,16,32]{2,1,0} custom-call(%x, %y)"])
def test_a_grouped_matmul_of_the_compilers_multiplies_what_stands_out_of_its_matrices_too(result, tiling, sides):
    found = only(f'{result}, frontend_attributes={{ragged_dot_tiling="{tiling}"}}')
    assert found.flops == 2 * 64 * sides


@pytest.mark.parametrize(
    ("kernel", "filled", "expected"),
    [("rows_by_matrices", 1.0, 2048 / 0.97), ("outer_products", 0.25, (512 + 3 * 256) / 0.91)],
)
def test_our_grouped_matmuls_visit_the_tiles_that_tokens_fill_at_the_share_of_their_schedule(kernel, filled, expected):
    told = 'backend_config={"cost_estimate":{"flops":"1","transcendentals":"0","bytes_accessed":"7"}}'
    name = f'metadata={{op_name="jit(f)/experts/multiply_groups/{kernel}/pallas_call"}}'
    module = program(f"""
  %s = s32[40]{{0}} parameter(0)
  %x = bf16[2048,16]{{1,0}} parameter(1)
  %g = bf16[4,16,32]{{2,1,0}} parameter(2)
  ROOT %r = bf16[2048,32]{{1,0}} custom-call(%s, %x, %g), custom_call_target="tpu_custom_call", {name}, {told}""")
    costs = cost.Costs(module, dataclasses.replace(CHIP, family="tpu7x", hbm=1e12), 1e9, filled)
    found = costs.of(module.entry, module.entry.root)
    assert (found.basis, ns(found.seconds)) == ("grouped matmul", ns(2 * 16 * 32 * expected * 1e-9))


@pytest.mark.parametrize(("flops", "moved", "expected"), [(400, 7, 1000), (40, 700, 700)])
def test_a_kernel_is_estimated_by_what_it_says_of_itself_and_does_not_reach_the_peak(flops, moved, expected):
    told = f'"cost_estimate":{{"flops":"{flops}","transcendentals":"9","bytes_accessed":"{moved}"}}'
    found = only(
        f'bf16[64,32]{{1,0}} custom-call(%x, %w), custom_call_target="tpu_custom_call", backend_config={{{told}}}'
    )
    assert (found.basis, found.flops, ns(found.seconds)) == ("cost estimate", flops, expected)


@pytest.mark.parametrize(
    ("family", "kernel", "expected"),
    [
        ("tpu7x", "attend", 530 / 0.52),
        ("tpu7x", "attend_backward", 530 / 0.52),
        ("v5p", "attend_selected_backward", 530 / 0.80),
        ("v6e", "vmap(attend_window)", 530 / 0.38),
        ("tpu7x", "vmap(attend_window_selected_backward)", 530 / 0.66),
        ("v6e", "sum_heads", 530 / 0.4),
    ],
)
def test_kernels_reach_the_share_of_the_peak_that_their_schedules_do(family, kernel, expected):
    told = 'backend_config={"cost_estimate":{"flops":"530","transcendentals":"9","bytes_accessed":"7"}}'
    name = f'metadata={{op_name="jit(f)/attention/{kernel}/pallas_call"}}'
    module = program(f"""
  %x = bf16[64,16]{{1,0}} parameter(0)
  ROOT %y = bf16[64,16]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", {name}, {told}""")
    costs = cost.Costs(module, dataclasses.replace(CHIP, family=family), 1e9)
    assert ns(costs.of(module.entry, module.entry.root).seconds) == ns(expected * 1e-9)


def test_a_sort_passes_over_its_operands():
    found = only("(bf16[64,16]{1,0}) sort(%x), dimensions={1}, to_apply=%c")
    assert (found.basis, ns(found.seconds)) == ("sort", 10 * 2 * 2048)  # log2(16) = 4: 4 * 5 / 2 passes


def test_bytes_are_those_of_hbm():
    assert only("bf16[64,32]{1,0:S(1)} copy(%y)").hbm_bytes == 0
    assert only("bf16[64,32]{1,0} copy(%y)").hbm_bytes == 64 * 32 * 2
    assert only("bf16[2,16]{1,0} dynamic-slice(%x, %w)").hbm_bytes == 2 * 64
    assert only("bf16[64,32]{1,0} dynamic-update-slice(%g, %w)").hbm_bytes == 2 * 16 * 32 * 2
    assert only("bf16[64,32]{1,0} scatter(%g, %x, %w), to_apply=%c").hbm_bytes == 2 * 16 * 32 * 2


def test_a_fusion_reads_the_slices_that_it_takes_and_writes_what_it_updates():
    inner = """%fused (a: bf16[64,16], b: bf16[16,32]) -> bf16[64,16] {
  %a = bf16[64,16]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  %i = s32[] constant(0)
  %s = bf16[1,16]{1,0} dynamic-slice(%a, %i, %i)
  ROOT %u = bf16[64,16]{1,0} dynamic-update-slice(%a, %s, %i, %i)
}"""
    assert only("bf16[64,16]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused", inner).hbm_bytes == 32 + 32


# --------------------------------------------------------------------------------------------- fit


def test_the_peak_is_where_the_most_lives():
    module = program("""
  %p = f32[8]{0} parameter(0)
  %a = f32[1000]{0} broadcast(%p)
  %b = f32[500]{0} slice(%a)
  %v = f32[9000]{0:S(1)} broadcast(%b)
  %c = f32[2000]{0} broadcast(%b)
  ROOT %d = f32[8]{0} slice(%c)""")
    peak, buffers = fit.largest(module)
    assert peak == 32 + 2000 + 8000  # a has ended, v is in VMEM
    assert [b.instruction.name for b in buffers] == ["c", "b", "p"]


def test_a_loop_works_in_what_it_is_given():
    body = """  %x = (s32[], f32[100]{0}) parameter(0)
  %e = f32[100]{0} get-tuple-element(%x), index=1
  %big = f32[300]{0} broadcast(%e)
  %n = f32[100]{0} dynamic-update-slice(%e, %big)
  %i = s32[] get-tuple-element(%x), index=0
  ROOT %r = (s32[], f32[100]{0}) tuple(%i, %n)"""
    entry = """
  %p = f32[100]{0} parameter(0)
  %i = s32[] constant(0)
  %t = (s32[], f32[100]{0}) tuple(%i, %p)
  ROOT %w = (s32[], f32[100]{0}) while(%t), condition=%condition, body=%body"""
    peak, buffers = fit.largest(program(entry, *loop(body)))
    assert peak == 400 + 4 + 1200
    assert buffers[0].instruction.name == "big"


def test_a_parameter_that_is_donated_ends_where_it_was_last_read_and_another_stays_the_caller_s():
    module = program("""
  %p = f32[100]{0} parameter(0)
  %a = f32[100]{0} negate(%p)
  %b = f32[100]{0} negate(%a)
  ROOT %c = f32[100]{0} negate(%b)""")
    assert fit.largest(module)[0] == 3 * 400
    assert fit.largest(dataclasses.replace(module, donated=frozenset({0})))[0] == 2 * 400


def test_what_a_program_returns_lives_to_its_end_and_naming_one_of_two_does_not_keep_the_other():
    module = program("""
  %p = f32[1]{0} parameter(0)
  %r = f32[100]{0} broadcast(%p)
  %w = (f32[300]{0}, f32[10]{0}) custom-call(%p)
  %a = f32[300]{0} get-tuple-element(%w), index=0
  %b = f32[20]{0} slice(%a)
  %t = f32[200]{0} broadcast(%p)
  %c = f32[10]{0} get-tuple-element(%w), index=1
  ROOT %out = (f32[100]{0}, f32[20]{0}, f32[200]{0}, f32[10]{0}) tuple(%r, %b, %t, %c)""")
    peak, buffers = fit.largest(module)
    assert peak == 4 * (1 + 100 + 300 + 10 + 20)  # and at the end 1 + 100 + 10 + 20 + 200
    assert [(b.instruction.name, b.shape) for b in buffers[:2]] == [("w", "f32[300]"), ("r", "f32[100]")]


def test_what_a_program_returns_lives_on_though_other_things_are_done_after_it():
    module = program("""
  %p = f32[1]{0} parameter(0)
  ROOT %r = f32[100]{0} broadcast(%p)
  %a = f32[300]{0} broadcast(%p)""")
    assert fit.largest(module)[0] == 4 + 400 + 1200


@pytest.mark.parametrize(
    ("start", "done", "expected"),
    [
        ("(f32[100]{0:S(1)}, f32[100]{0}, u32[]{:S(1)}) copy-start", "f32[100]{0:S(1)} copy-done", 8 + 1200),
        ("(f32[100]{0}, f32[200]{0}) all-gather-start", "f32[200]{0} all-gather-done", 8 + 800 + 1200),
        ("f32[200]{0} all-reduce-start", "f32[200]{0} all-reduce-done", 8 + 800 + 1200),
    ],
)
def test_a_transfer_makes_room_for_what_arrives_and_ends_the_need_of_what_was_sent(start, done, expected):
    module = program(f"""
  %p = f32[1]{{0}} parameter(0)
  %a = f32[100]{{0}} broadcast(%p)
  %s = {start}(%a)
  %d = {done}(%s)
  %b = f32[300]{{0}} broadcast(%p)
  ROOT %c = f32[1]{{0}} add(%b, %d)""")
    assert fit.largest(module)[0] == expected


@pytest.mark.parametrize(
    ("root", "said", "expected"),
    [
        ("dynamic-update-slice(%b, %a)", "", 8 + 2000 + 1200),
        ("add(%a, %b)", ", output_to_operand_aliasing={{}: (1, {})}", 8 + 2000 + 1200),
        ("add(%a, %b)", "", 4 + 2 * 2000),
    ],
)
def test_a_fusion_that_updates_in_place_makes_no_room(root, said, expected):
    inner = f"""%fused (a: f32[1], b: f32[500]) -> f32[500] {{
  %a = f32[1]{{0}} parameter(0)
  %b = f32[500]{{0}} parameter(1)
  ROOT %u = f32[500]{{0}} {root}
}}"""
    entry = f"""
  %p = f32[1]{{0}} parameter(0)
  %big = f32[500]{{0}} broadcast(%p)
  %f = f32[500]{{0}} fusion(%p, %big), kind=kLoop, calls=%fused{said}
  %more = f32[300]{{0}} broadcast(%p)
  ROOT %r = f32[1]{{0}} add(%f, %more)"""
    assert fit.largest(program(entry, inner))[0] == expected


def test_of_branches_the_one_that_needs_most_counts():
    def branch(name, n):
        lines = f"  %{name}_x = f32[1]{{0}} parameter(0)\n  %{name}_t = f32[{n}]{{0}} broadcast(%{name}_x)"
        return f"%{name} (x: f32[1]) -> f32[1] {{\n{lines}\n  ROOT %{name}_r = f32[1]{{0}} slice(%{name}_t)\n}}"

    entry = """
  %p = f32[1]{0} parameter(0)
  ROOT %c = f32[1]{0} conditional(%p, %p, %p), branch_computations={%one, %two}"""
    peak, buffers = fit.largest(program(entry, branch("one", 100), branch("two", 300)))
    assert (peak, buffers[0].instruction.name) == (4 + 4 + 1200, "two_t")


@pytest.mark.parametrize(("told", "expected"), [(130, 93), (200, 116), (0, None)])
def test_a_program_s_peak_is_the_compiler_s_without_what_hosts_hold_and_no_more_than_all_its_parts(told, expected):
    sizes = {"argument": 60, "output": 55, "alias": 50, "temp": 50, "generated_code": 1}
    host = {
        f"host_{kind}": size for kind, size in (sizes | {"argument": 30, "output": 27, "alias": 20, "temp": 20}).items()
    }
    stats = types.SimpleNamespace(
        **{f"{k}_size_in_bytes": n for k, n in (sizes | host).items()}, peak_memory_in_bytes=told
    )
    found = fit.of_executable(stats, 100)
    assert (found.peak, found.total, found.host, found.outputs) == (expected, 116, 58, 5)


@pytest.mark.parametrize(
    ("peak", "fits", "expected"),
    [
        (2.0, True, "it fits"),
        (None, True, "NOT KNOWN: the compiler takes it, and reports 1.000 GiB more than there is"),
        (3.5, True, "NOT KNOWN: the compiler takes it, and reports 0.500 GiB more than there is"),
        (None, False, "it DOES NOT FIT, by 1.000 GiB"),
    ],
)
def test_what_the_compiler_takes_is_not_said_to_fit_where_its_own_figures_say_otherwise(peak, fits, expected):
    peak = None if peak is None else peak * GIB
    found = fit.Fit(2 * GIB, 0, 2 * GIB, 0, 0, peak, 4 * GIB, 3 * GIB, fits, "nothing")
    assert report._fit_text(dataclasses.asdict(found)).splitlines()[0] == f"Fit: {expected}"


def test_the_compiler_s_refusal_says_what_was_needed():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (378.28G) exceeds available HBM (94.74G). HLO module: jit_train_step."
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("a",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    away = split.with_memory_kind(host_lib.KIND)
    found = fit.of_error(message, [jax.ShapeDtypeStruct((8, 2), np.float32, sharding=s) for s in (split, away)])
    assert found is not None
    assert (found.arguments, found.fits) == (16, False)
    assert found.total == pytest.approx(378.28 * 2**30)
    assert found.limit == pytest.approx(94.74 * 2**30)
    assert fit.of_error("INTERNAL: something else", []) is None


def test_a_late_refusal_names_the_largest_temporaries():
    found = fit.of_error(
        """RESOURCE_EXHAUSTED: E1000: Ran out of memory in memory space hbm. Used 98.31G of 94.74G hbm.

  Largest program allocations in hbm:

  1. Size: 3.50G
     Operator: op_name="jit(train_step)/experts/ragged-dot-none"
     Shape: bf16[64,7168,4096]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 3.50G
  2. Size: 406.00M
     Shape: f32[58,128]{1,0}

  Largest argument and output allocations in hbm:

  1. Size: 6.34G
     Shape: f32[58,64]{1,0}
""",
        [],
    )
    assert found is not None and not found.fits
    assert (found.total, found.limit) == (98.31 * 2**30, 94.74 * 2**30)
    first = fit.Allocation(3.5 * 2**30, "bf16[64,7168,4096]", "jit(train_step)/experts/ragged-dot-none")
    assert found.allocations == (first, fit.Allocation(406 * 2**20, "f32[58,128]", ""))


# ------------------------------------------------------------------------------------------ report


def target(*overrides, **changes):
    config, _ = loader.load(Config, CONFIGS / "quickstart.yaml", overrides)
    chip = dataclasses.replace(CHIP, family="v5p", per_chip=2)
    return dataclasses.replace(report.Target(config, MESH, "toy", 1, "toy", chip, 1e15, {}), **changes)


def test_the_figures_of_a_step_are_those_of_its_timeline():
    module = program(f"""
  %p = f32[8]{{0}} parameter(0)
  %x = bf16[64,16]{{1,0}} parameter(1)
  %w = bf16[16,32]{{1,0}} parameter(2)
  %y = bf16[64,32]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {cycles(1000)}
  %g = f32[10]{{0}} all-gather(%p), {GATHER}
  %h = f32[20]{{0}} all-reduce(%p), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  ROOT %i = f32[20]{{0}} all-reduce(%p), replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}""")
    found = report.cost(target(), module, walk(module), types.SimpleNamespace(used={}))
    step, tokens, executed, moved = 1200e-9, 16 * 256 / 8, 2 * 64 * 16 * 32, 2 * (64 * 16 + 16 * 32 + 64 * 32)
    model = tokens * flops.per_token(target().config.model, 256)["total"]
    assert found["step_seconds"] == pytest.approx(step)
    assert found["tokens_per_second_per_device"] == pytest.approx(tokens / step)
    assert found["tokens_per_second_per_chip"] == pytest.approx(2 * tokens / step)
    assert found["mfu"] == pytest.approx(model / (step * 1e15))
    assert found["exposed_communication_fraction"] == pytest.approx(200 / 1200)
    assert (found["executed_flops"], found["hbm_bytes"], found["ici_bytes"]) == (executed, moved, 200)
    assert found["roofline_seconds"] == pytest.approx(
        {"model_flops": model / 1e15, "executed_flops": executed / 1e15, "hbm": moved / 1e9}
        | {"ici": 160e-9, "die": 0, "dcn": 0}  # over `expert`: 80 with `fsdp`, and 80
    )
    assert [(e["collective"], e["axes"]) for e in found["collectives"]][-1] == ("all-gather", ["fsdp"])  # the shortest
    assert [e["name"] for e in found["most_exposed"]] == ["h", "i", "g"]
    assert [(e["operation"], e["seconds"]) for e in found["slowest"]] == [("dot", pytest.approx(1000e-9))]


@pytest.mark.parametrize(("capacity", "filled"), [(1.25, 0.8), (4.0, 0.5), (2.0, 0.5)])
def test_of_the_rows_that_there_is_room_for_tokens_fill_their_even_share(capacity, filled):
    """A device makes room for no more than all of them, of both devices along `expert`."""
    assert target(f"schedule.capacity={capacity}").filled == filled


# ----------------------------------------------------------------------------------------- picture


@pytest.mark.parametrize(
    ("op_name", "opcode", "axes", "found"),
    [
        ("jit(train_step)/shard_map/jvp(moe_layers)/while/body/attention/dot_general", "fusion", None, "attention"),
        ("jit(train_step)/shard_map/transpose(jvp(experts))/mul", "fusion", None, "experts"),
        ("jit(train_step)/shard_map/while/body/dispatch/all_gather", "all-gather", ("expert",), "dispatch"),
        ("jit(train_step)/shard_map/while/body/reduce_scatter", "reduce-scatter", ("expert",), "combine"),
        ("jit(train_step)/shard_map/while/body/all_gather", "all-gather", ("fsdp",), "weights"),
        ("jit(train_step)/shard_map/while/body/reduce_scatter", "reduce-scatter", ("fsdp",), "gradients"),
        ("jit(train_step)/shard_map/psum", "all-reduce", ("expert",), "gradients"),
        ("jit(train_step)/add", "fusion", None, "optimizer"),
        ("", "copy", None, "other"),
    ],
)
def test_stages_are_read_off_the_scopes(op_name, opcode, axes, found):
    assert timeline.stage(op_name, opcode, axes) == found


def scoped(name, stage, n):
    return f'  %{name} = f32[8]{{0}} add(%x, %x), metadata={{op_name="jit(f)/shard_map/{stage}/add"}}, {cycles(n)}'


def test_a_layer_is_drawn_of_the_innermost_loop_that_has_stages():
    """And not a part of an accumulated batch, though that holds stages of MTP modules beside its loop over layers."""
    layer = "\n".join(["  %x = (s32[]) parameter(0)", scoped("a", "attention", 40), scoped("e", "experts", 60)])
    condition, body = loop(layer + "\n  ROOT %r = (s32[]) tuple(%x)")
    part = "\n".join(
        [
            "  %x = (s32[]) parameter(0)",
            scoped("ma", "attention", 40),
            scoped("me", "experts", 60),
            "  %layers = (s32[]) while(%x), condition=%condition, body=%body",
            "  ROOT %r = (s32[]) tuple(%x)",
        ]
    )
    parts = f"%part (x: (s32[])) -> (s32[]) {{\n{part}\n}}"
    entry = WHILE.replace("body=%body", "body=%part")
    [(title, start, end)] = picture._panels(walk(program(entry, condition, body, parts)))
    assert (title, ns(end - start)) == ("one layer forward, of 5 like it", 100)


def test_runs_of_one_stage_are_one_bar_and_waiting_is_one_of_its_own():
    def event(start, seconds, stage, exposed=False):
        return timeline.Event(start, seconds, timeline.COMPUTE, None, "add", stage, exposed)  # pyright: ignore

    events = [event(0, 10, "a"), event(10, 10, "a"), event(12, 3, "a"), event(20, 10, "b"), event(30, 15, "b", True)]
    assert picture._merged(events, 5, 40) == [(0, 15, "a", False), (15, 10, "b", False), (25, 10, "b", True)]


@pytest.fixture(scope="module")
def timed():
    """A layer that waits."""
    body = "\n".join(
        [
            "  %x = (s32[]) parameter(0)",
            scoped("a", "attention", 40),
            scoped("e", "experts", 60),
            f"  %g = f32[10]{{0}} all-reduce(%a), {GATHER}",
            "  ROOT %r = (s32[]) tuple(%x)",
        ]
    )
    return walk(program(WHILE, *loop(body)))


def test_the_picture_is_a_png(timed, tmp_path):
    for name, shown in (("layers", timed), ("no layers", walk(overlapped(30)))):
        path = tmp_path / f"{name}.png"
        picture.write(shown, path, "title", "subtitle")
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_or_a_page_of_lines_and_letters(timed, tmp_path):
    path = tmp_path / "layer.html"
    picture.write(timed, path, "a < b", "subtitle")
    page = path.read_text()
    assert page.startswith("<!doctype html>") and "<title>a &lt; b</title>" in page
    svg = page[page.index("<svg") : page.index("</svg>") + len("</svg>")].replace("xlink:", "")
    letters = "".join(ElementTree.fromstring(svg).itertext())
    assert all(word in letters for word in ("a < b", "subtitle", "attention", "experts", "waiting", "milliseconds"))
