"""An adapter that lets lm-evaluation-harness evaluate the models in run folders.

    from rmt_tpu.evaluation import harness

    args = {"workdir": "runs/a"}
    cache = harness.cache_path("cache", **args)
    lm_eval.simple_evaluate("rmt_tpu", args, tasks=["gsm8k"], use_cache=cache)

This module needs lm-evaluation-harness, which `pip install 'rmt_tpu[lm-eval]'` installs. The module
does not import torch itself.
"""

import hashlib
import inspect
import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from rmt_tpu.data.chat import TEMPLATE_FILE, ChatTemplate, read_template
from rmt_tpu.errors import UsageError, shown, unknown
from rmt_tpu.evaluation import subjects
from rmt_tpu.evaluation.documents import Source, Total, rolling
from rmt_tpu.evaluation.draws import request_sampling
from rmt_tpu.evaluation.scorer import BATCH_TOKENS, Request
from rmt_tpu.generation import complete
from rmt_tpu.hub.models import is_hub
from rmt_tpu.runs.loading import identity

_LOG = logging.getLogger("rmt_tpu")


MODEL = "rmt_tpu"


@register_model(MODEL)
class RmtTpu(TemplateLM):
    """A trained model that lm-eval can evaluate, from Python or from its command line.

    A model from a run folder gets the start token that it had in training, usually BOS. A model in
    the Hugging Face hub's format gets a start token only if its tokenizer adds one. Each answer is
    added to lm-eval's cache at once, so `use_cache` can resume an interrupted evaluation.

    Args:
      workdir: a run folder written by `recipes.train`, or a folder in the hub's format; either may
        be local or gs://.
      step: the step of the checkpoint; None means the last good checkpoint.
      mesh: the device mesh. On lm-eval's command line, where commas separate arguments, write `;`
        instead of the mesh's commas.
      max_length: the maximum number of tokens that are read at a time; None means the training
        length.
      batch_tokens: the number of tokens per batch, for each device over which rows are sharded.
      max_gen_toks: the maximum number of tokens of a generated text, unless the task sets it.
      batch_size: the number of texts that are generated at the same time; "auto" means 8.
      max_batch_size, device: arguments that lm-eval passes; they are ignored.

    Raises:
      UsageError: the run or the step does not exist.
    """

    def __init__(
        self,
        workdir: str,
        *,
        step: int | None = None,
        mesh: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        del max_batch_size, device
        subject = subjects.run_subject(
            workdir,
            step,
            mesh=mesh.replace(";", ",") if mesh else None,
            max_length=max_length,
            batch_tokens=batch_tokens,
        )
        self._tokenizer, self._scorer = subject.tokenizer, subject.scorer
        self._decoder, self._folder, self._limit = subject.decoder, subject.folder, subject.limit
        # The format is looked up once, because a folder on gs:// answers by requests.
        self._is_hub = is_hub(subject.folder)
        self._template: ChatTemplate | None = None
        if not self._tokenizer.starts:
            _LOG.warning(
                "texts are scored without a start token, because the model's tokenizer adds none"
            )
        self._max_gen_toks = max_gen_toks
        self._slots = int(batch_size) if str(batch_size).isdecimal() else 8

    @property
    def max_length(self) -> int:
        """The maximum number of tokens that are read at a time."""
        return self._scorer.max_length

    @property
    def max_gen_toks(self) -> int:
        """The maximum number of tokens of a generated text, unless the task sets it."""
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The first of the model's end tokens."""
        return self._tokenizer.ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token that starts a text."""
        return self._tokenizer.bos

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint; lm-eval uses it in the keys of cached prompts."""
        return self._tokenizer.fingerprint()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text without a start token, which `_with_start` adds later.

        After a chat template has been applied, names of special tokens in the text are encoded as
        these tokens.
        """
        del add_special_tokens, kwargs
        templated = self._template is not None
        encode = self._tokenizer.encode_special if templated else self._tokenizer.encode
        return encode(string).tolist()

    def _with_start(self, tokens: list[int]) -> np.ndarray:
        """Prepend the start token, if texts start with one and `tokens` does not have it yet.

        If a hub model's chat template wrote the text, nothing is prepended, as in transformers.
        """
        decided = self._template is not None and self._is_hub
        if tokens[:1] == [self.prefix_token_id] or (decided and tokens):
            return np.array(tokens, np.int32)
        return self._tokenizer.with_bos(tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the model's chat template, or None if lm-eval applies no template.

        Args:
          chat_template: lm-eval's option `apply_chat_template`.

        Raises:
          UsageError: the model has no chat template, or the option names a template.
        """
        if chat_template is False or chat_template is None:
            return None
        if chat_template is not True:
            raise UsageError(
                f"--apply_chat_template={chat_template} names a template, but a model has only "
                "one template; legal: --apply_chat_template without a name"
            )
        return self._own_template().json()["chat_template"]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Convert a conversation to text with the model's chat template.

        `tok_encode` treats all later texts as output of the template.

        Args:
          chat_history: the messages, each with a `role` and a `content`.
          add_generation_prompt: whether the text ends where the model's answer begins. Otherwise it
            ends with the last message, as in transformers, and the model continues that message.

        Raises:
          UsageError: the model has no chat template, or the template refuses the messages.
        """
        template = self._own_template()
        options = {"add_generation_prompt": add_generation_prompt}
        text = template.render(chat_history, **options)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        begin = text.rfind(last.strip())
        if begin < 0:
            raise UsageError(
                "the chat template changes the last message, so the model cannot continue it"
            )
        whole = last.lstrip()
        return text[: begin + len(whole if text.startswith(whole, begin) else last.strip())]

    def _own_template(self) -> ChatTemplate:
        if self._template is None:
            # This package's training puts a start token before every text.
            starts = not self._is_hub
            self._template = read_template(self._folder, self._tokenizer, starts=starts)
        if self._template is None:
            raise UsageError(
                f"--apply_chat_template needs a chat template, and {self._folder.url} has none; "
                f"legal: a folder with {TEMPLATE_FILE}, or with a chat_template in "
                "tokenizer_config.json"
            )
        return self._template

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        del disable_tqdm, kwargs
        scored_requests = []
        for _, context, continuation in requests:
            given = self._with_start(context), np.array(continuation, np.int32)
            scored_requests.append(Request(*given))
        return self.score(scored_requests, [strings for strings, _, _ in requests])

    def score(
        self, requests: list[Request], strings: list[tuple[str, str]]
    ) -> list[tuple[float, bool]]:
        """Return each request's log-likelihood, and whether greedy decoding gives the same text.

        `strings` has the context and the continuation of each request, which are keys of the
        harness's cache.
        """
        if not requests:
            return []
        # lm-evaluation-harness has one flag for all arguments of a model.
        self._scorer.check("the task", requests, "model_args max_length", self._limit)
        if cut := self._scorer.cut(requests):
            _LOG.warning(
                "%d of %d contexts exceed max_length=%d tokens; their beginnings are cut off",
                cut,
                len(requests),
                self.max_length,
            )
        totals: dict[int, tuple[float, bool]] = {}
        for batch in self._scorer.answers(requests):
            for number, answer in batch.items():
                totals[number] = tuple(Total.of(answer))
                self.cache_hook.add_partial("loglikelihood", strings[number], totals[number])
        return [totals[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each complete text.

        A long text is scored in windows of at most `max_length` tokens; each token is scored once.
        """
        del disable_tqdm
        scored_requests, owners = [], []
        for number, request in enumerate(requests):
            tokens = [self.prefix_token_id, *self.tok_encode(request.args[0])]
            windows = list(rolling(np.array(tokens, np.int32), self.max_length, self.max_length))
            scored_requests += windows
            owners += [number] * len(windows)
        totals = [0.0] * len(requests)
        for batch in self._scorer.answers(scored_requests):
            for number, answer in batch.items():
                totals[owners[number]] += Total.of(answer).log_probability
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Generate a text for each prompt, and cut it before the first stop string.

        The seed of a request is the `seed` in its arguments plus its index. Repeated requests
        therefore get different texts.

        Raises:
          UsageError: a request has an unsupported argument.
        """
        del disable_tqdm
        by_stops = defaultdict(list)
        for number, request in enumerate(requests):
            arguments = normalize_gen_kwargs(request.args[1], self._max_gen_toks)
            prompt = self._prompt(request.args[0], arguments["max_gen_toks"])
            asked = prompt, request_sampling(arguments, number)
            by_stops[tuple(filter(None, arguments["until"]))].append((number, asked))
        texts = [""] * len(requests)
        for stops, group in by_stops.items():
            prompts = [asked for _, asked in group]
            for completion in complete(
                self._decoder, self._tokenizer, prompts, stop=stops, slots=self._slots
            ):
                number = group[completion.number][0]
                texts[number] = completion.text
                self.cache_hook.add_partial(
                    "generate_until", requests[number].args, completion.text
                )
        return texts

    def _prompt(self, text: str, new_tokens: int) -> np.ndarray:
        """Return a prompt's tokens; cut off its beginning if the generated text would not fit.

        Only a model with learned positions has a maximum length.
        """
        learned = self._decoder.config.learned_positions
        tokens = self.tok_encode(text)
        if learned is not None and len(tokens) + new_tokens >= learned.max_length:
            tokens = tokens[-max(learned.max_length - 1 - new_tokens, 1) :]
        return self._with_start(tokens)


def check_arguments(model_args: Mapping[str, Any]) -> None:
    """Check the arguments of `RmtTpu` that are given as --model_args.

    Raises:
      UsageError: the argument `workdir` is missing, an argument is unknown, or the value of a
        number is none.
    """
    parameters = inspect.signature(RmtTpu).parameters
    if "workdir" not in model_args:
        raise UsageError(
            "--model_args needs workdir=FOLDER, a run folder or a folder in Hugging Face format"
        )
    for name, value in model_args.items():
        if name not in parameters:
            raise UsageError(unknown("--model_args", name, parameters))
        is_number = parameters[name].annotation in (int, int | None)
        if is_number and type(value) is not int and value != parameters[name].default:
            raise UsageError(f"--model_args {name}={shown(value)} must be a whole number")


def cache_path(path: str, workdir: str, step: int | None = None, **options: Any) -> str:
    """Return a path for lm-eval's argument `use_cache` that is unique to the model.

    Each model needs its own cache file, because the keys in lm-eval's cache do not name the model.

    Args:
      path: the prefix of the path, to which the checkpoint's identity is appended.
      workdir, step, options: the arguments of `RmtTpu`.

    Raises:
      ArgumentError: the folder has no run, or the run does not have this step.
    """
    step, weights = identity(workdir, step)
    model_key = json.dumps([weights, sorted(options.items())], default=str)
    return f"{path}-{step}-{hashlib.blake2b(model_key.encode(), digest_size=6).hexdigest()}"


def write_tasks(sources: list[Source], folder: Path) -> None:
    """Write task files for lm-evaluation-harness, so that it needs no network.

    Afterwards, `lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)` finds the
    tasks by their usual names.

    Args:
      sources: the tasks, with their documents.
      folder: the folder to which the files are written.

    Raises:
      UsageError: a source consists of texts, whose words lm-evaluation-harness counts differently.
    """
    for source in sources:
        if source.kind == "text":
            raise UsageError(
                f"--tasks={source.name} scores whole texts, which lm-evaluation-harness measures "
                "differently; legal: other tasks"
            )
        lines, fields = _in_fields(source)
        path = folder / f"{source.name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        task = {
            "task": source.name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
            "test_split": "test",
            "metadata": {"version": source.task.version},
            **fields,
        }
        # lm-eval expects YAML, and every JSON text is valid YAML.
        (folder / f"{source.name}.yaml").write_text(json.dumps(task), encoding="utf-8")


def _in_fields(source: Source) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a task's lines of data, and the fields of the task file that describe the lines."""
    metrics = lambda *names: {
        "metric_list": [
            {
                "metric": name,
                "aggregation": "perplexity" if name == "perplexity" else "mean",
                "higher_is_better": name != "perplexity",
            }
            for name in names
        ]
    }
    if source.kind == "last_word":
        lines = [
            {"context": context, "word": word}
            for ((context, word),) in (d.pairs for d in source.documents)
        ]
        return lines, {
            "output_type": "loglikelihood",
            "doc_to_text": "context",
            "doc_to_target": "word",
            **metrics("perplexity", "acc"),
        }
    # In a task without choice lengths, such as WinoGrande, all choices have the same continuation.
    if not source.documents[0].lengths:
        lines = [
            {"beginnings": [b for b, _ in d.pairs], "ending": d.pairs[0][1][1:], "gold": d.gold}
            for d in source.documents
        ]
        task_fields = {
            "doc_to_text": "gold",
            "doc_to_choice": "beginnings",
            "doc_to_target": "ending",
        }
        return lines, {"output_type": "multiple_choice", **task_fields, **metrics("acc")}
    lines = [
        {"context": d.pairs[0][0], "choices": [c[1:] for _, c in d.pairs], "gold": d.gold}
        for d in source.documents
    ]
    task_fields = {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "gold"}
    return lines, {"output_type": "multiple_choice", **task_fields, **metrics("acc", "acc_norm")}
