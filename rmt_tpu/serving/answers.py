"""Responses in the format of OpenAI's completions API, whole or as a stream of chunks."""

import codecs
import math
from typing import Any

from rmt_tpu.data import Tokenizer
from rmt_tpu.generation import Completion, Scores
from rmt_tpu.serving.protocol import CompletionRequest, ServedModel


class Answer:
    """The response to one request, as chunks of a stream or as a whole.

    The texts of the chunks, joined together, equal the texts of the whole response.

    Args:
      request: the request.
      served: the model.
      name: the id of the response.
      created: the time of the request, in seconds since 1970.
    """

    def __init__(self, request: CompletionRequest, served: ServedModel, name: str, created: int):
        self._request = request
        self._head = {
            "id": name,
            "object": "text_completion",
            "created": created,
            "model": served.name,
        }
        texts = range(len(request.prompts) * request.n)
        self._choices = [_Choice(request, index, served.tokenizer) for index in texts]
        self._whole_choices = [choice.empty() for choice in self._choices]
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
        piece = self._choices[index].add(completion, prompt)
        choice = self._whole_choices[index]
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
        for name, values in (piece["logprobs"] or {}).items():
            choice["logprobs"][name] += values
        usage = {"usage": None} if self._request.include_usage else {}
        return self._head | {"choices": [piece]} | usage

    def response(self) -> dict[str, Any]:
        """Return the complete response."""
        return self._head | {"choices": self._whole_choices, "usage": self._usage()}

    def usage(self) -> dict[str, Any]:
        """Return the last chunk of a stream, which reports the numbers of tokens."""
        return self._head | {"choices": [], "usage": self._usage()}

    @property
    def ended(self) -> bool:
        """Whether all texts of the response have ended."""
        return all(choice["finish_reason"] for choice in self._whole_choices)

    def _usage(self) -> dict[str, int]:
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._request.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": prompt_tokens + self._tokens,
        }


class _Choice:
    """One text of a response, that is, one of OpenAI's `choices`."""

    def __init__(self, request: CompletionRequest, index: int, tokenizer: Tokenizer):
        self.request, self.index, self.tokenizer = request, index, tokenizer
        self.prompt = request.prompts[index // request.n]
        self.begun = False
        self.characters_sent = 0  # number of characters sent so far
        self.offset = 0  # character offset at which the next token's text begins
        self.pending: list[tuple] = []  # tokens whose text has not been sent yet
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def empty(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": "",
            "logprobs": None if self.request.logprobs is None else _logprobs([]),
            "finish_reason": None,
        }

    def add(self, completion: Completion, prompt: Scores | None) -> dict[str, Any]:
        piece = self.empty() | {"text": completion.text, "finish_reason": completion.finish}
        if self.request.echo and not self.begun:
            piece["text"] = self.prompt.text + completion.text
            self._queue_prompt(prompt)
        self.begun = True
        self.characters_sent += len(piece["text"])
        if self.request.logprobs is None:
            return piece
        likeliest = completion.likeliest or [{}] * len(completion.tokens)
        tokens = zip(completion.tokens, completion.log_probabilities, likeliest, strict=True)
        for token, log, alternatives in tokens:
            self._queue(token, log, alternatives)
        # Report a token when its text is sent. The tokens of a stop string are never reported,
        # because a stop string is never sent.
        count = sum(offset < self.characters_sent for *_, offset in self.pending)
        if completion.finish == "length":
            count = len(self.pending)
        piece["logprobs"], self.pending = _logprobs(self.pending[:count]), self.pending[count:]
        return piece

    def _queue_prompt(self, scores: Scores | None) -> None:
        if scores is None:
            return
        start = len(self.prompt.tokens) - self.prompt.client_tokens
        # If the client's prompt includes the start token, that token gets None as its score,
        # because no token precedes it.
        unscored = [None] * (1 - start)
        logs = unscored + scores.log_probabilities
        likeliest = unscored + (scores.likeliest or [{}] * len(scores.log_probabilities))
        tokens = zip(self.prompt.tokens[start:].tolist(), logs, likeliest, strict=True)
        for token, log, alternatives in tokens:
            self._queue(token, log, alternatives)
        self.offset = len(self.prompt.text)
        self.characters.reset()

    def _queue(self, token: int, log: float | None, likeliest: dict[int, float] | None) -> None:
        """Record a token with its scores and text offset, to be reported when its text is sent."""
        top = None
        if likeliest is not None:
            best = list(likeliest.items())[: self.request.logprobs]
            top = {self._text(t): _finite(x) for t, x in [*best, (token, log)]}
        self.pending.append((self._text(token), _finite(log), top, self.offset))
        if token < self.tokenizer.vocab_size:  # ids beyond the tokenizer's vocabulary have no text
            self.offset += len(self.characters.decode(self.tokenizer.decode_bytes([token])))

    def _text(self, token: int) -> str:
        """Return a token's text, or a substitute if the token alone is not valid text.

        A token that is only a part of a character is shown by its bytes, such as "bytes:\\xe2". A
        token that has no text is shown by its number, such as "token:300".
        """
        if token >= self.tokenizer.vocab_size:
            return f"token:{token}"
        content = self.tokenizer.decode_bytes([token])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _logprobs(tokens: list[tuple]) -> dict[str, list]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns = zip(*tokens, strict=True) if tokens else [()] * len(names)
    return dict(zip(names, map(list, columns), strict=True))


def _finite(log: float | None) -> float | None:
    """Return a log-probability, or None if it is infinite or NaN, which JSON cannot express."""
    return log if log is not None and math.isfinite(log) else None
