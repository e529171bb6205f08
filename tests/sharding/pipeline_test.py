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

from sharding import MeshError, pipeline
from sharding.schedule import Schedule

DIM, CHUNK_ROWS, BATCH = 3, 2, 8


class State(NamedTuple):
    """Parts of different shapes, like a mixer's state and the write that waits for it."""

    x: jax.Array
    y: jax.Array


def carried_chunk(weights, shared, index, state, noise):
    """Its gradient is NaN for a state of zeros, which a stage without work has."""
    scaled = noise[:, None] * weights["q"].sum()
    term = jnp.sum(state.x * weights["q"][0])
    x = jnp.tanh(state.x @ weights["w"] + shared * state.y[:, 0] + scaled)
    norm = jnp.sqrt(jnp.sum(state.x**2, axis=-1))
    return State(x, state.y / (1 + index) + x[:, None] / norm[:, None, None]), term


def banked_chunk(weights, shared, index, bank, noise):
    """Every row attends to those before it, like the sites of attention over depth."""
    first = 1 + index * CHUNK_ROWS
    term = jnp.sum(bank[0] * weights["q"][0])
    for i in range(CHUNK_ROWS):
        there = jnp.arange(len(bank))[:, None] < first + i
        logits = jnp.where(there, bank @ weights["q"][i], -jnp.inf)
        mixed = jnp.sum(jax.nn.softmax(logits, axis=0)[..., None] * bank, axis=0)
        row = jnp.tanh(mixed @ weights["w"] + shared) + noise[:, None]
        bank = jax.lax.dynamic_update_index_in_dim(bank, row, first + i, 0)
    return jax.lax.dynamic_slice_in_dim(bank, first, CHUNK_ROWS), term


class Case(NamedTuple):
    """What a pipeline is given, in the order of the layers, and the weights of a loss."""

    parameters: dict
    shared: jax.Array
    start: jax.Array | State
    noise: jax.Array
    weights: jax.Array | State


def make(kind, chunks, microbatches):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)
    parameters = {"w": normal(chunks, DIM, DIM), "q": normal(chunks, CHUNK_ROWS, DIM)}
    start = normal(microbatches, BATCH, DIM)
    weights = normal(microbatches, 1 + chunks * CHUNK_ROWS, BATCH, DIM)
    if kind == "carried":
        start = State(start, normal(microbatches, BATCH, 2, DIM))
        weights = jax.tree.map(lambda s: normal(*s.shape), start)
    return Case(parameters, normal(DIM), start, normal(microbatches, BATCH), weights)


def loss(results, weights):
    terms = jax.tree.map(lambda r, w: jnp.sum(jnp.sin(r) * w), results, weights)
    return sum(jax.tree.leaves(terms))


def one_after_the_other(kind, case):
    chunks = len(case.parameters["w"])

    def microbatch(parameters, shared, value, noise):
        if kind == "banked":
            value = jnp.zeros((1 + chunks * CHUNK_ROWS, *value.shape)).at[0].set(value)

        def step(value, of_chunk):
            index, parameters = of_chunk
            if kind == "carried":
                return carried_chunk(parameters, shared, index, value, noise)
            rows, term = banked_chunk(parameters, shared, index, value, noise)
            first = 1 + index * CHUNK_ROWS
            return jax.lax.dynamic_update_slice_in_dim(value, rows, first, 0), term

        return jax.lax.scan(step, value, (jnp.arange(chunks), parameters))

    def objective(parameters, shared, start):
        over = jax.vmap(microbatch, in_axes=(None, None, 0, 0))
        results, terms = over(parameters, shared, start, case.noise)
        return loss(results, case.weights) + 0.5 * jnp.sum(terms)

    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2)))(*case[:3])


def own_part(kind, schedule, options, parameters, shared, start, noise, weights):
    """What each device does: its share of the loss, and gradients summed over who shares them."""

    def objective(parameters, shared, start):
        arguments = (jax.tree.map(lambda w: w[:, 0], parameters), shared, start, noise)
        given = {"sums": jax.ShapeDtypeStruct((), shared.dtype), "schedule": schedule}
        if kind == "carried":
            results, total = pipeline.run_carried(carried_chunk, *arguments, **given)
        else:
            given |= {"chunk_rows": CHUNK_ROWS, **options}
            results, total = pipeline.run_banked(banked_chunk, *arguments, **given)
        return pipeline.on_last(lambda results: loss(results, weights), results) + 0.5 * total

    value, gradients = jax.value_and_grad(objective, argnums=(0, 1, 2))(parameters, shared, start)
    value, of_shared = jax.lax.psum((value, gradients[1]), ("stage", "data"))
    of_parameters, of_start = (
        jax.lax.psum(gradients[0], "data"),
        jax.lax.psum(gradients[2], "stage"),
    )
    return value, (of_parameters, of_shared, of_start)


def specs(kind):
    """Of a case, with parameters as [V, P, ...]."""
    stage, rows = PartitionSpec(None, "stage"), PartitionSpec(None, "data")
    bank = PartitionSpec(None, None, "data")
    return Case(stage, PartitionSpec(), rows, rows, bank if kind == "banked" else rows)


def pipelined(kind, schedule, devices, **options):
    """A function of a case with parameters as [V, P, ...]."""
    mesh = Mesh(np.asarray(devices).reshape(schedule.stages, -1), ("stage", "data"))
    stage, whole, rows = specs(kind)[:3]
    mapped = jax.shard_map(
        functools.partial(own_part, kind, schedule, options),
        mesh=mesh,
        in_specs=tuple(specs(kind)),
        out_specs=(whole, (stage, whole, rows)),
        check_vma=False,
    )
    return mesh, jax.jit(mapped)


def placed(case, schedule):
    """With parameters as [V, P, ...]."""
    split = lambda w: w.reshape(schedule.virtual, schedule.stages, *w.shape[1:])
    return case._replace(parameters=jax.tree.map(split, case.parameters))


def check(kind, schedule, **options):
    """Compares a pipeline with the chunks one after the other; gives its program."""
    with jax.enable_x64(True):
        case = make(kind, schedule.chunks, schedule.microbatches)
        value, gradients = one_after_the_other(kind, case)
        given = placed(case, schedule)
        program = pipelined(kind, schedule, jax.devices(), **options)[1].lower(*given).compile()
        got = program(*given)
        expected = placed(case._replace(parameters=gradients[0]), schedule).parameters
        # Sums in another order, of terms of about 1.
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, got, (value, (expected, *gradients[1:])))
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients))
    return program


def name_of(kind, sizes):
    return "{}-{} stages-{} virtual-{} microbatches".format(kind, *sizes)


# P, V, M; the cases of COUNTS are some of banks.
SOME = [("carried", (8, 2, 8))]
ALL = [
    ("banked", (1, 2, 1)),
    *(
        (kind, (stages, virtual, rounds * stages))
        for kind, stages, virtual, rounds in itertools.product(
            ("carried", "banked"), (2, 4, 8), (1, 2, 4), (1, 2)
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


def bytes_sent(text, times):
    """In the collective-permutes of a program, by all devices together.

    Args:
      text: HLO, whose permutes are in the branches of conditionals over what is sent after a tick.
      times: how often each branch is taken.
    """
    computations = dict(re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    conditionals = re.findall(r" conditional\(.*branch_computations=\{([^}]*)\}", text)
    total, found = 0, 0
    for branches in conditionals:
        names = [name.strip(" %") for name in branches.split(",")]
        sizes = [[permuted(line) for line in computations[n].splitlines()] for n in names]
        sizes = [[size for size in branch if size] for branch in sizes]
        if any(sizes):
            total += sum(n * sum(branch) for n, branch in zip(times, sizes, strict=True))
            found += sum(map(len, sizes))
    assert found == len(re.findall(r" collective-permute(?:-start)?\(", text))  # all of them
    return total


def permuted(line):
    """Bytes that all devices together send in an instruction; 0 if it is another one."""
    instruction = (
        r" = \(?f(32|64)\[([\d,]*)\].* collective-permute(?:-start)?\("
        r".*source_target_pairs=\{(\{.*?\})\}"
    )
    match = re.search(instruction, line)
    if not match:
        return 0
    bits, shape, pairs = match.groups()
    return int(bits) // 8 * math.prod(map(int, shape.split(","))) * len(pairs.split("},{"))


# P (P - 1) / 2 + (V - 1) P^2 is the paper's count; with the rows that a stage itself made kept too,
# it is (V - 1) P less.
COUNTS = [
    ((4, 2, 4), "none", 28),
    ((4, 2, 4), "received", 22),
    ((4, 2, 8), "all", 18),
    ((8, 4, 8), "received", 220),
    ((8, 4, 8), "all", 196),
]


@pytest.mark.parametrize("sizes, caching, units", COUNTS)
def test_rows_that_stages_lack_are_the_papers_count(sizes, caching, units):
    assert Schedule(*sizes).spans(caching).sum() == units


@pytest.mark.parametrize(
    "sizes, caching, units",
    [
        pytest.param(
            *case,
            marks=() if case == COUNTS[2] else pytest.mark.slow,
            id=name_of(case[1], case[0]),
        )
        for case in COUNTS
    ],
)
def test_stages_are_sent_just_the_rows_that_they_lack(sizes, caching, units):
    schedule = Schedule(*sizes)
    program = check("banked", schedule, caching=caching)
    unit = CHUNK_ROWS * BATCH * DIM * 8  # bytes; devices along "data" send their parts of it
    sent = bytes_sent(program.as_text(), times_sent(schedule, caching))
    assert sent == 2 * schedule.microbatches * units * unit  # forward and backward


def times_sent(schedule, caching):
    return np.bincount(schedule.messages(schedule.spans(caching))[1])


@pytest.mark.compile
def test_compiles_for_a_tpu_with_the_same_messages():
    schedule = Schedule(8, 2, 8)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh, function = pipelined("banked", schedule, topology.devices)
    shape = lambda s, x: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=NamedSharding(mesh, s))
    shapes = lambda spec, tree: jax.tree.map(functools.partial(shape, spec), tree)
    case = placed(make("banked", schedule.chunks, schedule.microbatches), schedule)
    program = function.lower(*map(shapes, specs("banked"), case)).compile()
    unit = CHUNK_ROWS * BATCH * DIM * 4
    sent = bytes_sent(program.as_text(), times_sent(schedule, "all"))
    assert sent == 2 * schedule.microbatches * int(schedule.spans("all").sum()) * unit


@pytest.mark.parametrize("sizes", [(4, 2, 8), (2, 3, 2), (8, 1, 16), (1, 3, 2)])
def test_a_schedule_does_every_piece_of_work_once_and_right_after_the_one_before(sizes):
    schedule = Schedule(*sizes)
    done = {}
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            at = schedule.place(np.int32(tick), np.int32(stage))
            if at.active:
                assert (
                    at.chunk % schedule.stages == stage
                    and at.chunk // schedule.stages == at.virtual
                )
                assert (at.chunk, at.microbatch) not in done
                assert at.chunk == 0 or done[at.chunk - 1, at.microbatch] == tick - 1
                done[at.chunk.item(), at.microbatch.item()] = tick
    assert len(done) == schedule.chunks * schedule.microbatches


def test_what_does_not_divide_is_one_line():
    with pytest.raises(MeshError, match="microbatches=6 .* 4 stages .* legal: 4 or 8"):
        Schedule(4, 2, 6)
