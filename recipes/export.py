"""Export a trained Llama-style model in the Hugging Face hub's format: config and safetensors.

    python -m recipes.export --workdir=runs/llama-153m --output=llama-153m-hub

The folder gets config.json and safetensors files. The format supports models with RMSNorm, RoPE,
SwiGLU and the standard residual (`llama-...` presets), and a few more kinds. For any other
model, the command stops with an error that names the unsupported config field. Other programs can
load the folder. The recipes train, generate and evaluate load it with --init_from.

With --kind=rmt_tpu, any model can be exported, for example one with a different residual. The
folder then also has PyTorch code, which the transformers library uses to load the model.
"""

from absl import flags

from recipes import interrupts, program
from rmt_tpu.errors import arguments_as_flags, flag_errors

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "run folder of recipes.train, local or gs://", required=True
)
_STEP = flags.DEFINE_integer(
    "step", None, "step of the checkpoint; the default is the last undamaged checkpoint"
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "new local folder for the exported model", required=True
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "dtype of the tensors"
)
_KIND = flags.DEFINE_enum(
    "kind",
    "hub",
    ["hub", "qwen3_5_moe_text", "rmt_tpu"],
    "model type in the folder's config.json; hub: the hub's type that fits the model; "
    "qwen3_5_moe_text: this type, for models that hub would export as qwen3_next; rmt_tpu: the "
    "project's own type, which fits any model, with PyTorch code in the folder",
)


@interrupts.terminated()
def main() -> int:
    """Write a run folder's model in the hub's format, and return 0."""
    from rmt_tpu.data import read_template
    from rmt_tpu.hub import own
    from rmt_tpu.hub.folder import export, new_folder
    from rmt_tpu.hub.models import is_hub
    from rmt_tpu.runs.loading import load_step
    from rmt_tpu.storage import open_folder

    with flag_errors("output"):
        new_folder(_OUTPUT.value)  # Report an illegal folder before the checkpoint is read.
    with arguments_as_flags():
        loaded = load_step(_WORKDIR.value, _STEP.value)
    folder, tokenizer = open_folder(_WORKDIR.value), loaded.tokenizer
    template = read_template(folder, tokenizer, starts=tokenizer.starts and not is_hub(folder))
    kind = None if _KIND.value == "hub" else _KIND.value
    options = {"max_length": loaded.seq_len, "dtype": _DTYPE.value, "kind": kind}
    with arguments_as_flags():
        export(loaded.decoder, tokenizer, _OUTPUT.value, template=template, **options)
    step = "" if loaded.step is None else f"step {loaded.step} of "
    print(f"exported {step}{_WORKDIR.value} to {_OUTPUT.value}")
    if kind == own.KIND and (line := own.without_code(loaded.decoder.config)):
        print(line)
    return 0


def run() -> None:
    """Run `main` as a program; `rmt-export` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
