"""Pipelines: the values and gradients of the same chunks one after the other, and what is sent."""

import functools
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding import MeshError, pipeline, schedule
from sharding.banked import BankPipeline
from sharding.carried import StatePipeline
from sharding.schedule import Schedule

DIM, CHUNK_ROWS, BATCH, TOKENS = 3, 2, 8, 5


class State(NamedTuple):
    """Parts of different shapes, like a mixer's state and the write that waits for it."""

    x: jax.Array
    y: jax.Array


class Context(NamedTuple):
    """Of each microbatch; `weights` are those of a loss."""

    tokens: jax.Array
    noise: jax.Array
    weights: jax.Array | State


def carried_first(tables, context):
    return State(tables["x"][context.tokens], tables["y"][context.tokens])


def carried_chunk(weights, shared, index, state, context):
    """Its gradient is NaN for a state of zeros, which a stage without work has."""
    scaled = context.noise[:, None] * weights["q"].sum()
    term = jnp.sum(state.x * weights["q"][0])
    x = jnp.tanh(state.x @ weights["w"] + shared * state.y[:, 0] + scaled)
    norm = jnp.sqrt(jnp.sum(state.x**2, axis=-1))
    return State(x, state.y / (1 + index) + x[:, None] / norm[:, None, None]), term


def banked_first(tables, context):
    return tables["x"][context.tokens] + jnp.sum(tables["y"][context.tokens], axis=1)


def banked_chunk(weights, shared, index, bank, context):
    """Every row attends to those before it, like the sites of attention over depth."""
    first = 1 + index * CHUNK_ROWS
    term = jnp.sum(bank[0] * weights["q"][0])
    for i in range(CHUNK_ROWS):
        there = jnp.arange(len(bank))[:, None] < first + i
        logits = jnp.where(there, bank @ weights["q"][i], -jnp.inf)
        mixed = jnp.sum(jax.nn.softmax(logits, axis=0)[..., None] * bank, axis=0)
        row = jnp.tanh(mixed @ weights["w"] + shared) + context.noise[:, None]
        bank = jax.lax.dynamic_update_index_in_dim(bank, row, first + i, 0)
    return jax.lax.dynamic_slice_in_dim(bank, first, CHUNK_ROWS), term


def banked_backward(weights, shared, index, bank, context, d_bank, d_terms):
    forward = lambda weights, shared, bank: banked_chunk(weights, shared, index, bank, context)
    d_rows = jax.lax.dynamic_slice_in_dim(d_bank, 1 + index * CHUNK_ROWS, CHUNK_ROWS)
    d_weights, d_shared, d_earlier = jax.vjp(forward, weights, shared, bank)[1]((d_rows, d_terms))
    return d_weights, d_shared, d_bank + d_earlier


def read(head_and_result):
    head, result = head_and_result
    return jax.tree.map(lambda r: jnp.sin(r * head), result)


def loss(z, context):
    """Of a microbatch, and a number that the objective does not have."""
    terms = jax.tree.leaves(jax.tree.map(lambda r, w: r * w, z, context.weights))
    return {"loss": sum(map(jnp.sum, terms)), "size": sum(jnp.sum(abs(x)) for x in terms)}


def last(head, result, context):
    return loss(read((head, result)), context)


def last_of_stages(head, result, context):
    return loss(pipeline.on_last(read, (head, result)), context)


# Of the terms, in the objective.
WEIGHTS = ({"loss": 1.0, "size": 0.0}, 0.5)
KINDS = {"carried": (carried_first, carried_chunk), "banked": (banked_first, banked_chunk)}


class Case(NamedTuple):
    """What a pipeline is given, with parameters in the order of the layers."""

    parameters: pipeline.Parameters
    context: Context


def make(kind, chunks, microbatches):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)
    parameters = pipeline.Parameters(
        first={"x": normal(TOKENS, DIM), "y": normal(TOKENS, 2, DIM)},
        # Of this size deep chains of chunks neither forget their start nor magnify rounding.
        chunks={"w": normal(chunks, DIM, DIM) * DIM**-0.5, "q": normal(chunks, CHUNK_ROWS, DIM)},
        shared=normal(DIM),
        last=normal(DIM),
    )
    of_rows = lambda *shape: normal(microbatches, *shape)
    weights = of_rows(1 + chunks * CHUNK_ROWS, BATCH, DIM)
    if kind == "carried":
        weights = State(of_rows(BATCH, DIM), of_rows(BATCH, 2, DIM))
    tokens = rng.integers(0, TOKENS, (microbatches, BATCH), dtype=np.int32)
    return Case(parameters, Context(tokens, of_rows(BATCH), weights))


def one_after_the_other(kind, case):
    first, chunk = KINDS[kind]
    chunks = len(case.parameters.chunks["w"])

    def microbatch(parameters, context):
        value = first(parameters.first, context)
        if kind == "banked":
            value = jnp.zeros((1 + chunks * CHUNK_ROWS, *value.shape)).at[0].set(value)

        def step(value, of_chunk):
            index, of_chunk = of_chunk
            after, term = chunk(of_chunk, parameters.shared, index, value, context)
            if kind == "banked":
                row = 1 + index * CHUNK_ROWS
                after = jax.lax.dynamic_update_slice_in_dim(value, after, row, 0)
            return after, term

        value, terms = jax.lax.scan(step, value, (jnp.arange(chunks), parameters.chunks))
        return last(parameters.last, value, context), jnp.sum(terms)

    def objective(parameters):
        over = jax.vmap(microbatch, in_axes=(None, 0))
        totals = jax.tree.map(jnp.sum, over(parameters, case.context))
        return totals[0]["loss"] + 0.5 * totals[1], totals

    return jax.jit(jax.value_and_grad(objective, has_aux=True))(case.parameters)


def build(kind, schedule):
    sums = jax.ShapeDtypeStruct((), jnp.result_type(float))
    if kind == "carried":
        return StatePipeline(*KINDS[kind], last_of_stages, schedule, sums=sums)
    options = {"chunk_rows": CHUNK_ROWS, "chunk_backward": banked_backward, "sums": sums}
    return BankPipeline(*KINDS[kind], last_of_stages, schedule, **options)


def own_part(kind, schedule, within, gradient, parameters, context):
    """What each device does: its share of the sums, and gradients added up over who shares them."""
    parameters = parameters._replace(chunks=jax.tree.map(lambda w: w[:, 0], parameters.chunks))
    make = lambda: build(kind, schedule)
    if not gradient:
        outputs, sums = make().results(parameters, context)
        return jax.lax.psum((outputs, sums), ("stage", "data"))
    run = within(lambda parameters: make().objective(parameters, context, WEIGHTS))
    value, gradients = jax.value_and_grad(run, has_aux=True)(parameters)
    chunks = jax.lax.psum(gradients.chunks, "data")
    value, rest = jax.lax.psum((value, gradients._replace(chunks=())), ("stage", "data"))
    return value, rest._replace(chunks=jax.tree.map(lambda w: w[:, None], chunks))


def specs(kind):
    """Of a case, with parameters as [V, P, ...]."""
    whole, rows = PartitionSpec(), PartitionSpec(None, "data")
    bank = PartitionSpec(None, None, "data")
    parameters = pipeline.Parameters(whole, PartitionSpec(None, "stage"), whole, whole)
    return Case(parameters, Context(rows, rows, bank if kind == "banked" else rows))


def pipelined(kind, schedule, devices, *, gradient=True, within=lambda run: run):
    """A function of a case with parameters as [V, P, ...]."""
    mesh = Mesh(np.asarray(devices).reshape(schedule.stages, -1), ("stage", "data"))
    whole = PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(own_part, kind, schedule, within, gradient),
        mesh=mesh,
        in_specs=tuple(specs(kind)),
        out_specs=(whole, specs(kind).parameters if gradient else whole),
        check_vma=False,
    )
    return mesh, jax.jit(mapped)


def placed(parameters, schedule):
    """As [V, P, ...]."""
    split = lambda w: w.reshape(schedule.virtual, schedule.stages, *w.shape[1:])
    return parameters._replace(chunks=jax.tree.map(split, parameters.chunks))


def check(kind, schedule, **options):
    """Compares a pipeline with the chunks one after the other; gives its program."""
    with jax.enable_x64(True):
        case = make(kind, schedule.chunks, schedule.microbatches)
        value, gradients = one_after_the_other(kind, case)
        given = placed(case.parameters, schedule), case.context
        program = pipelined(kind, schedule, jax.devices(), **options)[1].lower(*given).compile()
        got = program(*given)
        # Sums in another order, of terms of about 1.
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, got, (value, placed(gradients, schedule)))
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients))
    return program


def name_of(kind, sizes):
    return "{}-{} stages-{} virtual-{} microbatches".format(kind, *sizes)


# P, V, M: microbatches take the places of others, or of none. Those of COUNTS are some of banks.
SOME = [("carried", (4, 2, 12))]
ALL = [
    ("banked", (1, 2, 1)),
    *(
        (kind, (stages, virtual, rounds * stages))
        for kind, stages, virtual, rounds in itertools.product(
            ("carried", "banked"), (2, 4, 8), (1, 2, 4), (1, 3)
        )
    ),
]


@pytest.mark.parametrize(
    "kind, sizes",
    [
        pytest.param(*case, marks=() if case in SOME else pytest.mark.slow, id=name_of(*case))
        for case in ALL
    ],
)
def test_loss_and_gradients_are_those_of_the_chunks_one_after_the_other(kind, sizes):
    check(kind, Schedule(*sizes))


@pytest.mark.slow
def test_within_a_checkpoint_of_ones_own():
    check("banked", Schedule(2, 1, 2), within=jax.checkpoint)


def bytes_sent(text, schedule):
    """In the collective-permutes of a program, by all devices together, there and back.

    They are in the branches of two conditionals, over what is sent after a tick.
    """
    computations = dict(re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    conditionals = re.findall(r" conditional\(.*branch_computations=\{([^}]*)\}", text)
    totals, found = {}, 0
    for branches in conditionals:
        names = [name.strip(" %") for name in branches.split(",")]
        sent = [[permuted(line) for line in computations[n].splitlines()] for n in names]
        sent = [[pairs for pairs in branch if pairs] for branch in sent]
        if any(sent):
            stage_of = lambda device: device * schedule.stages // len(jax.devices())
            pairs = [pair for branch in sent for _, pairs in branch for pair in pairs]
            (step,) = {(stage_of(b) - stage_of(a)) % schedule.stages for a, b in pairs}
            _, kind_at = schedule.messages(schedule.spans, back=step > 1)
            sizes = [sum(size * len(pairs) for size, pairs in branch) for branch in sent]
            totals[step] = np.dot(np.bincount(kind_at), sizes)
            found += sum(map(len, sent))
    assert found == len(re.findall(r" collective-permute(?:-start)?\(", text))  # all of them
    return totals[1], totals[schedule.stages - 1]


def permuted(line):
    """Bytes that a device sends in an instruction, and pairs of devices; None if it is another."""
    instruction = (
        r" = \(?f(32|64)\[([\d,]*)\].* collective-permute(?:-start)?\("
        r".*source_target_pairs=\{(\{.*?\})\}"
    )
    match = re.search(instruction, line)
    if not match:
        return None
    bits, shape, pairs = match.groups()
    pairs = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs)]
    return int(bits) // 8 * math.prod(map(int, shape.split(","))), pairs


# P, V, M, and the rows that a microbatch sends, in chunks.
COUNTS = [((4, 2, 12), 18), ((8, 4, 8), 196)]


@pytest.mark.parametrize("sizes, units", COUNTS)
def test_rows_that_stages_lack_are_the_papers_count_without_their_own(sizes, units):
    schedule = Schedule(*sizes)
    P, V = schedule.stages, schedule.virtual
    # In the paper a stage keeps what it has received, but not the rows that it has computed.
    papers = P * (P - 1) // 2 + (V - 1) * P**2
    assert schedule.spans.sum() == units == papers - (V - 1) * P


@pytest.mark.parametrize(
    "sizes, units",
    [pytest.param(*case, marks=() if case == COUNTS[0] else pytest.mark.slow) for case in COUNTS],
    ids=lambda x: name_of("banked", x) if isinstance(x, tuple) else "",
)
def test_stages_are_sent_just_the_rows_that_they_lack(sizes, units):
    schedule = Schedule(*sizes)
    program = check("banked", schedule)
    unit = CHUNK_ROWS * BATCH * DIM * 8  # bytes; devices along "data" send their parts of it
    sent = schedule.microbatches * units * unit
    assert bytes_sent(program.as_text(), schedule) == (sent, sent)


@pytest.mark.compile
def test_compiles_for_a_tpu_with_the_same_messages():
    schedule = Schedule(8, 2, 8)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh, function = pipelined("banked", schedule, topology.devices)

    def shapes(spec, tree):
        sharding = NamedSharding(mesh, spec)
        dtype = lambda x: np.float32 if x.dtype == np.float64 else x.dtype
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x), sharding=sharding)
        return jax.tree.map(shape, tree)

    case = make("banked", schedule.chunks, schedule.microbatches)
    given = case._replace(parameters=placed(case.parameters, schedule))
    is_spec = lambda x: isinstance(x, PartitionSpec)
    given = jax.tree.map(shapes, specs("banked"), given, is_leaf=is_spec)
    program = function.lower(*given).compile()
    unit = CHUNK_ROWS * BATCH * DIM * 4
    sent = schedule.microbatches * int(schedule.spans.sum()) * unit
    assert bytes_sent(program.as_text(), schedule) == (sent, sent)


@pytest.mark.parametrize("kind", ["carried", pytest.param("banked", marks=pytest.mark.slow)])
def test_results_are_those_that_the_objective_is_made_of(kind):
    """Of each microbatch, by the forward pass alone, whose places are others."""
    schedule = Schedule(2, 2, 6)
    with jax.enable_x64(True):
        case = make(kind, schedule.chunks, schedule.microbatches)
        of_last, sums = pipelined(kind, schedule, jax.devices(), gradient=False)[1](
            placed(case.parameters, schedule), case.context
        )
        (_, expected), _ = one_after_the_other(kind, case)
        assert {len(x) for x in of_last.values()} == {schedule.microbatches}
        got = jax.tree.map(jnp.sum, of_last), sums
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, virtual",
    [
        ("banked", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("banked", 1), ("carried", 2)]),
    ],
)
def test_memory_does_not_grow_with_the_number_of_microbatches(kind, virtual):
    """Of microbatches of the same size; a number is kept of each tick, what is sent after it."""

    def temporary(schedule):
        case = make(kind, schedule.chunks, schedule.microbatches)
        function = pipelined(kind, schedule, jax.devices()[:2])[1]
        program = function.lower(placed(case.parameters, schedule), case.context).compile()
        return program.memory_analysis().temp_size_in_bytes

    few, many = Schedule(2, virtual, 4), Schedule(2, virtual, 16)
    assert temporary(many) - temporary(few) <= 2 * 4 * (many.ticks - few.ticks)


# P, V, M.
SIZES = [(4, 2, 12), (2, 3, 10), (8, 1, 24), (1, 3, 4), (2, 2, 4)]


def ticks_of(schedule, place):
    """[C, M]: when each chunk of each microbatch is worked on, by whoever has it."""
    at = place(np.arange(schedule.ticks)[:, None], np.arange(schedule.stages))
    assert np.all(at.chunk % schedule.stages == np.arange(schedule.stages))
    assert np.all(at.chunk // schedule.stages == at.virtual)
    ticks, _ = np.nonzero(at.active)
    pieces = np.stack([at.chunk, at.microbatch])[:, at.active]
    found = np.full((schedule.chunks, schedule.microbatches), -1)
    found[tuple(pieces)] = ticks
    assert np.all(found >= 0) and len(ticks) == found.size  # each of them once
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_a_schedule_does_every_piece_of_work_once_and_right_after_the_one_before(sizes):
    schedule = Schedule(*sizes)
    forward, backward = (ticks_of(schedule, f) for f in (schedule.forward, schedule.backward))
    assert np.all(np.diff(forward, axis=0) == 1) and np.all(np.diff(backward, axis=0) == -1)
    assert np.all(forward[-1] == backward[-1])
    assert forward.max() + 1 == schedule.forward_ticks and backward.max() + 1 == schedule.ticks
    # No tick is without work, there or back, between the first and the last.
    assert len(np.unique(forward)) == len(np.unique(backward)) == schedule.forward_ticks


@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_takes_the_place_of_what_is_needed_and_no_place_is_too_many(sizes):
    schedule = Schedule(*sizes)
    forward, backward = (ticks_of(schedule, f) for f in (schedule.forward, schedule.backward))
    last = schedule.chunks - schedule.stages

    def check(room, begins, ends):
        """What one stage keeps of each microbatch, from a tick to a tick."""
        assert np.all(begins[room:] > ends[: len(ends) - room])
        ticks = np.arange(schedule.ticks)[:, None]
        return np.max(np.sum((begins <= ticks) & (ticks <= ends), axis=1))

    for virtual in range(schedule.virtual):
        room, first = schedule.max_in_flight(virtual), virtual * schedule.stages
        chunks = range(first, first + schedule.stages)
        assert max(check(room, forward[chunk], backward[chunk]) for chunk in chunks) == room
        assert room <= 2 * schedule.stages
    room = schedule.max_in_flight_one_way
    for stage in range(schedule.stages):
        there = check(room, forward[stage], forward[last + stage])
        assert there == check(room, backward[last + stage], backward[stage]) == room


def test_the_table_of_the_docstring_is_the_schedule():
    schedule_ = Schedule(2, 2, 4)
    for stage in range(2):
        for name, place in (("forward", schedule_.forward), ("backward", schedule_.backward)):
            at = place(np.arange(schedule_.ticks), np.int32(stage))
            pieces = zip(at.active, at.chunk, at.microbatch, strict=True)
            row = "".join(f" {chunk}.{m}" if there else "    " for there, chunk, m in pieces)
            head = f"stage {stage} forward " if name == "forward" else "        backward"
            assert f"    {head}{row}".rstrip() in schedule.__doc__.splitlines()


def test_what_does_not_divide_is_one_line():
    with pytest.raises(MeshError, match="microbatches=6 .* 4 stages.* legal: 4 or 8"):
        Schedule(4, 2, 6)
