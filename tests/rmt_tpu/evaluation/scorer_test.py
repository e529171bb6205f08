"""Log-probabilities of continuations: of each alone, whatever is beside it, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.data import Batch
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.scorer import Request, Scorer, fingerprint
from rmt_tpu.evaluation.scores import NONE, token_scores
from rmt_tpu.generation.placement import parameter_shardings
from rmt_tpu.training.step import batch_loss
from tests import models
from tests.tiers import later

# (tokens before, tokens scored) of each request; the last ones are longer than is read.
SIZES = [(1, 1), (1, 40), (17, 3), (70, 1), (5, 9), (30, 11), (3, 95), (90, 40), (200, 7)]
LENGTH = 96


def requests(vocab: int = 257) -> list[Request]:
    rng = np.random.default_rng(0)
    draw = lambda size: rng.integers(0, vocab, size).astype(np.int32)
    return [Request(draw(before), draw(scored)) for before, scored in SIZES]


def answers(scorer, given):
    found = {n: answer for some in scorer.answers(given) for n, answer in some.items()}
    assert sorted(found) == list(range(len(given)))
    return [found[n] for n in range(len(given))]


@pytest.fixture(scope="module")
def decoder():
    return models.byte_decoder(positions=cfg.Learned(LENGTH))


@pytest.fixture(scope="module")
def alone(decoder):
    """Of each request by all logits of its row, in NumPy's float64."""
    forward, found = jax.jit(lambda tokens: decoder(tokens)), []
    for context, continuation in requests():
        read = np.concatenate([context, continuation])[-(LENGTH + 1) :]
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(read) - 1] = read[:-1]
        logits = np.asarray(forward(row), np.float64)[0]
        logs = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
        places = np.arange(len(read) - 1 - len(continuation), len(read) - 1)
        greedy = np.argmax(logits[places], -1) == continuation
        found.append((logs[places, continuation], greedy))
    return found


@pytest.mark.slow
def test_many_at_a_time_are_as_each_alone(decoder, alone):
    given = requests()
    # In a few rows of each length, and in one row at a time; in another order.
    for scorer in (Scorer.of(decoder, LENGTH, 300), Scorer.of(decoder, LENGTH, 1)):
        order = np.random.default_rng(1).permutation(len(given))
        for n, (logs, greedy) in zip(
            order, answers(scorer, [given[n] for n in order]), strict=True
        ):
            np.testing.assert_allclose(logs, alone[n][0], atol=1e-5)
            assert greedy.tolist() == alone[n][1].tolist()
        assert scorer.cut(given) == 3


def test_a_token_that_the_model_lacks_is_told(decoder):
    """Its score would be no number."""
    for wrong in (-1, 257):
        for one in (Request(np.array([wrong]), np.array([4])), Request(*np.array([[4], [wrong]]))):
            with pytest.raises(UsageError, match=f"token {wrong}, for which .* legal: 0 to 256"):
                answers(Scorer.of(decoder, LENGTH), [one])


def test_tokens_that_the_model_would_say_are_greedy(decoder):
    scorer = Scorer.of(decoder, LENGTH)
    context, said = np.array([256, 4, 9], np.int32), []
    forward = jax.jit(lambda tokens: jnp.argmax(decoder(tokens)[0], -1))
    for _ in range(4):
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : 3 + len(said)] = [*context, *said]
        said.append(int(forward(row)[2 + len(said)]))
    wrong = [*said[:2], (said[2] + 1) % 257, said[3]]
    given = [Request(context, np.array(tokens, np.int32)) for tokens in (said, wrong)]
    right, other = answers(scorer, given)
    assert right.greedy.all() and other.greedy.tolist()[:3] == [True, True, False]
    assert right.log_probabilities[:2].tolist() == other.log_probabilities[:2].tolist()


def test_only_what_is_asked_for_is_unembedded(decoder, monkeypatch):
    """Of few tokens at a time: 64 of 1024 logits, and as many as there are."""
    monkeypatch.setattr("rmt_tpu.evaluation.scores.LOGITS", 64 * 257)
    tokens = models.tokens(batch=12, seq=LENGTH, seed=3) % 257
    targets = np.full(tokens.shape, NONE)
    targets[::3, 5::9] = np.asarray(tokens)[::3, 5::9]
    scored = jax.jit(lambda *given: token_scores(decoder, *given))
    program = str(scored.trace(tokens, jnp.asarray(targets)).jaxpr)
    assert "f32[64,257]" in program and f"f32[{tokens.size},257]" not in program
    logs, greedy = scored(tokens, jnp.asarray(targets))
    all_logs = jax.nn.log_softmax(jax.jit(lambda t: decoder(t))(tokens), axis=-1)
    wanted = np.take_along_axis(np.asarray(all_logs), np.maximum(targets, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logs, np.where(targets >= 0, wanted, 0), atol=1e-5)
    assert not np.any(np.asarray(greedy)[targets < 0])


def test_a_window_s_sum_is_the_training_loss(decoder):
    (request,) = [r for r in requests() if (len(r.context), len(r.continuation)) == (1, 40)]
    scorer = Scorer.of(decoder, LENGTH)
    tokens = np.concatenate(request)
    ones = np.ones((1, 40))
    batch = Batch(tokens[None, :-1], tokens[None, 1:], ones.astype(np.int32), np.float32(ones))
    batch = jax.tree.map(jnp.asarray, batch)
    graphdef, params = nnx.split(decoder, nnx.Param)
    loss = jax.jit(lambda params: batch_loss(graphdef, params, batch).cross_entropy)(params)
    (answer,) = answers(scorer, [request])
    np.testing.assert_allclose(-answer.log_probabilities.sum(), loss, rtol=1e-6)


def test_what_is_too_long(decoder):
    with pytest.raises(UsageError, match="--max_length=97 is more than the model's 96 learned pos"):
        Scorer.of(decoder, 97)
    scorer = Scorer.of(decoder, 39)
    words = r"--max_length=39 is less than the 95 tokens of the .* x; legal: --max_length=95 or"
    with pytest.raises(UsageError, match=words):
        scorer.check("x", requests())
    words = r"^runs/a reads 39 tokens, which is less than the 95 .*legal: a task that fits in .* 64"
    with pytest.raises(UsageError, match=words):
        limited = scorer._replace(positions=64)
        limited.check("x", requests(), limit="runs/a reads 39 tokens, which")
    scorer.check("x", requests()[:1])


EXPERTS = cfg.Experts(num_experts=4, top_k=2, hidden_dim=6, capacity=1.0)
CASES = [
    ("matrix", "sum", "attention", "data=2,key=2,tensor=2"),
    *later(
        ("vector", "block_attention", "attention", "fsdp=4,sequence=2"),
        ("matrix", "full_attention", "kda", "fsdp=2,tensor=2"),
        ("vector", "sum", "experts", "expert=4"),
        ("matrix", "sum", "experts", "expert=2,key=2"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("store, mixer, core, spec", CASES)
def test_on_a_mesh_as_on_one_device(store, mixer, core, spec):
    stores = {"vector": cfg.VectorStore(dim=12), "matrix": cfg.MatrixStore(6, "float32", 4, 6)}
    attention = cfg.Attention(4, 6, cfg.Rope())
    cores = {
        "attention": (attention, cfg.FeedForward(16)),
        "kda": (cfg.Kda(4, 6), cfg.FeedForward(16)),
        "experts": (attention, EXPERTS),
    }
    mixers = {
        "sum": cfg.Sum(),
        "block_attention": cfg.BlockAttention(num_blocks=2),
        "full_attention": cfg.FullAttention(),
    }
    model = cfg.ModelConfig(
        (cfg.Stack(cores[core], repeat=2),),
        store=stores[store],
        mixer=mixers[mixer],
        vocab_size=60,
    )
    params = jax.tree.map(np.float32, models.random_parameters(model))
    mesh = sharding.make_mesh(spec, jax.devices()[: np.prod([*sharding.parse_mesh(spec).values()])])
    placed = jax.device_put(params, parameter_shardings(models.abstract(model), mesh))
    given, found, marks = requests(60), [], set()
    for where in (params, placed):
        decoder = nnx.merge(models.graph(model), jax.tree.map(jnp.asarray, where))
        found.append(answers(Scorer.of(decoder, LENGTH, 200), given))
        marks.add(fingerprint(decoder))
    for one, other in zip(*found, strict=True):
        logs = [answer.log_probabilities for answer in (one, other)]
        np.testing.assert_allclose(*logs, rtol=1e-5, atol=1e-5)
        assert one.greedy.tolist() == other.greedy.tolist()
    assert len(marks) == 1


def test_a_fingerprint_is_of_every_bit_in_its_place(decoder):
    graphdef, params = nnx.split(decoder, nnx.Param)
    marks = [fingerprint(decoder)]
    for change in (lambda x: x.at[0, 1].add(1e-6), lambda x: x.at[0].set(x[1]).at[1].set(x[0])):
        changed = jax.tree.map(lambda x: x, params)
        kernel = changed["unembedding"]["kernel"]
        kernel.set_value(change(kernel[...]))
        marks.append(fingerprint(nnx.merge(graphdef, changed)))
    assert len(set(marks)) == 3 and marks[0] == fingerprint(decoder)
