"""A dry run of training, which performs the same checks as `train` but does not train."""

import json

import sharding
from rmt_tpu import cost, data
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.execution.plan import plan_of
from rmt_tpu.runs import workdir
from rmt_tpu.storage import Folder
from rmt_tpu.training import depth_rate, freeze, memory_check
from rmt_tpu.training.evaluation import TaskMetrics
from rmt_tpu.training.remat_choice import Devices, keeps_products
from rmt_tpu.training.run import prepare, resolve_auto
from rmt_tpu.training.start import check_step, kept_values, read_text, warm_start_of


def dry_run(
    config: RunConfig,
    name: str,
    folder: Folder,
    *,
    change_config: bool | None = None,
    from_step: int | None = None,
) -> str:
    """Check a run as `train` would, and report its config and its sizes on these devices.

    Args:
      config: the run's config.
      name: the name of the run's model.
      folder: the run folder; nothing is written there.
      change_config: whether the config may differ from the one in the folder; see
        `runs.workdir.open_workdir`.
      from_step: the checkpoint to continue from; see `runs.workdir.step_to_go_back_to`.

    Returns:
      The config as JSON, followed by lines on parameters, FLOPs, memory, tokens and the execution
      plan.

    Raises:
      UsageError, MeshError: `train` would refuse the run. A changed freeze that is over is not
        found, because this needs the state in a checkpoint.
    """
    workdir.check_access(folder)
    resumed = kept_values(config, folder)
    may_keep = config.model.remat == "auto" and "model.remat" not in resumed
    config = resolve_auto(config, resumed, Devices.here())
    run = prepare(config, sharding.make_mesh(config.train.mesh))
    tokenizer = data.load_tokenizer(config.data.tokenizer)
    datasets = read_text(config, folder, tokenizer, warm_start_of(config, folder))
    TaskMetrics(run, config, tokenizer)
    workdir.check_workdir(folder, config, change_config=change_config, from_step=from_step)
    checkpoints = workdir.open_checkpoints(folder)
    if checkpoints.steps():
        check_step(config, folder, checkpoints.identity(from_step)[0])
    tokens = config.train.steps * config.train.batch_size * config.data.seq_len
    flops = cost.flops_per_token(config.model, config.data.seq_len)
    devices, bound = run.mesh.devices.flatten(), memory_check.lower_bound(config, run)
    lines = {
        "model": f"{name}, residual {config.model.residual_size:,}",
        "parameters": _parts(cost.parameters(config.model)),
        "FLOPs": f"{cost.train_flops(flops, tokens):.3g}, forward and backward; "
        f"{flops:.3g} per token forward",
        "devices": f"{len(devices)} {devices[0].device_kind}, {config.train.mesh}",
        "memory": f"{memory_check.describe(bound)}; for all, run recipes.preflight",
        "tokens": f"{tokens:,} in {config.train.steps:,} steps of {config.train.batch_size} x "
        f"{config.data.seq_len}; {_amount_of_data(config, datasets.train)}",
    }
    lines |= plan_of(config, run.mesh).lines()
    if may_keep and (keeps := keeps_products(config, Devices.here())) is not None:
        lines["auto keeps products"] = f"{'yes' if keeps.value else 'no'}: {keeps.reason}"
    if description := depth_rate.describe(config):
        lines["rates over depth"] = f"{description} (--set=train.depth_rate)"
    if description := freeze.describe(config.train, run.abstract.params):
        lines["frozen"] = description
    if error := memory_check.shortfall(config, run):
        lines["too large"] = error
    width = max(map(len, lines))
    summary = "\n".join(f"{what:<{width}}  {text}" for what, text in lines.items())
    return f"{json.dumps(overrides.to_json(config), indent=2)}\n\n{summary}"


def _amount_of_data(config: RunConfig, train: data.Windows | data.Mixture) -> str:
    """Return how many tokens the text has, or each mixed text, and how often it is read."""
    windows = config.train.steps * config.train.batch_size
    if isinstance(train, data.Windows):
        size, times = train.tokens_per_epoch, windows * train.seq_len / train.tokens_per_epoch
        return f"the data has {size:,}, each read {times:.2f} times"
    sizes = (text.windows.tokens_per_epoch for text in train.texts)
    rows = zip(train.names, train.shares, sizes, train.epochs(windows), strict=True)
    return "; ".join(
        f"{name}, a share of {share:.4g}, has {size:,}, each read {epochs:.2f} times"
        for name, share, size, epochs in rows
    )


def _parts(parts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {count:,}" for name, count in parts.items() if count)
    return f"{sum(parts.values()):,} ({listed})"
