"""Task definitions, with the data formats and prompts of lm-evaluation-harness 0.4.13.

All tasks are scored by the log-probabilities of continuations.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rmt_tpu.errors import shown


class Malformed(Exception):
    """An error in one line of a task's data. Callers add the line's location to the message."""


class Document(NamedTuple):
    """One question of a task, or one text.

    Attributes:
      pairs: the (context, continuation) of each scoring request; ("", text) for a text.
      gold: the index of the pair with the right answer.
      lengths: the lengths of the choices in characters. The metric `acc_norm` divides
        log-probabilities by them. () if the task does not have this metric.
      words, bytes: the number of words and bytes of a text, before it was prepared for scoring.
    """

    pairs: tuple[tuple[str, str], ...]
    gold: int = 0
    lengths: tuple[int, ...] = ()
    words: int = 0
    bytes: int = 0


class Hub(NamedTuple):
    """A dataset on the Hugging Face hub: its path, configuration name and split."""

    path: str
    name: str | None
    split: str


Kind = Literal["choices", "last_word", "text"]


@dataclass(frozen=True)
class Task:
    """A task: how its data are read and how it is scored.

    Attributes:
      name: the name of the task in lm-evaluation-harness.
      kind: "choices" asks which choice is likeliest, "last_word" scores the last word of a passage,
        and "text" scores a whole text.
      document: a function that makes a document from a line of data.
      fields: the names of the fields of a data line, for error messages.
      hub: the dataset on the Hugging Face hub.
      version: the version number of the prompt in lm-evaluation-harness.
      chance: the accuracy of random choices.
      papers: maps a metric to the values in the RMT paper, of its Transformer and its RMT.
    """

    name: str
    kind: Kind
    document: Callable[[Mapping[str, Any]], Document]
    fields: str
    hub: Hub
    version: float = 1.0
    chance: float = 0.0
    papers: Mapping[str, tuple[float, float]] = field(default_factory=dict)


# Making documents from lines of data ---------------------------------------------------------


def _text(line: Mapping[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        names = ", ".join(map(repr, list(line)[:8])) or "none"
        raise Malformed(f"the line has no text field {name!r}; it has the fields: {names}")
    return value


def _index(line: Mapping[str, Any], name: str, count: int) -> int:
    value = line.get(name)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int or not 0 <= value < count:
        raise Malformed(f"the line has {name!r}={shown(value)}; legal: 0 to {count - 1}")
    return value


def _choices(context: str, choices: list[str], gold: int) -> Document:
    pairs = tuple((context, f" {choice}") for choice in choices)
    return Document(pairs, gold, tuple(map(len, choices)))


def _listed(line: Mapping[str, Any], name: str = "choices") -> list[str]:
    value = line.get(name)
    valid = isinstance(value, list) and len(value) > 1 and all(isinstance(x, str) for x in value)
    if not valid:
        raise Malformed(f"the line has no field {name!r} with a list of texts")
    return value


def _query(line: Mapping[str, Any], ending: str = "") -> Document:
    """Return the document for a line that has the fields "query", "choices" and "gold"."""
    choices = _listed(line)
    gold = _index(line, "gold", len(choices))
    return _choices(_text(line, "query") + ending, choices, gold)


def _arc(line: Mapping[str, Any]) -> Document:
    if "query" in line:
        return _query(line, "\nAnswer:")
    choices = line.get("choices")
    if not isinstance(choices, Mapping):
        raise Malformed("the line has no field 'choices' with 'text' and 'label'")
    texts, labels, key = (
        _listed(choices, "text"),
        _listed(choices, "label"),
        _text(line, "answerKey"),
    )
    if len(labels) != len(texts) or key not in labels:
        raise Malformed(f"the line has 'answerKey'={key!r}; legal: one of the labels {labels}")
    question = f"Question: {_text(line, 'question')}\nAnswer:"
    return _choices(question, texts, labels.index(key))


def _without_marks(text: str) -> str:
    """Return a WikiHow text without its markup, cleaned as in lm-evaluation-harness."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(line: Mapping[str, Any]) -> Document:
    if "query" in line:
        return _query(line)
    beginning = f"{_text(line, 'ctx_a')} {_text(line, 'ctx_b').capitalize()}"
    query = _without_marks(f"{_text(line, 'activity_label')}: {beginning}")
    endings = _listed(line, "endings")
    gold = _index(line, "label", len(endings))
    return _choices(query, list(map(_without_marks, endings)), gold)


def _piqa(line: Mapping[str, Any]) -> Document:
    if "query" in line:
        return _query(line, "\nAnswer:")
    solutions = [_text(line, "sol1"), _text(line, "sol2")]
    question = f"Question: {_text(line, 'goal')}\nAnswer:"
    return _choices(question, solutions, _index(line, "label", 2))


def _winogrande(line: Mapping[str, Any]) -> Document:
    """Return a document with one (context, continuation) pair for each option that fills the gap.

    The context is the sentence up to the gap, followed by the option. The continuation is the rest
    of the sentence.
    """
    sentence, answer = _text(line, "sentence"), line.get("answer")
    prefix, blank, suffix = sentence.partition("_")
    if not blank:
        raise Malformed("the field 'sentence' has no '_', which marks the gap to fill")
    if str(answer) not in ("1", "2"):
        raise Malformed(f"the line has 'answer'={shown(answer)}; legal: '1' or '2'")
    beginnings = [prefix + _text(line, name) for name in ("option1", "option2")]
    continuation = f" {suffix.strip()}"
    return Document(tuple((b, continuation) for b in beginnings), int(answer) - 1)


def _lambada(line: Mapping[str, Any]) -> Document:
    if "continuation" in line:
        context, word = _text(line, "context"), _text(line, "continuation").strip()
    else:
        context, space, word = _text(line, "text").rpartition(" ")
        if not space:
            raise Malformed("the line has a 'text' of one word; legal: at least two words")
    return Document(((context, f" {word}"),))


_WIKITEXT = [
    (r"s '", "s'"),
    (r"/' [0-9]/", r"/'[0-9]/"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" \. ", ". "),
    (r" ! ", "! "),
    (r" \? ", "? "),
    (r" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (f" {chr(176)} ", chr(176)),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
]


def whole_text(text: str, ready: str | None = None) -> Document:
    """Return the document for scoring a whole text.

    Args:
      text: the text, whose words and bytes are counted.
      ready: the text after it was prepared for scoring; None means that `text` itself is scored.
    """
    pairs = (("", text if ready is None else ready),)
    return Document(pairs, words=len(re.split(r"\s+", text)), bytes=len(text.encode()))


def _wikitext(line: Mapping[str, Any]) -> Document:
    page = ready = _text(line, "page")
    for pattern, new in _WIKITEXT:
        ready = re.sub(pattern, new, ready)
    return whole_text(page, ready)


_QUERY = '"query", "choices" and "gold"'

TASKS = {
    task.name: task
    for task in [
        Task(
            "lambada_openai",
            "last_word",
            _lambada,
            '"text", or "context" and "continuation"',
            Hub("EleutherAI/lambada_openai", "default", "test"),
            papers={"perplexity": (61.34, 25.21)},
        ),
        Task(
            "lambada_standard",
            "last_word",
            _lambada,
            '"text", or "context" and "continuation"',
            Hub("cimec/lambada", None, "test"),
        ),
        Task(
            "arc_easy",
            "choices",
            _arc,
            f'"question", "choices" and "answerKey", or {_QUERY}',
            Hub("allenai/ai2_arc", "ARC-Easy", "test"),
            chance=0.25,
            papers={"acc": (0.443, 0.461)},
        ),
        Task(
            "arc_challenge",
            "choices",
            _arc,
            f'"question", "choices" and "answerKey", or {_QUERY}',
            Hub("allenai/ai2_arc", "ARC-Challenge", "test"),
            chance=0.25,
            papers={"acc": (0.197, 0.206)},
        ),
        Task(
            "hellaswag",
            "choices",
            _hellaswag,
            f'"activity_label", "ctx_a", "ctx_b", "endings" and "label", or {_QUERY}',
            Hub("Rowan/hellaswag", None, "validation"),
            chance=0.25,
            papers={"acc": (0.287, 0.305)},
        ),
        Task(
            "piqa",
            "choices",
            _piqa,
            f'"goal", "sol1", "sol2" and "label", or {_QUERY}',
            Hub("baber/piqa", None, "validation"),
            chance=0.5,
            papers={"acc": (0.619, 0.637)},
        ),
        Task(
            "winogrande",
            "choices",
            _winogrande,
            '"sentence", "option1", "option2" and "answer"',
            Hub("allenai/winogrande", "winogrande_xl", "validation"),
            chance=0.5,
            papers={"acc": (0.495, 0.525)},
        ),
        Task(
            "wikitext",
            "text",
            _wikitext,
            '"page"',
            Hub("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"),
            version=2.0,
        ),
    ]
}
