"""The train step of MaxText for the model of a run, compiled for TPUs that need not be present.

MaxText (https://github.com/AI-Hypercomputer/maxtext) trains Transformers with JAX. Its
`train_compile` program compiles its train step for a topology; `lower` here does the same with the
devices that it is given. MaxText is imported only by `lower`, in the process that compiles.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from rmt_tpu.analysis.prompt import sizes_of
from rmt_tpu.config import RunConfig
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.models import config_values
from rmt_tpu.training import compiler_options

VERSION = "0.2.5"  # The version whose interfaces `lower` uses.

# The blocks of MaxText's attention kernels: of queries and keys in the forward pass, in the kernel
# of the gradients of keys and values, and in the kernel of the gradient of queries.
_BLOCKS = {
    "fwd": ("sa_block_q", "sa_block_kv"),
    "dkv": ("sa_block_q_dkv", "sa_block_kv_dkv"),
    "dq": ("sa_block_q_dq", "sa_block_kv_dq"),
}
_DEFAULT_BLOCK = 512
_1024 = {name: 1024 for names in _BLOCKS.values() for name in names}
# Maps the name of each setting of MaxText's attention kernels to its config values. "default" has
# blocks of 512. "script" has the blocks of MaxText's script for v6e. "fused" computes all gradients
# in one kernel.
ATTENTION: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "script": {"sa_block_q": 1024, "sa_block_q_dkv": 2048, "sa_block_q_dq": 2048},
        "1024": _1024,
        "1024 fused": _1024 | {"sa_use_fused_bwd_kernel": True},
    }
)
# MaxText's policies of rematerialization that the sweep tries. "minimal_with_context" saves every
# product and attention's result, "save_dot_with_context_except_mlp" all of these but the
# feed-forward layer's, and "full" only the input of each layer.
REMAT = "minimal_with_context", "save_dot_with_context_except_mlp", "full"
# Maps the name of each form of a layer's weights to its config values. "joined" has one matrix for
# queries, keys and values, and stacks layers along the first axis of each weight.
WEIGHTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"default": {}, "joined": {"fused_qkv": True, "param_scan_axis": 0}}
)

# The compiler options that MaxText's own scripts set for Llama 2 7B on each chip. The scripts fuse
# collectives with other work on all chips, but libtpu 0.0.50 supports this only on v5e.
_OVERLAP = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
_FUSED = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
}
_DATA_PARALLEL = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "v5e": _OVERLAP | _FUSED | _DATA_PARALLEL,
        "v5p": _OVERLAP
        | _DATA_PARALLEL
        | {
            "xla_tpu_megacore_fusion_allow_ags": False,
            "xla_enable_async_collective_permute": True,
            "xla_tpu_enable_ag_backward_pipelining": True,
        },
        "v6e": _OVERLAP | {"xla_tpu_scoped_vmem_limit_kib": 98304},
    }
)


@dataclasses.dataclass(frozen=True)
class WithOptions:
    """A lowered program that is compiled with these compiler options.

    Attributes:
      lowered: the lowered program.
      options: maps the names of compiler options to their values.
    """

    lowered: jax.stages.Lowered
    options: Mapping[str, Any]

    def compile(self) -> jax.stages.Compiled:
        """Compile the program."""
        return self.lowered.compile(compiler_options=dict(self.options) or None)


def computed_share(kernel: str, attention: str, seq_len: int) -> float:
    """Return the share of its grid's steps in which an attention kernel computes anything.

    The grid has a step for each pair of a block of queries and a block of keys. In a step without
    a key that some query may attend to, the kernel skips the computation. The schedule of a kernel
    does not show this.

    Args:
      kernel: the name of the kernel's instruction.
      attention: the name of the setting, one of ATTENTION.
      seq_len: the number of tokens per sequence.
    """
    (names,) = (names for name, names in _BLOCKS.items() if f"_{name}_" in kernel)
    sizes = (ATTENTION[attention].get(name, _DEFAULT_BLOCK) for name in names)
    queries, keys = (min(size, seq_len) for size in sizes)
    ends = range(queries, seq_len + 1, queries)
    return sum(-(-end // keys) for end in ends) / (len(ends) * (seq_len // keys))


def overrides_of(
    config: RunConfig, devices: int, attention: str, remat: str, weights: str = "default"
) -> dict[str, Any]:
    """Return the MaxText config values with which MaxText trains the model of a run.

    The batch is divided over all devices, as the parameters and the optimizer's state are (FSDP).

    Args:
      config: the run's config.
      devices: the number of devices.
      attention: the name of a setting of the attention kernels, one of ATTENTION.
      remat: the name of a policy, one of REMAT.
      weights: the name of a form of the weights, one of WEIGHTS.

    Raises:
      UsageError: the model is not a Llama.
    """
    optimizer = config.train.optimizer
    return _sizes_of(config) | {
        "run_name": "peer",
        "base_output_directory": "/tmp",  # MaxText needs a value, and writes nothing here.
        "hardware": "tpu",
        "internal_compile": True,
        "internal_compile_num_devices": devices,
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "per_device_batch_size": config.train.batch_size / devices,
        "max_target_length": config.data.seq_len,
        "adam_b1": optimizer.b1,
        "adam_b2": optimizer.b2,
        "adam_eps": optimizer.epsilon,
        "adam_weight_decay": optimizer.weight_decay,
        "mu_dtype": optimizer.moment_dtype,
        "gradient_clipping_threshold": optimizer.clip_norm,
        "z_loss_multiplier": config.train.z_loss,
        "steps": config.train.steps,
        "attention": "flash",
        "remat_policy": remat,
        **ATTENTION[attention],
        **WEIGHTS[weights],
    }


def _sizes_of(config: RunConfig) -> dict[str, Any]:
    """Return those config values that describe the model.

    Raises:
      UsageError: the model is not a Llama.
    """
    try:
        # The fields of a Llama's config.json in transformers, which MaxText's Llamas have, too.
        values = config_values(
            config.model, max_length=config.data.seq_len, bos=0, ends=(0,), kind="llama"
        )
    except UsageError:
        values = None
    if values is None or values["attention_bias"] or values["rope_scaling"]:
        raise UsageError(
            "the model is not a Llama, and only Llamas are compared with MaxText; legal: models "
            "like llama-374m, with RMSNorm, RoPE, SwiGLU, a plain sum and no biases"
        )
    return {
        "decoder_block": "llama2",
        "base_emb_dim": values["hidden_size"],
        "base_num_decoder_layers": values["num_hidden_layers"],
        "base_num_query_heads": values["num_attention_heads"],
        "base_num_kv_heads": values["num_key_value_heads"],
        "head_dim": values["head_dim"],
        "base_mlp_dim": values["intermediate_size"],
        "vocab_size": values["vocab_size"],
        "normalization_layer_epsilon": values["rms_norm_eps"],
        "rope_max_timescale": int(values["rope_theta"]),
        "logits_via_embedding": values["tie_word_embeddings"],
        "enable_dropout": False,
        "dtype": "bfloat16",
        "weight_dtype": "float32",
    }


def lower(
    devices: Sequence[jax.Device],
    overrides: Mapping[str, Any],
    options: Mapping[str, Any],
    with_ours: bool,
) -> tuple[WithOptions, dict[str, Any]]:
    """Lower MaxText's train step for all devices of a topology, so that it can be compiled.

    Args:
      devices: the devices, which need not be present.
      overrides: MaxText config values, from `overrides_of`.
      options: the compiler options.
      with_ours: whether to add the compiler options of our own train steps.

    Returns:
      The lowered step, and the result of `sizes_of` for its mesh.
    """
    import maxtext
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    # MaxText's own programs set this, too; its dropout keys then cost nothing.
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    values = (f"{name}={value}" for name, value in overrides.items())
    config = pyconfig.initialize(["train_compile", base, *values])
    jax.config.update(
        "jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type
    )
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes)
    args, kwargs, state_shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    of_params, state_shardings = sharding.maybe_update_params_sharding_with_opt(
        config, state_shardings
    )
    step, placed, results, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step,
        sharding.get_input_data_sharding(config, mesh),
        sharding.build_zero1_input_state_mesh_shardings(config, state_shardings, of_params),
        model,
        config,
        of_params,
    )
    jitted = jax.jit(
        step,
        in_shardings=placed,
        out_shardings=results,
        static_argnums=static,
        donate_argnums=donated,
    )
    if with_ours:
        options = dict(options) | (compiler_options.for_step(mesh) or {})
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        return WithOptions(jitted.lower(*args, **kwargs), options), sizes_of(mesh)
