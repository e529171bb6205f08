"""Responses in OpenAI's formats for completions and chats, whole or as a stream of chunks."""

import codecs
import math
from typing import Any, NamedTuple

from rmt_tpu.data import Tokenizer
from rmt_tpu.generation import Completion, Scores
from rmt_tpu.serving.protocol import CompletionRequest, ServedModel


class ScoredToken(NamedTuple):
    """A token of a text with its scores.

    Attributes:
      token: the token.
      log: the log-probability of the token, in nats; None for a token that has no score.
      likeliest: the likeliest tokens at the same position with their log-probabilities; None for a
        token that has no score.
      offset: the number of characters that precede the token in the text.
    """

    token: int
    log: float | None
    likeliest: list[tuple[int, float]] | None
    offset: int


class Piece(NamedTuple):
    """A piece of a generated text, from which both response formats are made.

    Attributes:
      text: the characters.
      finish: why the text is finished, as in `Completion`; None if it is not.
      scored: the tokens with their scores, if they were requested.
    """

    text: str
    finish: str | None
    scored: list[ScoredToken]


class Answer:
    """The response to one request, as chunks of a stream or as a whole.

    The texts of the chunks, joined together, equal the texts of the whole response.

    Args:
      request: the request.
      served: the model.
      name: the id of the response.
      created: the time of the request, in seconds since 1970.
    """

    # The values of the field `object` in a whole response and in a chunk.
    _kind = _chunk_kind = "text_completion"

    def __init__(self, request: CompletionRequest, served: ServedModel, name: str, created: int):
        self._request, self._tokenizer = request, served.tokenizer
        self._name, self._created, self._model = name, created, served.name
        texts = range(len(request.prompts) * request.n)
        self._choices = [_Choice(request, index, served.tokenizer) for index in texts]
        self._wholes = [Piece("", None, []) for _ in texts]
        self._tokens = 0

    def add(self, index: int, completion: Completion, prompt: Scores | None) -> dict[str, Any]:
        """Add a newly generated piece of a text, and return the piece as a chunk.

        Args:
          index: the index of the text within the response.
          completion: the new piece.
          prompt: the scores of the text's prompt, if they were requested. They are passed together
            with the first piece of the text.
        """
        if self._request.silent:
            completion = Completion(completion.number, finish="length")
        self._tokens += len(completion.tokens)
        first = not self._choices[index].begun
        piece = self._choices[index].add(completion, prompt)
        text, _, scored = self._wholes[index]
        self._wholes[index] = Piece(text + piece.text, piece.finish, scored + piece.scored)
        usage = {"usage": None} if self._request.include_usage else {}
        return self._head(self._chunk_kind) | {"choices": [self._part(index, piece, first)]} | usage

    def response(self) -> dict[str, Any]:
        """Return the complete response."""
        choices = [self._whole(index, whole) for index, whole in enumerate(self._wholes)]
        return self._head(self._kind) | {"choices": choices, "usage": self._usage()}

    def usage(self) -> dict[str, Any]:
        """Return the last chunk of a stream, which reports the numbers of tokens."""
        return self._head(self._chunk_kind) | {"choices": [], "usage": self._usage()}

    @property
    def ended(self) -> bool:
        """Whether all texts of the response are finished."""
        return all(whole.finish for whole in self._wholes)

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self._name, "object": kind, "created": self._created}
        return head | {"model": self._model}

    def _whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a generated text, or a piece of it, as a choice of the complete response."""
        choice = {"index": index, "text": piece.text, "logprobs": None}
        if self._request.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.scored)
        return choice | {"finish_reason": piece.finish}

    def _part(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        """Return a piece of a generated text as a choice of a chunk of the streamed response."""
        del first
        return self._whole(index, piece)

    def _logprobs(self, scored: list[ScoredToken]) -> dict[str, list]:
        tops = []
        for token, log, likeliest, _ in scored:
            ranked = None if likeliest is None else [*likeliest, (token, log)]
            tops.append(ranked and self._by_text(ranked))
        return {
            "tokens": [self._text(each.token) for each in scored],
            "token_logprobs": [_finite(each.log) for each in scored],
            "top_logprobs": tops,
            "text_offset": [each.offset for each in scored],
        }

    def _by_text(self, ranked: list[tuple[int, float]]) -> dict[str, float | None]:
        """Return the log-probability of each text; the tokens are in descending order.

        Several tokens may have the same text, such as special tokens. The likeliest one counts.
        """
        logs: dict[str, float | None] = {}
        for token, log in ranked:
            logs.setdefault(self._text(token), _finite(log))
        return logs

    def _text(self, token: int) -> str:
        """Return a token's text, or a substitute if the token alone is not valid text.

        A token that is only a part of a character is shown by its bytes, such as "bytes:\\xe2". A
        token that has no text is shown by its number, such as "token:300".
        """
        if token >= self._tokenizer.vocab_size:
            return f"token:{token}"
        content = self._tokenizer.decode_bytes([token])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _usage(self) -> dict[str, int]:
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._request.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": prompt_tokens + self._tokens,
        }


class ChatAnswer(Answer):
    """The response to one request in OpenAI's chat format; see `Answer`."""

    _kind, _chunk_kind = "chat.completion", "chat.completion.chunk"

    def _whole(self, index: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(index, "message", message, piece)

    def _part(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant"} if first else {}
        # The first chunk has `content` even if its text is empty, because clients expect it.
        delta |= {"content": piece.text} if piece.text or first else {}
        return self._choice(index, "delta", delta, piece)

    def _choice(self, index: int, name: str, message: dict, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = {"content": [self._scores(each) for each in piece.scored], "refusal": None}
        choice = {"index": index, name: message, "logprobs": logprobs}
        return choice | {"finish_reason": piece.finish}

    def _scores(self, scored: ScoredToken) -> dict[str, Any]:
        likeliest = (scored.likeliest or [])[: self._request.logprobs]
        return self._score(scored.token, scored.log) | {
            "top_logprobs": [self._score(token, log) for token, log in likeliest]
        }

    def _score(self, token: int, log: float | None) -> dict[str, Any]:
        text, known = self._text(token), token < self._tokenizer.vocab_size
        content = list(self._tokenizer.decode_bytes([token])) if known else None
        # Clients expect a number, so an impossible token gets -9999, as in OpenAI's responses.
        log = -9999.0 if _finite(log) is None else log
        return {"token": text, "logprob": log, "bytes": content}


class _Choice:
    """One text of a response, that is, one of OpenAI's `choices`."""

    def __init__(self, request: CompletionRequest, index: int, tokenizer: Tokenizer):
        self.request, self.index, self.tokenizer = request, index, tokenizer
        self.prompt = request.prompts[index // request.n]
        self.begun = False
        self.characters_sent = 0
        # The text of the next token begins after this number of characters.
        self.offset = 0
        # The list contains the tokens whose text has not been sent yet.
        self.pending: list[ScoredToken] = []
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, completion: Completion, prompt: Scores | None) -> Piece:
        text = completion.text
        if self.request.echo and not self.begun:
            text = self.prompt.text + text
            self._queue_prompt(prompt)
        self.begun = True
        self.characters_sent += len(text)
        if self.request.logprobs is None:
            return Piece(text, completion.finish, [])
        likeliest = completion.likeliest or [{}] * len(completion.tokens)
        tokens = zip(completion.tokens, completion.log_probabilities, likeliest, strict=True)
        for token, log, alternatives in tokens:
            self._queue(token, log, alternatives)
        count = self._count_reported(completion.finish)
        scored, self.pending = self.pending[:count], self.pending[count:]
        return Piece(text, completion.finish, scored)

    def _count_reported(self, finish: str | None) -> int:
        """Return how many of the pending tokens to report.

        A token is reported when its text is sent. The tokens of a stop string are never reported,
        because a stop string is never sent.
        """
        if finish == "length" or (finish and self.offset <= self.characters_sent):
            return len(self.pending)
        count = sum(each.offset < self.characters_sent for each in self.pending)
        # Special tokens before a stop string have no text, so they are not a part of it.
        while finish and count < len(self.pending) and not self._bytes(self.pending[count].token):
            count += 1
        return count

    def _queue_prompt(self, scores: Scores | None) -> None:
        if scores is None:
            return
        start = len(self.prompt.tokens) - self.prompt.client_tokens
        # If the client's prompt includes the start token, that token gets None as its score,
        # because no token precedes it.
        unscored = [None] * (1 - start)
        logs = unscored + scores.log_probabilities
        likeliest = unscored + (scores.likeliest or [{}] * len(scores.log_probabilities))
        prompt_tokens = self.prompt.tokens[start:].tolist()
        # SentencePiece puts a space before a text. It is in the first token, and not in the text.
        decoded = b"".join(map(self._bytes, prompt_tokens)).decode(errors="replace")
        self.offset = _leading_spaces(self.prompt.text) - _leading_spaces(decoded)
        tokens = zip(prompt_tokens, logs, likeliest, strict=True)
        for token, log, alternatives in tokens:
            self._queue(token, log, alternatives)
        self.offset = len(self.prompt.text)
        self.characters.reset()

    def _queue(self, token: int, log: float | None, likeliest: dict[int, float] | None) -> None:
        """Record a token with its scores and text offset, to be reported when its text is sent."""
        best = None if likeliest is None else [*likeliest.items()][: self.request.logprobs]
        self.pending.append(ScoredToken(token, log, best, max(self.offset, 0)))
        self.offset += len(self.characters.decode(self._bytes(token)))

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text; ids beyond the tokenizer's vocabulary have none."""
        known = token < self.tokenizer.vocab_size
        return self.tokenizer.decode_bytes([token]) if known else b""


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _finite(log: float | None) -> float | None:
    """Return a log-probability, or None if it is infinite or NaN, which JSON cannot express."""
    return log if log is not None and math.isfinite(log) else None
