"""Who can be asked: a trained model, and two that know less, to compare it with."""

import dataclasses
import math

import numpy as np
from flax import nnx

import rmt_tpu
from rmt_tpu.data import Tokenizer
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.decoder import Decoder
from rmt_tpu.evaluation.evaluate import Subject
from rmt_tpu.evaluation.scorer import BATCH_TOKENS, Scorer, fingerprint
from rmt_tpu.evaluation.scores import TokenScores
from rmt_tpu.generation import cast_once
from rmt_tpu.runs.workdir import load_step, read_config
from rmt_tpu.storage import Location, open_folder

UNTRAINED, UNIGRAM = "untrained", "unigram"
_COUNTED = 2**24  # tokens of the training text


def of_run(
    workdir: Location,
    step: int | None = None,
    *,
    mesh: str | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Subject:
    """The model of a run folder, or of one of the hub's form, where its answers are kept.

    Args:
      step: of the checkpoint; None is the last good one.
      mesh: see `rmt_tpu.load`.
      max_length: tokens that are read at a time; None is as many as in training.
      batch_tokens: read at once by each device that rows are divided over, about.

    Raises:
      ArgumentError: there is no run in the folder, or no such step.
      UsageError: the model does not read so many tokens.
      MeshError: there are not so many devices, or the model does not divide over them.
    """
    decoder, tokenizer, step, seq_len = load_step(workdir, step, mesh=mesh)
    folder = open_folder(workdir)
    max_length = max_length or seq_len
    identity = {"weights": fingerprint(decoder), "step": step, "dtype": decoder.dtype.name}
    decoder = cast_once(decoder)
    scorer = Scorer.of(decoder, max_length, batch_tokens)
    identity |= _read(tokenizer, scorer)
    return Subject(folder.name, scorer, tokenizer, identity, folder, decoder)


def untrained(workdir: Location, subject: Subject) -> Subject:
    """The model of a run before its first step, asked as that after it."""
    config = read_config(workdir)
    decoder = Decoder(config.model, rngs=nnx.Rngs(config.train.seed))
    identity = subject.identity | {"weights": fingerprint(decoder), "step": 0}
    decoder = cast_once(decoder)
    scorer = Scorer.of(decoder, subject.scorer.max_length, subject.scorer.batch_tokens)
    return subject._replace(name=UNTRAINED, scorer=scorer, identity=identity, decoder=decoder)


def unigram(workdir: Location, subject: Subject) -> Subject:
    """Tokens as often as they are in a run's training text, whatever stands before them."""
    config, tokenizer = read_config(workdir), subject.tokenizer
    batch = dataclasses.replace(config.train, batch_size=1, accumulate=1)
    stream = load_datasets(dataclasses.replace(config, train=batch), tokenizer).train.stream
    read = stream.read(np.zeros(1, np.int64), min(len(stream), _COUNTED))[0]
    counts = (
        np.bincount(read, minlength=tokenizer.vocab_size) + 1.0
    )  # one of each that is not there
    logs, likeliest = np.log(counts) - math.log(counts.sum()), int(np.argmax(counts))

    def scores(tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
        asked = targets >= 0
        return TokenScores(np.where(asked, logs[targets], 0), asked & (targets == likeliest))

    scorer = Scorer(scores, subject.scorer.max_length)
    identity = subject.identity | {"weights": f"{UNIGRAM}-{stream.checksum():08x}", "step": None}
    return subject._replace(name=UNIGRAM, scorer=scorer, identity=identity, decoder=None)


def _read(tokenizer: Tokenizer, scorer: Scorer) -> dict[str, object]:
    """How texts are read."""
    starts = {} if tokenizer.starts else {"starts": False}
    return starts | {
        "tokenizer": tokenizer.fingerprint(),
        "max_length": scorer.max_length,
        "batch_tokens": scorer.batch_tokens,
        "version": rmt_tpu.__version__,
    }
