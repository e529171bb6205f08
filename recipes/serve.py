"""Serve a trained decoder over HTTP, with OpenAI's API for completions and chats.

    python -m recipes.serve --workdir=runs/rmt-tiny

The first printed line is the base URL for clients. After SIGTERM or Ctrl-C, open requests are
finished before the server stops.
"""

import sys

from absl import flags

from recipes import program, trained
from rmt_tpu import memory
from rmt_tpu.errors import UsageError, about_flag, arguments_as_flags

_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "a run folder written by recipes.train, or a folder in Hugging Face format; either may be "
    "local or gs://",
    required=True,
)
_STEP = flags.DEFINE_integer(
    "step", None, "step of the checkpoint; the default is the last undamaged checkpoint"
)
trained.define_mesh_flag()
_CHAT_TEMPLATE = flags.DEFINE_string(
    "chat_template",
    None,
    "file with the Jinja template of chats; the default is chat_template.jinja or "
    "tokenizer_config.json in the model's folder",
)
_NAME = flags.DEFINE_string(
    "name", None, "model name for clients; the default is the folder's name"
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "address to listen on; there is no authentication")
_PORT = flags.DEFINE_integer(
    "port", 8000, "port to listen on; 0 means any free port", lower_bound=0, upper_bound=2**16 - 1
)
_SLOTS = flags.DEFINE_integer(
    "slots", 8, "number of texts to generate at the same time", lower_bound=1
)
_QUEUE = flags.DEFINE_integer(
    "queue", 64, "maximum number of texts that wait for a slot", lower_bound=0
)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    2048,
    "maximum number of tokens that the model reads for one text: the prompt, with its start token, "
    "and all new tokens but the last; at most the number of learned positions, if there are any",
    lower_bound=1,
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens",
    2048,
    "maximum number of tokens to generate per text",
    lower_bound=1,
    upper_bound=2**20,
)
_MAX_BODY = flags.DEFINE_integer(
    "max_body", 2**22, "maximum size of a request in bytes", lower_bound=1
)
_MAX_CONNECTIONS = flags.DEFINE_integer(
    "max_connections",
    1000,
    "maximum number of connections; requests on further connections are answered with 503",
    lower_bound=1,
    upper_bound=2**16,
)
_DRAIN_SECONDS = flags.DEFINE_float(
    "drain_seconds",
    60,
    "seconds after SIGTERM within which open requests must finish",
    lower_bound=0,
)
_COMPILE_FIRST = flags.DEFINE_bool(
    "compile_first", False, "compile the programs for all lengths before the first request"
)
_LOG_REQUESTS = flags.DEFINE_bool("log_requests", False, "print a line for each request")

# The server checks for new requests and closed connections after this number of decode steps.
_STEPS = 4


def main() -> int:
    """Serve the model in --workdir until a signal stops the server, and return 0."""
    trained.check_mesh()
    from rmt_tpu.data.tokenizer import utf8
    from rmt_tpu.serving import address

    with about_flag("name", "the text has"):
        utf8(_NAME.value or "")

    with address.bind(_HOST.value, _PORT.value) as opened:
        try:
            from rmt_tpu.serving import server
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
                raise
            raise UsageError(
                "serving needs starlette and uvicorn: pip install 'rmt_tpu[serve]'"
            ) from None
        front = _front()
        url = address.listen(opened)
        if not address.is_loopback(opened):
            print(
                f"note: --host={_HOST.value} can be reached from other machines, and there is no "
                "authentication",
                file=sys.stderr,
            )
        ready = lambda: print(f"{url}/v1", flush=True)
        limits = {"drain_seconds": _DRAIN_SECONDS.value, "max_connections": _MAX_CONNECTIONS.value}
        server.serve(front, opened, ready=ready, **limits)
    return 0


def _front():
    """Load the model, compile its first programs, and return the front end that answers requests.

    With --compile_first, the programs for all lengths are compiled.
    """
    import rmt_tpu
    from rmt_tpu.generation import Engine, cast_once
    from rmt_tpu.serving.app import Front
    from rmt_tpu.serving.protocol import ServedModel
    from rmt_tpu.serving.worker import Worker
    from rmt_tpu.storage import open_folder

    trained.check_rows("slots", _SLOTS.value)
    with arguments_as_flags():
        decoder, tokenizer = rmt_tpu.load(_WORKDIR.value, _STEP.value, mesh=flags.FLAGS.mesh)
    template = _template(tokenizer)
    trained.note_missing_start(tokenizer)
    learned = decoder.config.learned_positions
    longest = _MAX_LENGTH.value
    if learned is not None:
        longest = min(longest, learned.max_length)
    with memory.report_out_of_memory("use fewer --slots or a smaller --max_length"):
        text_ids = {"text_vocab_size": tokenizer.vocab_size, "gaps": tokenizer.gaps}
        options = text_ids | {"slots": _SLOTS.value, "steps": _STEPS}
        engine = Engine(cast_once(decoder), tokenizer.ends, **options)
        first = _COMPILE_FIRST.value
        engine.compile(longest if first else 1, scored=first, adjusted=first)
    served = ServedModel(
        name=_NAME.value or open_folder(_WORKDIR.value).name,
        tokenizer=tokenizer,
        max_length=longest,
        max_tokens=_MAX_TOKENS.value,
        max_texts=_SLOTS.value + _QUEUE.value,
        vocab_size=decoder.config.vocab_size,
        template=template,
    )
    worker = Worker(engine, tokenizer)
    return Front(worker, served, max_body=_MAX_BODY.value, log=_LOG_REQUESTS.value)


def _template(tokenizer):
    """Check the chat template of the model, and return it, or None if there is none."""
    from rmt_tpu.data import read_template
    from rmt_tpu.hub.models import is_hub
    from rmt_tpu.storage import open_folder

    folder, file = open_folder(_WORKDIR.value), _CHAT_TEMPLATE.value
    # A run trains with a start token before every text. The exception is a run that started from
    # the weights of a model without start tokens.
    starts = tokenizer.starts and not is_hub(folder)
    with about_flag("chat_template", file or "\0"):
        template = read_template(folder, tokenizer, file=file, starts=starts)
        if template is not None and template.installed():
            template.check()
    return template


def run() -> None:
    """Run `main` as a program; `rmt-serve` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
