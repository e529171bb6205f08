"""Responses in the format of OpenAI's completions API, whole or as a stream of chunks."""

import codecs
import math
from typing import Any

from rmt_tpu.data import Tokenizer
from rmt_tpu.generation import Completion, Scores
from rmt_tpu.serving.protocol import Ask, Served


class Answer:
    """The response to one request.

    The chunks of a stream add up to the response that is sent without streaming.

    Args:
      ask: the request.
      served: the model.
      name: the id of the response.
      created: the time of the request, in seconds since 1970.
    """

    def __init__(self, ask: Ask, served: Served, name: str, created: int):
        self._ask = ask
        self._head = {
            "id": name,
            "object": "text_completion",
            "created": created,
            "model": served.name,
        }
        texts = range(len(ask.prompts) * ask.n)
        self._choices = [_Choice(ask, index, served.tokenizer) for index in texts]
        self._told = [choice.empty() for choice in self._choices]
        self._tokens = 0

    def add(self, index: int, more: Completion, prompt: Scores | None) -> dict[str, Any]:
        """Add a newly generated piece of a text, and return the piece as a chunk.

        Args:
          index: the index of the text within the response.
          more: the new piece.
          prompt: the scores of the text's prompt, if they were requested. They are passed together
            with the first piece of the text.
        """
        if self._ask.silent:
            more = Completion(more.number, finish="length")
        self._tokens += len(more.tokens)
        piece = self._choices[index].add(more, prompt)
        told = self._told[index]
        told["text"] += piece["text"]
        told["finish_reason"] = piece["finish_reason"]
        for name, values in (piece["logprobs"] or {}).items():
            told["logprobs"][name] += values
        usage = {"usage": None} if self._ask.include_usage else {}
        return self._head | {"choices": [piece]} | usage

    def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        return self._head | {"choices": self._told, "usage": self._usage()}

    def usage(self) -> dict[str, Any]:
        """Return the last chunk of a stream, which reports the numbers of tokens."""
        return self._head | {"choices": [], "usage": self._usage()}

    @property
    def ended(self) -> bool:
        """Whether all texts of the response have ended."""
        return all(told["finish_reason"] for told in self._told)

    def _usage(self) -> dict[str, int]:
        of_prompts = sum(len(prompt.tokens) for prompt in self._ask.prompts)
        return {
            "prompt_tokens": of_prompts,
            "completion_tokens": self._tokens,
            "total_tokens": of_prompts + self._tokens,
        }


class _Choice:
    """One text of a response, that is, one of OpenAI's `choices`."""

    def __init__(self, ask: Ask, index: int, tokenizer: Tokenizer):
        self.ask, self.index, self.tokenizer = ask, index, tokenizer
        self.prompt = ask.prompts[index // ask.n]
        self.begun = False
        self.told = 0  # number of characters sent so far
        self.offset = 0  # character offset at which the next token's text begins
        self.held: list[tuple] = []  # tokens whose text has not been sent yet
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def empty(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": "",
            "logprobs": None if self.ask.logprobs is None else _logprobs([]),
            "finish_reason": None,
        }

    def add(self, more: Completion, prompt: Scores | None) -> dict[str, Any]:
        piece = self.empty() | {"text": more.text, "finish_reason": more.finish}
        if self.ask.echo and not self.begun:
            piece["text"] = self.prompt.text + more.text
            self._hold_prompt(prompt)
        self.begun = True
        self.told += len(piece["text"])
        if self.ask.logprobs is None:
            return piece
        likeliest = more.likeliest or [{}] * len(more.tokens)
        for given in zip(more.tokens, more.log_probabilities, likeliest, strict=True):
            self._hold(*given)
        # A token is reported when its text is sent. The text of a stop string is never sent, so its
        # tokens are never reported.
        count = sum(offset < self.told for *_, offset in self.held)
        if more.finish == "length":
            count = len(self.held)
        piece["logprobs"], self.held = _logprobs(self.held[:count]), self.held[count:]
        return piece

    def _hold_prompt(self, scores: Scores | None) -> None:
        if scores is None:
            return
        start = len(self.prompt.tokens) - self.prompt.own
        # If the client's prompt includes the start token, that token has no score, because no token
        # precedes it.
        before = [None] * (1 - start)
        logs = before + scores.log_probabilities
        likeliest = before + (scores.likeliest or [{}] * len(scores.log_probabilities))
        for given in zip(self.prompt.tokens[start:].tolist(), logs, likeliest, strict=True):
            self._hold(*given)
        self.offset = len(self.prompt.text)
        self.characters.reset()

    def _hold(self, token: int, log: float | None, likeliest: dict[int, float] | None) -> None:
        """Queue a token with its log-probability, likeliest alternatives and text offset."""
        top = None
        if likeliest is not None:
            best = list(likeliest.items())[: self.ask.logprobs]
            top = {self._text(t): _finite(x) for t, x in [*best, (token, log)]}
        self.held.append((self._text(token), _finite(log), top, self.offset))
        if token < self.tokenizer.vocab_size:  # larger ids have no text
            self.offset += len(self.characters.decode(self.tokenizer.decode_bytes([token])))

    def _text(self, token: int) -> str:
        """Return a token's text, or a substitute if it has none of its own.

        A token that is only a part of a character is shown as its bytes, and a token without text
        as its number.
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
    """Return `log`, or None if it is a number that JSON cannot express."""
    return log if log is not None and math.isfinite(log) else None
