"""Text that continues prompts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rmt_tpu import config as cfg
from rmt_tpu.data import Tokenizer
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.generation.engine import SLOTS, Engine, Request, Said
from rmt_tpu.generation.programs import Model
from rmt_tpu.generation.sampling import Sampling
from rmt_tpu.generation.text import Text


@dataclass
class Completion:
    """The text generated from a prompt.

    Attributes:
      number: the number of the prompt, from 0.
      text: the text that follows the prompt.
      tokens: the tokens of the text, and those of a stop string that ended it.
      log_probabilities: the log-probabilities of these tokens by the model, before temperature, in
        nats.
      likeliest: for each of these tokens, the likeliest tokens in its place, as in `Scores`.
      finish: "stop" if the model ended the text or a stop string came, else "length"; None before
        the text has ended.
    """

    number: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    finish: str | None = None

    def add(self, more: "Completion") -> None:
        """Add what has come since."""
        self.text += more.text
        self.tokens += more.tokens
        self.log_probabilities += more.log_probabilities
        self.likeliest += more.likeliest
        self.finish = more.finish


class Draft:
    """The state of a completion while it is generated.

    Args:
      number: the number of the prompt.
      tokenizer: the model's tokenizer.
      stop: strings before any of which the text ends.
    """

    def __init__(self, number: int, tokenizer: Tokenizer, stop: Sequence[str]):
        self.number, self.text = number, Text(tokenizer, stop)

    def more(self, said: Said) -> Completion:
        """Return the text of the request's next tokens, with nothing after a stop string."""
        told, count = "", 0
        for token in said.tokens:
            told, count = told + self.text.add([token]), count + 1
            if self.text.stopped:
                break
        new = Completion(self.number, told, said.tokens[:count])
        new.log_probabilities = said.scores.log_probabilities[:count]
        new.likeliest = said.scores.likeliest[:count]
        if said.ended or self.text.stopped:
            new.text += self.text.end()
            new.finish = "stop" if said.stopped or self.text.stopped else "length"
        return new


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """Yield pieces of text that follow `prompt`, until the model ends it or max_tokens is reached.

    One new token costs one step: keys and values of earlier tokens are cached, and the residual
    exists for the newest token alone.

    Args:
      decoder: the model.
      tokenizer: the model's tokenizer.
      prompt: the text to continue.
      sampling: how tokens are chosen, and how many there may be.
      stop: strings before any of which the text ends.

    Raises:
      UsageError: the prompt leaves no room in the model's learned positions, or has a token that
        the model has no embedding for.
    """
    draft = Draft(0, tokenizer, stop)
    request = _request(decoder, tokenizer, prompt, sampling)
    # One row, or one per device that rows are divided over. Few steps at a time, so that a reader
    # sees the text come.
    slots = Model.of(decoder)[0].devices("batch")
    engine = Engine(decoder, tokenizer.ends, **_texts(tokenizer), slots=slots, steps=4)
    for said in engine.run([request]):
        more = draft.more(said)
        if more.text:
            yield more.text
        if more.finish:
            return


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Iterable[tuple[str, Sampling]],
    *,
    stop: Sequence[str] = (),
    slots: int = SLOTS,
) -> Iterator[Completion]:
    """Yield the text that follows each prompt, in the order in which they end; `slots` at a time.

    A text depends on its own prompt, sampling and seed, and not on the other rows of the batch.

    Raises:
      UsageError: see `generate`.
    """
    engine = Engine(decoder, tokenizer.ends, **_texts(tokenizer), slots=slots)
    open_ones: dict[int, tuple[Completion, Draft]] = {}
    requests = (_request(decoder, tokenizer, prompt, how) for prompt, how in prompts)
    for said in engine.run(requests):
        new = (Completion(said.number), Draft(said.number, tokenizer, stop))
        one, draft = open_ones.setdefault(said.number, new)
        one.add(draft.more(said))
        if one.finish:
            engine.forget(said.number)
            del open_ones[said.number]
            yield one


def fitting_tokens(config: cfg.ModelConfig, prompt_tokens: int, max_tokens: int) -> int:
    """Return how many of `max_tokens` new tokens fit after a prompt.

    Only learned positions limit them.

    Raises:
      UsageError: there is room for none.
    """
    if config.learned_positions is None:
        return max_tokens
    max_length = config.learned_positions.max_length
    # The last token generated is never read, so it needs no position.
    room = max_length + 1 - prompt_tokens
    if room < 1:
        raise UsageError(
            f"--prompt has {prompt_tokens} tokens (with the start token) and the model "
            f"{max_length} learned positions; legal: at most {max_length} tokens"
        )
    return min(max_tokens, room)


def _texts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the arguments of an engine that say which tokens have a text."""
    return {"known": tokenizer.vocab_size, "gaps": tokenizer.gaps}


def _request(decoder, tokenizer, prompt, sampling) -> Request:
    tokens = tokenizer.begun(tokenizer.encode(prompt))
    room = fitting_tokens(decoder.config, len(tokens), sampling.max_tokens)
    return Request(tokens, replace(sampling, max_tokens=room))
