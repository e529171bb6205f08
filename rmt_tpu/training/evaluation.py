"""What a trained model is asked for during and after a run: its loss on held-out text, a sample."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sharding
from rmt_tpu import data
from rmt_tpu.config import RunConfig
from rmt_tpu.decoder import Decoder
from rmt_tpu.distributed import processes
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.documents import Total, ask, find_tasks, metrics, read_task
from rmt_tpu.evaluation.scorer import Scorer
from rmt_tpu.evaluation.scores import TokenScores
from rmt_tpu.generation import Sampling, generate
from rmt_tpu.training.global_arrays import on_one_device, put_batch
from rmt_tpu.training.run import Run


class HeldOut(NamedTuple):
    """Means per token: the loss in nats, and the scalars of the model's cores."""

    loss: float
    aux: dict[str, float]


class HeldOutLoss:
    """The mean loss over the first windows of held-out text, in nats per token.

    Which windows does not follow the batch size: losses of runs with other ones are of one text.

    Args:
      run: whose loss it is.
      windows: of the held-out text.
      number: how many of them, or fewer if there are fewer.
    """

    def __init__(self, run: Run, windows: data.Windows, number: int):
        self._windows = windows
        self._number = min(number, windows.num_windows)
        self._batch_sharding = run.batch_sharding

        def sums(params, batch):
            loss = run.loss(params, batch)
            return loss.cross_entropy, loss.aux, jnp.sum(batch.weights)

        # Every process has them, and so the same loss on all.
        self._sums = jax.jit(sums, out_shardings=sharding.replicated(run.mesh))

    def __call__(self, params: Any) -> HeldOut:
        shape, sums = (self._windows.batch_size, self._windows.seq_len), []
        for number in range(-(-self._number // self._windows.batch_size)):
            read = partial(self._windows.in_order, number, end=self._number)
            batch = put_batch(read, shape, self._batch_sharding)
            sums.append(jax.tree.map(float, self._sums(params, batch)))
        *totals, weight = jax.tree.map(lambda *terms: sum(terms), *sums)
        return HeldOut(*jax.tree.map(lambda total: total / weight, totals))


def asked_windows(config: RunConfig) -> int:
    """How many windows of held-out text a run asks for."""
    if config.train.eval_batches:
        return config.train.eval_batches * config.train.batch_size
    return max(1, config.train.eval_tokens // config.data.seq_len)


class TaskMetrics:
    """What a run's tasks give, and their standard errors, by names like `eval/arc_easy/acc`.

    Args:
      run: whose parameters are asked.
      config: of it; texts are as long at most as its windows, and read as many tokens at a time.
      tokenizer: of it.

    Raises:
      UsageError: there is no such task, its data cannot be read, or it does not fit a window.
    """

    def __init__(self, run: Run, config: RunConfig, tokenizer: data.Tokenizer):
        train, seq_len = config.train, config.data.seq_len
        tasks = find_tasks(filter(None, train.eval_tasks.split(",")), "eval_tasks")
        if bool(tasks) != bool(train.eval_data_dir):
            raise UsageError("--eval_tasks and --eval_data_dir go together: what, and where it is")
        given = train.eval_data_dir, train.eval_tasks_limit, "eval_data_dir"
        self._asked = [ask(read_task(task, *given), tokenizer, seq_len, None) for task in tasks]
        devices = lambda axes: math.prod(run.mesh.shape[axis] for axis in axes)
        parts = (
            (train.microbatches or run.mesh.shape["stage"]) if run.mesh.shape["stage"] > 1 else 1
        )
        tokens = devices(sharding.RULES["tokens"])
        # Every process has all of them.
        compiled = jax.jit(run.scores, out_shardings=sharding.replicated(run.mesh))

        def scores(params: Any, tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
            read = lambda rows: (tokens[rows], targets[rows])
            return compiled(params, *put_batch(read, tokens.shape, run.batch_sharding))

        self._scorer = Scorer(
            scores,
            seq_len,
            rows=devices(sharding.RULES["batch"]) * parts,
            tokens=2 * tokens if tokens > 1 else 1,
            batch_tokens=train.batch_size * seq_len // train.accumulate,
        )
        for asked in self._asked:
            self._scorer.check(asked.source.name, asked.requests)

    def __call__(self, params: Any) -> dict[str, float]:
        found, scorer = {}, self._scorer
        scorer = scorer._replace(scores=partial(scorer.scores, params))
        for asked in self._asked:
            totals = {
                number: Total.of(answer)
                for some in scorer.answers(asked.requests)
                for number, answer in some.items()
            }
            for metric in metrics(asked, [totals[n] for n in range(len(totals))]):
                name = f"eval/{asked.source.name}/{metric.name}"
                found[name] = metric.value
                if metric.error is not None:
                    found[f"{name}_stderr"] = metric.error
        return found


def sample_text(run: Run, params: Any, tokenizer: data.Tokenizer, config: RunConfig) -> str | None:
    """The run's prompt and how the model goes on; None on all processes but the first.

    All call it, for each has a part of the parameters. The text is made on one device: not every
    mesh for training is one for text, and it would have to be made by all processes.
    """
    params = on_one_device(params, run.mesh)
    if not processes.is_first():
        return None
    model = lambda: nnx.state(Decoder(config.model, rngs=nnx.Rngs(0)), nnx.Param)
    shapes = nnx.to_pure_dict(nnx.eval_shape(model))
    # Layers are one stack again, where virtual stages of a pipeline had one each.
    params = jax.tree.map(lambda x, like: x.reshape(like.shape), params, shapes)
    decoder = nnx.merge(run.graphdef, params)
    train = config.train
    sampling = Sampling(train.sample_temperature, max_tokens=train.sample_tokens, seed=train.seed)
    pieces = generate(decoder, tokenizer, train.sample_prompt, sampling)
    return train.sample_prompt + "".join(pieces)
