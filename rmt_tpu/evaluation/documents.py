"""Functions that read the documents of tasks and texts and convert them to scoring requests."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rmt_tpu import data
from rmt_tpu.data.corpus import objects
from rmt_tpu.data.inputs import NoFile, Problem, digest_of, files, usage_errors
from rmt_tpu.errors import RunError, UsageError, one_line, unknown
from rmt_tpu.evaluation.metrics import Metric
from rmt_tpu.evaluation.scorer import Answer, Request
from rmt_tpu.evaluation.tasks import TASKS, Document, Kind, Malformed, Task, whole_text

HUB = "hub"
_ENDINGS = ("", ".gz", ".zst")


class Source(NamedTuple):
    """The documents on which a model is evaluated: the questions of one task, or a set of texts.

    Attributes:
      name: the name of the task; "text" for texts.
      kind: how the documents are scored; see `Task`.
      documents: the documents, in order.
      digest: an identifier of the documents' data and of how the documents are made from the data.
      task: the task; None for texts.
    """

    name: str
    kind: Kind
    documents: list[Document]
    digest: str
    task: Task | None = None


def find_tasks(names: Iterable[str], flag: str = "tasks") -> list[Task]:
    """Return the tasks with the given names.

    Args:
      names: the names of the tasks.
      flag: the command-line flag that set the names, for error messages.

    Raises:
      UsageError: a task does not exist, or is named twice.
    """
    names = list(names)
    for name in names:
        if name not in TASKS:
            raise UsageError(unknown(f"--{flag}", name, TASKS))
    if len(set(names)) < len(names):
        raise UsageError(f"--{flag}={','.join(names)} repeats a name; list each name only once")
    return [TASKS[name] for name in names]


def read_task(
    task: Task, data_dir: str, limit: int | None = None, flag: str = "data_dir"
) -> Source:
    """Read the documents of a task.

    Args:
      task: the task.
      data_dir: a local or gs:// folder with `<task>.jsonl`, `<task>.jsonl.gz` or
        `<task>.jsonl.zst`; or "hub".
      limit: read only the first `limit` documents; None reads all.
      flag: the command-line flag that set the folder, for error messages.

    Raises:
      UsageError: the folder has no file for the task, or a line of the file is not valid data for
        the task.
      RunError: the hub does not provide the data.
    """
    if data_dir == HUB:
        digest, lines = f"hub/{'/'.join(map(str, task.hub))}", _from_hub(task, flag)
    else:
        with usage_errors(flag, data_dir):
            span = _find(task, data_dir)
            digest, lines = digest_of(span), objects(span)
    documents = []
    with usage_errors(flag, data_dir):
        for location, line in itertools.islice(lines, limit):
            try:
                documents.append(task.document(line))
            except Malformed as error:
                raise Problem(f"{location}: {error}; legal: {task.fields}") from None
        if not documents:
            raise Problem(f"{task.name} has no documents; legal: a file with at least one line")
    return Source(task.name, task.kind, documents, f"{digest}/{task.version}/{limit}", task)


def available_tasks(names: Iterable[str], data_dir: str) -> list[str]:
    """Return the given tasks for which a folder has a data file.

    If `data_dir` is "hub", it means the Hugging Face hub, which has data for all tasks.

    Raises:
      UsageError: the folder has data for none of the tasks, or cannot be read.
    """
    names = list(names)
    if data_dir == HUB:
        return names
    available = []
    for task in find_tasks(names):
        with usage_errors("data_dir", data_dir), contextlib.suppress(NoFile):
            _find(task, data_dir)
            available.append(task.name)
    if not available:
        raise UsageError(
            f"--data_dir={data_dir!r} has no data for {', '.join(names)}; legal: a folder with "
            f"<task>.jsonl for at least one task, or {HUB}"
        )
    return available


def _find(task: Task, data_dir: str):
    base = f"{data_dir.rstrip('/')}/{task.name}.jsonl"
    for ending in _ENDINGS:
        with contextlib.suppress(NoFile):
            return files(base + ending)[0]
    raise NoFile(
        f"the folder has no {task.name}.jsonl (.gz or .zst); legal: a folder with this file, or "
        f"{HUB}"
    )


def _from_hub(task: Task, flag: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"--{flag}={HUB} needs the package datasets: pip install 'rmt_tpu[lm-eval]'; a "
            "folder of files does not need it"
        ) from None
    path, name, split = task.hub
    try:
        dataset = datasets.load_dataset(path, name, split=split)
    # Catch all errors, because several libraries raise their own, for example without a network.
    except Exception as error:
        raise RunError(
            f"--{flag}={HUB}: {path} cannot be loaded: {one_line(error)[:200]}; a folder of "
            "files needs no network"
        ) from None
    return ((f"{path} {split} {number}", line) for number, line in enumerate(dataset))


def read_texts(source: str, tokenizer: data.Tokenizer, model: str = "the model") -> Source:
    """Read the texts that the flag `--text` selects.

    Args:
      source: text files and globs, as for the `--data` flag of training, or a token store, whose
        held-out documents are read.
      tokenizer: the tokenizer of the model.
      model: a description of the model, for error messages.

    Raises:
      UsageError: there is no text, or the token store was made with a different tokenizer, or of
        documents in which only parts have a loss.
    """
    if data.is_store(source):
        store = data.open_store(source, "text")
        if not store.has_tokenizer(tokenizer):
            raise UsageError(
                f"--text={source} was made with the tokenizer {store.tokenizer.name} "
                f"({store.tokenizer.vocab_size} tokens), but {model} has {tokenizer.name} "
                f"({tokenizer.vocab_size} tokens); legal: text files, or a store of that tokenizer"
            )
        if store.has_marks:
            # Their texts lack the special tokens, and prompts would count like answers.
            raise UsageError(
                f"--text={source} is a token store of conversations or completions, of which only "
                "answers have a loss; legal: a token store of whole texts, or text files"
            )
        held_out = store.held_out
        texts = [
            tokenizer.decode(held_out.document(number)) for number in range(held_out.num_documents)
        ]
        if not texts:
            raise UsageError(
                f"--text={source} has no held-out documents; legal: text files, or a token store "
                "with a held-out part"
            )
    else:
        texts = data.documents(source, "text")
    digest = hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
    return Source("text", "text", [whole_text(text) for text in texts], digest)


# Making requests -----------------------------------------------------------------------------


class SourceRequests(NamedTuple):
    """The scoring requests for all documents of one source.

    Attributes:
      source: the source.
      requests: the requests, in the order of the documents.
      owners: for each request, the index of the document that it belongs to.
    """

    source: Source
    requests: list[Request]
    owners: np.ndarray


def ask(
    source: Source,
    tokenizer: data.Tokenizer,
    max_length: int,
    stride: int | None,
    flag: str = "tasks",
    model: str = "the model",
) -> SourceRequests:
    """Return the scoring requests of all documents of a source.

    A context gets a start token if the tokenizer puts one before texts. As in
    lm-evaluation-harness, at least one token precedes the scored tokens. It is the start token if a
    context is empty, and always in texts of --text.

    A context and its continuation are encoded together, as in lm-evaluation-harness. Spaces at the
    end of the context are moved to the continuation first.

    Args:
      source: the documents.
      tokenizer: the tokenizer of the model.
      max_length: the maximum number of tokens that the model reads at a time.
      stride: the number of tokens that each window over a text scores. The rest of a window is
        context. The first window scores all its tokens. None means `max_length`.
      flag: the command-line flag that set the task, for error messages.
      model: the name of the model, for error messages.

    Raises:
      UsageError: a text cannot be encoded or has no token to score, or `check_stride` refuses the
        stride.
    """
    asked = "--text" if source.task is None else f"--{flag}={source.name}"
    if source.kind == "text":
        check_stride(stride, max_length, model)
        bos = np.array([tokenizer.bos], np.int32)
        encoded = tokenizer.encode_all([document.pairs[0][1] for document in source.documents])
        windows = [
            (request, number)
            for number, tokens in enumerate(encoded)
            for request in rolling(np.concatenate([bos, tokens]), max_length, stride or max_length)
        ]
        requests, owners = [w[0] for w in windows], [w[1] for w in windows]
        if not requests:
            raise UsageError(f"{asked} has no tokens to score; legal: texts that are not empty")
        return SourceRequests(source, requests, np.array(owners))
    pairs = [
        _strip_context(context, continuation)
        for document in source.documents
        for context, continuation in document.pairs
    ]
    owners = np.repeat(
        np.arange(len(source.documents)), [len(document.pairs) for document in source.documents]
    )
    contexts = list(dict.fromkeys(context for context, _ in pairs))
    context_tokens = dict(zip(contexts, tokenizer.encode_all(contexts), strict=True))
    texts = tokenizer.encode_all([context + continuation for context, continuation in pairs])
    requests = []
    for (context, continuation), text in zip(pairs, texts, strict=True):
        prefix = len(context_tokens[context])
        if len(text) <= prefix:
            raise UsageError(
                f"{asked}: with this tokenizer, the continuation "
                f"{continuation!r:.80} adds no token to its context"
            )
        requests.append(Request(tokenizer.with_bos(text[:prefix]), text[prefix:]))
    return SourceRequests(source, requests, owners)


def check_stride(stride: int | None, max_length: int, model: str) -> None:
    """Check that the windows over a text can contain the tokens that they score.

    Args:
      stride: the number of tokens that each window scores; None means `max_length`.
      max_length: the maximum number of tokens that the model reads at a time.
      model: the name of the model, for the error message.

    Raises:
      UsageError: the stride exceeds `max_length`.
    """
    if stride is not None and stride > max_length:
        raise UsageError(
            f"--stride={stride} is more than the {max_length} tokens that {model} reads at once "
            f"(--max_length); legal: 1 to {max_length}"
        )


def _strip_context(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def rolling(tokens: np.ndarray, max_length: int, stride: int) -> Iterator[Request]:
    """Yield windows over a text. Each token except the first is scored exactly once.

    Each window has at most `max_length` input tokens. The first window scores all its tokens. Each
    later window scores the next `stride` tokens, at most `max_length`, after as many tokens of
    context as fit. With a stride of `max_length`, the windows equal the windows of
    lm-evaluation-harness.
    """
    stop = min(len(tokens), max_length + 1)
    if stop > 1:
        yield Request(tokens[:1], tokens[1:stop])
    while stop < len(tokens):
        scored = min(stride, len(tokens) - stop)
        stop += scored
        start = max(stop - max_length - 1, 0)
        yield Request(tokens[start : stop - scored], tokens[stop - scored : stop])


# Computing metrics from answers --------------------------------------------------------------


class Total(NamedTuple):
    """The total log-probability of a continuation, and whether each token is the likeliest."""

    log_probability: float
    greedy: bool

    @classmethod
    def of(cls, answer: Answer) -> "Total":
        """Return the sum of an answer's log-probabilities, and whether each token is the likeliest.

        The sum is computed in float64.
        """
        return cls(
            float(np.sum(answer.log_probabilities, dtype=np.float64)), bool(answer.greedy.all())
        )


def _text_metrics(source_requests: SourceRequests, nats: np.ndarray) -> list[Metric]:
    """Return the texts' perplexities per word, byte and token, and their bits per byte.

    If there is only one text, its windows are treated as documents, so that a standard error can be
    computed.

    Args:
      source_requests: the requests, which are windows over the texts.
      nats: the negative log-probability of each window.
    """
    documents = source_requests.source.documents
    lengths = np.array([len(request.continuation) for request in source_requests.requests], float)
    if len(documents) == 1:
        shares = lengths / lengths.sum()
        words, sizes = documents[0].words * shares, documents[0].bytes * shares
    else:
        nats, lengths = (
            np.bincount(source_requests.owners, x, len(documents)) for x in (nats, lengths)
        )
        words, sizes = (
            np.array([getattr(d, name) for d in documents], float) for name in ("words", "bytes")
        )
    return [
        Metric("word_perplexity", "word", "perplexity", nats, words),
        Metric("byte_perplexity", "byte", "perplexity", nats, sizes),
        Metric("bits_per_byte", "byte", "bits", nats, sizes),
        Metric("token_perplexity", "token", "perplexity", nats, lengths),
    ]


def metrics(source_requests: SourceRequests, totals: list[Total]) -> list[Metric]:
    """Return the metrics of a source, defined as in lm-evaluation-harness.

    A task with choices also gets the bits per byte of the right choice. This metric shows
    differences between small models whose choices are no better than chance.

    Args:
      source_requests: the requests of the source.
      totals: the answer to each request, summed over tokens.
    """
    documents, kind = source_requests.source.documents, source_requests.source.kind
    logs = np.array([total.log_probability for total in totals])
    greedy = np.array([total.greedy for total in totals], float)
    ones = np.ones(len(documents))
    mean = lambda name, values: Metric(name, "document", "share", np.array(values, float), ones)
    if kind == "last_word":
        return [
            Metric("perplexity", "word", "perplexity", -logs, ones),
            mean("acc", greedy),
        ]
    if kind == "text":
        return _text_metrics(source_requests, -logs)
    document_logs = np.split(logs, np.flatnonzero(np.diff(source_requests.owners)) + 1)
    right, right_by_length, gold, sizes = [], [], [], []
    for document, choice_logs in zip(documents, document_logs, strict=True):
        right.append(np.argmax(choice_logs) == document.gold)
        gold.append(-choice_logs[document.gold])
        sizes.append(len(document.pairs[document.gold][1].encode()))
        if document.lengths:
            per_character = choice_logs / np.array(document.lengths)
            right_by_length.append(np.argmax(per_character) == document.gold)
    accuracies = [mean("acc", right)]
    if right_by_length:
        accuracies.append(mean("acc_norm", right_by_length))
    bits = Metric("gold_bits_per_byte", "byte", "bits", np.array(gold), np.array(sizes, float))
    return [*accuracies, bits]
