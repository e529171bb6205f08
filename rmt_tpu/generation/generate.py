"""Text that goes on from prompts."""

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
    """What came of a prompt.

    Attributes:
      number: of the prompt, from 0.
      text: that follows it.
      tokens: of the text; with a stop string those too that made it.
      log_probabilities: of these tokens by the model, before temperature: nats.
      likeliest: where they stand, as in `Scores`.
      finish: "stop" if the model ended the text or a stop string came, else "length"; None
        before it has ended.
    """

    number: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    finish: str | None = None

    def add(self, more: "Completion") -> None:
        """What has come since."""
        self.text += more.text
        self.tokens += more.tokens
        self.log_probabilities += more.log_probabilities
        self.likeliest += more.likeliest
        self.finish = more.finish


class Draft:
    """A completion that is being made.

    Args:
      number: of the prompt.
      tokenizer: of the model.
      stop: strings before any of which the text ends.
    """

    def __init__(self, number: int, tokenizer: Tokenizer, stop: Sequence[str]):
        self.number, self.text = number, Text(tokenizer, stop)

    def more(self, said: Said) -> Completion:
        """What comes of the request's next tokens, and of none behind a stop string."""
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
    """Pieces of text that follow `prompt`, until the model ends the document or the room is out.

    One new token costs one step: keys and values of earlier tokens are cached, and of the
    residual only that of the newest token exists.

    Args:
      stop: strings before any of which the text ends.

    Raises:
      UsageError: the prompt leaves no room in the model's learned positions, or has a token that
        the model has not.
    """
    draft = Draft(0, tokenizer, stop)
    request = _request(decoder, tokenizer, prompt, sampling)
    # One row, or as many as devices divide; a few tokens at a time: a person reads along.
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
    """What follows each prompt, in the order in which they end; `slots` of them at a time.

    A text depends on its own prompt, sampling and seed, and not on what is beside it.

    Raises:
      UsageError: as `generate`.
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
    """How many of `max_tokens` fit behind a prompt: learned positions end, others do not.

    Raises:
      UsageError: none do.
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
    """Which tokens have a text, for an engine."""
    return {"known": tokenizer.vocab_size, "gaps": tokenizer.gaps}


def _request(decoder, tokenizer, prompt, sampling) -> Request:
    tokens = tokenizer.begun(tokenizer.encode(prompt))
    room = fitting_tokens(decoder.config, len(tokens), sampling.max_tokens)
    return Request(tokens, replace(sampling, max_tokens=room))
