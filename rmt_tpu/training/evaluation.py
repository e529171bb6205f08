"""Evaluations during and after training: loss on held-out text, tasks, and a text sample."""

import copy
import math
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sharding
from rmt_tpu import data
from rmt_tpu.config import RunConfig
from rmt_tpu.data.datasets import Datasets, MixedHeldOut
from rmt_tpu.data.marked import ANSWERS
from rmt_tpu.decoder import Decoder
from rmt_tpu.distributed import processes
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.documents import Total, ask, find_tasks, metrics, read_task
from rmt_tpu.evaluation.scorer import Scorer
from rmt_tpu.evaluation.scores import TokenScores
from rmt_tpu.generation import Sampling, generate
from rmt_tpu.training.global_arrays import on_one_device, put_batch
from rmt_tpu.training.run import PreparedRun


class HeldOut(NamedTuple):
    """Means of losses and of the cores' scalars over tokens of held-out text.

    Attributes:
      loss: the mean loss per token in nats.
      aux: maps the name of each scalar that the model's cores return to its mean per token. Tokens
        without a loss count too, and so do the rows that fill the last batch.
      texts: for a mixture, maps the name of each text to the mean loss on it.
    """

    loss: float
    aux: dict[str, float]
    texts: dict[str, float] = {}


class HeldOutLoss:
    """A function that computes the mean loss on the first windows of held-out text.

    The choice of windows does not depend on the batch size, so runs with different batch sizes are
    evaluated on the same text.

    Args:
      run: the run whose loss is computed.
      windows: windows of the held-out text.
      number: the number of windows to use; all of them are used if there are fewer.
    """

    def __init__(self, run: PreparedRun, windows: data.Windows, number: int):
        self._windows = windows
        self._number = min(number, windows.num_windows)
        self._batch_sharding = run.batch_sharding

        def sums(params, batch):
            loss = run.loss(params, batch)
            return loss.cross_entropy, loss.aux, jnp.sum(batch.weights)

        # Replicate the sums of losses over all devices, so that every process gets the same loss.
        self._sums = jax.jit(sums, out_shardings=sharding.replicated(run.mesh))

    def of(self, windows: data.Windows, number: int) -> "HeldOutLoss":
        """Return the same function for other windows, without compiling it again."""
        other = copy.copy(self)
        other._windows, other._number = windows, min(number, windows.num_windows)
        return other

    def __call__(self, params: Any) -> HeldOut:
        """Return the mean loss and the means of the cores' scalars for the given parameters."""
        shape, sums = (self._windows.batch_size, self._windows.seq_len), []
        for number in range(-(-self._number // self._windows.batch_size)):
            read = partial(self._windows.in_order, number, end=self._number)
            batch = put_batch(read, shape, self._batch_sharding)
            sums.append(jax.tree.map(float, self._sums(params, batch)))
        loss, aux, weight = jax.tree.map(lambda *terms: sum(terms), *sums)
        tokens = len(sums) * math.prod(shape)
        # The weight is 0 if the held-out conversations have no token with a loss. The mean is then
        # NaN.
        return HeldOut(loss / (weight or math.nan), {name: x / tokens for name, x in aux.items()})


class MixedHeldOutLoss:
    """A function that computes the mean loss on the held-out windows of each text of a mixture.

    The loss on the mixture is the mean of these losses, weighted by the texts' shares.

    Args:
      run: the run whose loss is computed.
      mixed: the held-out windows of the texts.
      number: the number of windows to use, which is divided equally among the texts.
    """

    def __init__(self, run: PreparedRun, mixed: Sequence[MixedHeldOut], number: int):
        number = max(1, number // len(mixed))
        first = HeldOutLoss(run, mixed[0].windows, number)
        self._losses = {each.name: first.of(each.windows, number) for each in mixed}
        self._shares = [each.share for each in mixed]

    def __call__(self, params: Any) -> HeldOut:
        """Return the mean losses for the given parameters; see `HeldOutLoss`."""
        found = {name: loss(params) for name, loss in self._losses.items()}
        # A text with the share 0 may have no loss, which is NaN.
        mean = lambda *values: sum(s * v for s, v in zip(self._shares, values, strict=True) if s)
        loss, aux = jax.tree.map(mean, *((each.loss, each.aux) for each in found.values()))
        return HeldOut(loss, aux, {name: each.loss for name, each in found.items()})


def notes_without_loss(config: RunConfig, datasets: Datasets) -> list[str]:
    """Return a line for each text whose held-out loss is NaN, because no evaluated token has one.

    Args:
      config: the run's config.
      datasets: the run's text.
    """
    windows = num_eval_windows(config)
    texts = {f"--data={config.data.source}": datasets.held_out}
    if datasets.mixed:
        texts = {f"{each.name} of --mixture": each.windows for each in datasets.mixed}
        windows = max(1, windows // len(datasets.mixed))
    return [
        f"note: no held-out token of {name} has a loss, so its loss is NaN; only {ANSWERS} have one"
        for name, held_out in texts.items()
        if not held_out.any_loss(windows)
    ]


def num_eval_windows(config: RunConfig) -> int:
    """Return the number of held-out windows that the config requests."""
    if config.train.eval_batches:
        return config.train.eval_batches * config.train.batch_size
    return max(1, config.train.eval_tokens // config.data.seq_len)


class TaskMetrics:
    """A function that evaluates a run's tasks and returns their scores with standard errors.

    The scores have names like `eval/arc_easy/acc`.

    Args:
      run: the run whose parameters are evaluated.
      config: the run's config, which names the tasks. Texts are at most as long as a training
        window, and one evaluation batch has as many tokens as one accumulation step of training.
      tokenizer: the run's tokenizer.

    Raises:
      UsageError: there is no such task, its data cannot be read, or a text does not fit a window.
    """

    def __init__(self, run: PreparedRun, config: RunConfig, tokenizer: data.Tokenizer):
        train, seq_len = config.train, config.data.seq_len
        tasks = find_tasks(filter(None, train.eval_tasks.split(",")), "eval_tasks")
        if bool(tasks) != bool(train.eval_data_dir):
            raise UsageError("--eval_tasks and --eval_data_dir must be given together")
        read = partial(
            read_task,
            data_dir=train.eval_data_dir,
            limit=train.eval_tasks_limit,
            flag="eval_data_dir",
        )
        self._asked = [
            ask(read(task), tokenizer, seq_len, None, flag="eval_tasks") for task in tasks
        ]
        devices = lambda axes: math.prod(run.mesh.shape[axis] for axis in axes)
        parts = (
            (train.microbatches or run.mesh.shape["stage"]) if run.mesh.shape["stage"] > 1 else 1
        )
        tokens = devices(sharding.RULES["tokens"])
        # Replicate the scores over all devices, so that every process has the scores of all texts.
        compiled = jax.jit(run.scores, out_shardings=sharding.replicated(run.mesh))

        def scores(params: Any, tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
            read = lambda rows: (tokens[rows], targets[rows])
            return compiled(params, *put_batch(read, tokens.shape, run.batch_sharding))

        self._scorer = Scorer(
            scores,
            seq_len,
            rows=devices(sharding.RULES["batch"]) * parts,
            tokens=2 * tokens if tokens > 1 else 1,
            batch_tokens=train.batch_size * seq_len // train.parts,
        )
        for asked in self._asked:
            self._scorer.check(asked.source.name, asked.requests, flag="seq_len")

    def checksum(self) -> int:
        """Return the CRC-32 of the tokens of all requests, or 0 without tasks.

        All processes must have the same requests, because each takes part in every batch.
        """
        crc32 = 0
        for request in (request for asked in self._asked for request in asked.requests):
            for tokens in request.context, request.continuation:
                crc32 = zlib.crc32(np.ascontiguousarray(tokens, np.int32), crc32)
                crc32 = zlib.crc32(len(tokens).to_bytes(4, "little"), crc32)
        return crc32

    def __call__(self, params: Any) -> dict[str, float]:
        """Return the scores of all tasks, with standard errors, for the given parameters."""
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


def sample_text(
    run: PreparedRun, params: Any, tokenizer: data.Tokenizer, config: RunConfig
) -> str | None:
    """Return the run's prompt with a generated continuation; None on all but the first process.

    All processes must call this function, because each holds a part of the parameters. The first
    process gathers them on a single device and generates the text there, because not every mesh for
    training supports generation.
    """
    params = on_one_device(params, run.mesh)
    if not processes.is_first():
        return None
    model = lambda: nnx.state(Decoder(config.model, rngs=nnx.Rngs(0)), nnx.Param)
    shapes = nnx.to_pure_dict(nnx.eval_shape(model))
    # A pipeline with virtual stages splits the layer axis of parameters into chunks. Merge the
    # chunks, because the decoder for sampling has no pipeline.
    params = jax.tree.map(lambda x, like: x.reshape(like.shape), params, shapes)
    decoder = nnx.merge(run.graphdef, params)
    train = config.train
    sampling = Sampling(train.sample_temperature, max_tokens=train.sample_tokens, seed=train.seed)
    pieces = generate(decoder, tokenizer, train.sample_prompt, sampling)
    return train.sample_prompt + "".join(pieces)
