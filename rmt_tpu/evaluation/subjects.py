"""The models that are evaluated: a trained model, and two weaker baselines for comparison.

The baselines are the untrained model and a unigram model.
"""

import dataclasses
import math

import jax
import numpy as np
from flax import nnx

import rmt_tpu
from rmt_tpu.config import RunConfig
from rmt_tpu.data import Tokenizer
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.data.marked import without_marks
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.evaluate import Subject
from rmt_tpu.evaluation.scorer import BATCH_TOKENS, Scorer, check_length, fingerprint
from rmt_tpu.evaluation.scores import TokenScores
from rmt_tpu.generation import cast_once
from rmt_tpu.hub.models import is_hub
from rmt_tpu.runs.loading import load_step
from rmt_tpu.runs.warm_start import WarmStart
from rmt_tpu.runs.workdir import read_config
from rmt_tpu.storage import Location, open_folder

UNTRAINED, UNIGRAM = "untrained", "unigram"
_COUNTED = 2**24  # The maximum number of training tokens that are counted for the unigram model.


def run_subject(
    workdir: Location,
    step: int | None = None,
    *,
    mesh: str | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Subject:
    """Return the model of a run folder, or of a folder in the hub's format, for evaluation.

    The model's answers are stored in the same folder, unless the caller replaces `Subject.folder`.

    Args:
      workdir: the folder.
      step: the step of the checkpoint; None means the last good checkpoint.
      mesh: see `rmt_tpu.load`.
      max_length: the maximum number of tokens that the model reads at a time; None means the
        training length, or the maximum length of a model in the hub's format.
      batch_tokens: the approximate number of tokens per batch on each device that has its own rows.

    Raises:
      ArgumentError: there is no run in the folder, or no such step.
      UsageError: the model cannot read `max_length` tokens.
      MeshError: there are fewer devices than the mesh needs, or the mesh cannot divide the model.
    """
    decoder, tokenizer, step, seq_len = load_step(workdir, step, mesh=mesh)
    folder, limit = open_folder(workdir), None
    if max_length is None:
        max_length = seq_len
        length = "maximum length" if is_hub(folder) else "training length"
        limit = f"{folder} reads {seq_len} tokens at once (its {length}), which"
    check_length(decoder.config, max_length, str(folder))
    identity = {"weights": fingerprint(decoder), "step": step, "dtype": decoder.dtype.name}
    decoder = cast_once(decoder)
    scorer = Scorer.of(decoder, max_length, batch_tokens)
    identity |= _input_identity(tokenizer, scorer)
    return Subject(folder.name, scorer, tokenizer, identity, folder, decoder, limit)


def untrained(workdir: Location, subject: Subject) -> Subject:
    """Return a run's model as it was before its first training step, as a baseline for `subject`.

    The parameters are random, except those that `train.init_from` supplied. These are read from its
    folder as it is now: if it is a run that has been trained further, they are the later ones. The
    model gets the sequence length, batch size and tokenizer of `subject`.

    Raises:
      ArgumentError: the folder has no run, for example because it is in the hub's format.
      UsageError: the model in the folder of `train.init_from` is missing or does not fit any more.
      RunError: a file or checkpoint of that model is damaged.
    """
    decoder = _initial(read_config(workdir))
    identity = subject.identity | {"weights": fingerprint(decoder), "step": 0}
    decoder = cast_once(decoder)
    scorer = Scorer.of(decoder, subject.scorer.max_length, subject.scorer.batch_tokens)
    return subject._replace(name=UNTRAINED, scorer=scorer, identity=identity, decoder=decoder)


def _initial(config: RunConfig) -> Decoder:
    """Return the model with which a run starts; see `untrained` for the errors."""
    decoder = Decoder(config.model, rngs=nnx.Rngs(config.train.seed))
    if not config.train.init_from:
        return decoder
    graphdef, state = nnx.split(decoder, nnx.Param)
    params = nnx.to_pure_dict(state)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    try:
        start = WarmStart(config.train.init_from, config.model)
        params = start.initial_params(params, shardings, log=lambda line: None)
    except UsageError as error:
        # The flag --init_from of this command selects the model that is evaluated.
        reason = str(error).replace("--init_from", "train.init_from")
        raise UsageError(
            f"--against={UNTRAINED} needs the weights from which the run started: {reason}"
        ) from None
    return nnx.merge(graphdef, params)


def unigram(workdir: Location, subject: Subject) -> Subject:
    """Return a model that predicts each token by its frequency in a run's training text.

    Raises:
      ArgumentError: the folder has no run, for example because it is in the hub's format.
    """
    config, tokenizer = read_config(workdir), subject.tokenizer
    batch = dataclasses.replace(config.train, batch_size=1, accumulate=1)
    train = load_datasets(dataclasses.replace(config, train=batch), tokenizer).train
    start = np.zeros(1, np.int64)
    tokens = np.concatenate(
        [
            stream.read(start, min(len(stream), int(share * _COUNTED)))[0]
            for share, stream in train.streams
        ]
    )
    tokens = without_marks(tokens)
    counts = (
        np.bincount(tokens, minlength=tokenizer.vocab_size) + 1.0
    )  # Add one to each count, so that no count is 0.
    logs, likeliest = np.log(counts) - math.log(counts.sum()), int(np.argmax(counts))

    def scores(tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
        scored = targets >= 0
        return TokenScores(np.where(scored, logs[targets], 0), scored & (targets == likeliest))

    scorer = Scorer(scores, subject.scorer.max_length)
    identity = subject.identity | {"weights": f"{UNIGRAM}-{train.checksum():08x}", "step": None}
    return subject._replace(name=UNIGRAM, scorer=scorer, identity=identity, decoder=None)


def _input_identity(tokenizer: Tokenizer, scorer: Scorer) -> dict[str, object]:
    """Return the settings that affect a model's answers, except its weights.

    They are the tokenizer, the sequence length, the batch size and this package's version.
    """
    starts = {} if tokenizer.starts else {"starts": False}
    return starts | {
        "tokenizer": tokenizer.fingerprint(),
        "max_length": scorer.max_length,
        "batch_tokens": scorer.batch_tokens,
        "version": rmt_tpu.__version__,
    }
