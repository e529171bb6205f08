"""Check whether a run fits on a pod, and estimate the time of a step there, without the pod.

    python -m recipes.preflight --preset=rmt-305m --topology=v5e:16x16 --mesh=data=-1 \\
        --batch_size=1024

The command takes the flags of recipes.train, and compiles the train step for all devices of a
topology, which need not be present. It reports whether the step fits in memory, what occupies the
memory, what the devices send to each other, and an estimate of the step's time. If the step does
not fit, the report says what to change, and the exit code is 1. It is also 1 if the compiler is not
installed or fails, and 2 if the command is wrong. As in recipes.train, --tokenizer (by default
`byte`) sets the size of the vocabulary, unless --set=model.vocab_size sets it.

    python -m recipes.preflight --preset=llama-attnres-1.2b --topology=v5e:2x4 --mesh=tensor=8 \\
        --prompt=131072

recipes.generate reads a long prompt in parts. With --prompt, the command compiles the program that
reads one part of a prompt of this length. With both --prompt and --decode=32, it compiles a decode
step for 32 rows of this length.

With --num_slices, several slices are connected by the data center's network. They are laid out
along the mesh axis data, stage or fsdp, and the traffic between them is reported separately.

The topologies v5e:AxB, v5p:AxBxC, v6e:AxB and tpu7x:AxBxC need the TPU compiler (`pip install
'jax[tpu]'`). GPUs, such as h100:N, need jax's CUDA plugin, and their report has memory
and collectives but no time.
"""

import json
import sys

from absl import flags

from recipes import common, effects, local, program
from rmt_tpu.errors import RunError, UsageError

common.define_model_flags()
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "kind and layout of the devices, like v5e:16x16, v5p:4x4x8 or h100:8"
)
_SLICES = flags.DEFINE_integer(
    "num_slices",
    1,
    "number of slices of this topology, linked by the data center's network",
    lower_bound=1,
)
_JSON = flags.DEFINE_string(
    "json", None, "file for all numbers as JSON; - prints only this JSON, to standard output"
)
_OUTPUT = flags.DEFINE_string("output", None, "folder for preflight.json and preflight.png")
_BUFFERS = flags.DEFINE_integer(
    "buffers", 12, "number of buffers to list, largest first", lower_bound=1
)
_PROMPT = flags.DEFINE_integer(
    "prompt",
    None,
    "compile the chunked prefill of a prompt instead of a train step, for a prompt with this "
    "number of tokens",
    lower_bound=1,
    upper_bound=2**30,
)
_PART = flags.DEFINE_integer(
    "part",
    None,
    "number of tokens of --prompt to read at a time; the default is 2048, as in recipes.generate",
    lower_bound=1,
)
_DECODE = flags.DEFINE_integer(
    "decode",
    None,
    "compile a decode step instead of a train step, for this many rows; --prompt sets the number "
    "of tokens in each row",
    lower_bound=1,
)
common.define_run_flags()


def main() -> int:
    """Compile a run's program for a pod, print a report, and return 0 if it fits, otherwise 1."""
    name, base = common.selected_config()
    config = common.run_config(base)
    effects.check_effects(config)
    if config.train.init_from:
        from rmt_tpu.runs.warm_start import WarmStart

        # This check raises an error if the parameters' shapes differ.
        WarmStart(config.train.init_from, config.model)
    from rmt_tpu.analysis.preflight import preflight
    from rmt_tpu.analysis.preflight_advice import advice
    from rmt_tpu.analysis.preflight_report import draw_memory, report_text
    from rmt_tpu.analysis.prompt import Prompt
    from rmt_tpu.estimator import CompilerError, parse_topology, versions
    from rmt_tpu.generation.engine import PART

    try:
        target = parse_topology(_TOPOLOGY.value or "", _SLICES.value)
    except ValueError as value_and_reason:
        if _TOPOLOGY.value is None:
            legal = str(value_and_reason).partition("legal: ")[2]
            raise UsageError(f"--topology is needed; legal: {legal}") from None
        raise UsageError(f"--topology={value_and_reason}") from None
    if _PART.value is not None and _PROMPT.value is None:
        raise UsageError(f"--part={_PART.value} needs --prompt")
    if _DECODE.value is not None and (_PROMPT.value is None or _PART.value is not None):
        raise UsageError(f"--decode={_DECODE.value} needs --prompt, and cannot be used with --part")
    prompt = None
    if _PROMPT.value is not None:
        if (_PART.value or 1) > _PROMPT.value:
            raise UsageError(
                f"--part={_PART.value} is more than --prompt={_PROMPT.value}; legal: up to "
                f"{_PROMPT.value}"
            )
        part = min(_PART.value or PART, _PROMPT.value)
        prompt = Prompt(_PROMPT.value, part, _DECODE.value)
        prompt.check(config.model)
    # Compiling takes minutes, so report a file that cannot be written first.
    folder = None if _OUTPUT.value is None else local.folder("output", _OUTPUT.value)
    file = None if _JSON.value in (None, "-") else local.file("json", _JSON.value)
    print(f"compiling {name} for {target.label}, which may take minutes", file=sys.stderr)
    try:
        report = preflight(config, target, prompt=prompt)
    except CompilerError as error:
        raise RunError(str(error)) from None
    values = report.json() | {
        "advice": [vars(step) for step in advice(report)] if not report.fits else [],
        "versions": versions(),
    }
    content = json.dumps(values, indent=1) + "\n"
    if _JSON.value == "-":
        print(content, end="")
    else:
        used = versions() if target.platform == "tpu" else {"jax": versions()["jax"]}
        version_text = ", ".join(f"{package} {version}" for package, version in used.items())
        print(report_text(report, name, _BUFFERS.value))
        print(f"{version_text}; compiled for {target.label}, not measured on a device")
    if file is not None:
        with local.writing("json", _JSON.value):
            file.write_text(content, encoding="utf-8")
    if folder is not None:
        with local.writing("output", _OUTPUT.value):
            (folder / "preflight.json").write_text(content, encoding="utf-8")
            draw_memory(report, folder / "preflight.png", name)
    return 0 if report.fits else 1


def run() -> None:
    """Run `main` as a program; `rmt-preflight` calls this function."""
    program.start(main, only_printed=True)


if __name__ == "__main__":
    run()
