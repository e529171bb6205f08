"""Generation of text that continues given prompts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rmt_tpu import config as cfg
from rmt_tpu.data import Tokenizer
from rmt_tpu.data.tokenizer import Tokens
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.generation.engine import SLOTS, Engine, NewTokens, Request
from rmt_tpu.generation.programs import ModelSpec
from rmt_tpu.generation.sampling import Sampling
from rmt_tpu.generation.text import Text


@dataclass
class Completion:
    """The text that was generated for one prompt.

    Attributes:
      number: the index of the prompt, counted from 0.
      text: the generated text, without the prompt.
      tokens: the tokens of the text, including the tokens of a stop string that ended it.
      log_probabilities: the log-probability of each token under the model, before temperature is
        applied, in nats.
      likeliest: the likeliest candidates at the position of each token, as in `Scores`.
      finish: "stop" if the model or a stop string ended the text, "length" if the token limit did,
        and None while the text is not finished.
    """

    number: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    finish: str | None = None

    def append(self, piece: "Completion") -> None:
        """Append a further piece of the same completion."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.log_probabilities += piece.log_probabilities
        self.likeliest += piece.likeliest
        self.finish = piece.finish


class Draft:
    """A completion in progress, which turns generated tokens into text.

    Args:
      number: the index of the prompt.
      tokenizer: the model's tokenizer.
      stop: stop strings; the text ends before the first stop string in it.
      min_tokens: the number of tokens at the start of the text in which stop strings are ignored.
    """

    def __init__(self, number: int, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int = 0):
        self.number, self.text = number, Text(tokenizer, stop)
        # The number of further tokens in which stop strings are ignored.
        self._unstopped = min_tokens

    def add(self, new_tokens: NewTokens) -> Completion:
        """Return the newly generated piece of the completion, cut before any stop string."""
        text, count = "", 0
        for token in new_tokens.tokens:
            new = self.text.add([token], may_stop=self._unstopped <= 0)
            text, count, self._unstopped = text + new, count + 1, self._unstopped - 1
            if self.text.stopped:
                break
        new = Completion(self.number, text, new_tokens.tokens[:count])
        new.log_probabilities = new_tokens.scores.log_probabilities[:count]
        new.likeliest = new_tokens.scores.likeliest[:count]
        if new_tokens.ended or self.text.stopped:
            new.text += self.text.end()
            new.finish = "stop" if new_tokens.stopped or self.text.stopped else "length"
        return new


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """Yield pieces of the text that follows `prompt`, until it ends or has `max_tokens` tokens.

    Keys and values are cached, so each decode step processes only the newest token.

    Args:
      decoder: the model.
      tokenizer: the model's tokenizer.
      prompt: the text to continue.
      sampling: how tokens are chosen, and the maximum number of new tokens.
      stop: stop strings; the text ends before the first stop string in it.

    Raises:
      UsageError: the prompt uses up all of the model's learned positions, or contains a token for
        which the model has no embedding.
    """
    draft = Draft(0, tokenizer, stop)
    request = _request(decoder, tokenizer, prompt, sampling)
    # Only one row of the batch is used, but a mesh that shards rows needs one row per device. Few
    # steps run at a time, so that the text appears as it is generated.
    slots = ModelSpec.of(decoder)[0].devices("batch")
    engine = Engine(decoder, tokenizer.ends, **_texts(tokenizer), slots=slots, steps=4)
    for new_tokens in engine.run([request]):
        piece = draft.add(new_tokens)
        if piece.text:
            yield piece.text
        if piece.finish:
            return


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Iterable[tuple[str | Tokens, Sampling]],
    *,
    stop: Sequence[str] = (),
    slots: int = SLOTS,
) -> Iterator[Completion]:
    """Yield each prompt's completion as soon as it ends, not necessarily in prompt order.

    A completion depends only on its own prompt, sampling settings and seed, and not on the other
    rows of the batch.

    Args:
      decoder: the model.
      tokenizer: the model's tokenizer.
      prompts: each prompt with its sampling settings. A prompt is a text, or all of its tokens.
      stop: stop strings; a text ends before the first stop string in it.
      slots: how many texts are generated at a time.

    Raises:
      UsageError: see `generate`.
    """
    engine = Engine(decoder, tokenizer.ends, **_texts(tokenizer), slots=slots)
    drafts: dict[int, tuple[Completion, Draft]] = {}
    requests = (_request(decoder, tokenizer, prompt, sampling) for prompt, sampling in prompts)
    for new_tokens in engine.run(requests):
        new = (Completion(new_tokens.number), Draft(new_tokens.number, tokenizer, stop))
        completion, draft = drafts.setdefault(new_tokens.number, new)
        completion.append(draft.add(new_tokens))
        if completion.finish:
            engine.forget(new_tokens.number)
            del drafts[new_tokens.number]
            yield completion


def fitting_tokens(config: cfg.ModelConfig, prompt_tokens: int, max_tokens: int) -> int:
    """Return how many of the `max_tokens` requested new tokens fit after a prompt.

    Only a model with learned positions has a limit.

    Raises:
      UsageError: the prompt leaves no room for a new token.
    """
    if config.learned_positions is None:
        return max_tokens
    max_length = config.learned_positions.max_length
    # The model does not read the last generated token, so a text may have one token more than the
    # model has positions.
    room = max_length + 1 - prompt_tokens
    if room < 1:
        raise UsageError(
            f"--prompt has {prompt_tokens} tokens (with the start token), but the model has only "
            f"{max_length} learned positions; legal: at most {max_length} tokens"
        )
    return min(max_tokens, room)


def _texts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the arguments of `Engine` that state which token ids decode to text."""
    return {"text_vocab_size": tokenizer.vocab_size, "gaps": tokenizer.gaps}


def _request(decoder, tokenizer, prompt, sampling) -> Request:
    is_text = isinstance(prompt, str)
    tokens = tokenizer.with_bos(tokenizer.encode(prompt)) if is_text else np.asarray(prompt)
    room = fitting_tokens(decoder.config, len(tokens), sampling.max_tokens)
    return Request(tokens, replace(sampling, max_tokens=room))
