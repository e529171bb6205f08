"""The catalog of all experiments. Most of them repeat a table or a figure of a paper."""

from rmt_tpu import cost
from rmt_tpu.config import presets
from rmt_tpu.errors import UsageError, unknown
from rmt_tpu.experiments import counts, depth, moments, plan, residual_size, trained, wide_residuals
from rmt_tpu.experiments.plan import Experiment, Plan, Scale
from rmt_tpu.tables import markdown

_RMT, _ATTNRES = "Mak and Flanigan (2025)", "Kimi Team (2026)"

# The flag that selects the chip for estimates of times.
_TARGET = "--targets=v5e"


def _steps(vector: str, other: str, *more: str) -> list[list[str]]:
    """Return commands that report the costs and the memory of two presets' train steps."""
    report = ["kernel_report", "--step", f"--presets={other},{vector}", _TARGET, *more]
    memory = [_preflight(name, "--topology=v5e:2x2", *more) for name in (vector, other)]
    return [report, *memory]


def _preflight(preset: str, *more: str) -> list[str]:
    """Return a command that reports the memory of a preset's run with the preset's own vocabulary.

    Without the flag, preflight takes the vocabulary of the default tokenizer, which has only bytes,
    and the other reports take the preset's.
    """
    words = presets.run(preset).model.vocab_size
    return ["preflight", f"--preset={preset}", f"--set=model.vocab_size={words}", *more]


def _rmt_steps(scale: Scale, run_of) -> list[list[str]]:
    return _steps("gpt2-405m", "rmt-305m", "--batch_size=16", "--seq_len=512")


def _attnres_steps(scale: Scale, run_of) -> list[list[str]]:
    names = "prenorm-528m", "attnres-528m"
    train = _steps(*names, "--batch_size=8", "--seq_len=1024")
    decode = ["decode_report", f"--presets={','.join(names)}", "--target=v5e"]
    stages = ["--topology=v5e:2x2", "--mesh=stage=4", "--seq_len=1024", "--batch_size=64"]
    stages += ["--set=train.microbatches=16", "--set=model.compute_dtype=bfloat16"]
    pipelines = [_preflight(name, *stages) for name in ("llama-153m", "llama-attnres-153m")]
    return [*train, decode, *pipelines]


def _traffic(scale: Scale, run_of) -> list[list[str]]:
    return [["kernel_report", "--op=depth_attention", _TARGET]]


_DEPTHS = {
    "tiny": ("transformer", "attnres", "attnres-full"),
    "paper": ("prenorm", "attnres", "attnres-full"),
}


def _depth_plan(scale: Scale) -> Plan:
    return trained.largest_of(trained.attnres_scaling(scale), _DEPTHS[scale])


def _depth(scale: Scale, run_of) -> list[list[str]]:
    folders = [run_of(arm.name) for arm in _depth_plan(scale).arms]
    return [["depth_report", f"--workdir={','.join(folders)}"]]


def _largest(scale: Scale) -> Plan:
    return trained.largest_of(trained.rmt_scaling(scale), ("transformer", "rmt"))


def _smallest(scale: Scale) -> Plan:
    return trained.smallest_of(trained.attnres_scaling(scale), _DEPTHS[scale])


def _tasks(scale: Scale, run_of) -> list[list[str]]:
    vector, matrix = (run_of(arm.name) for arm in _largest(scale).arms)
    command = ["evaluate", f"--workdir={matrix}", f"--against={vector}"]
    # The tokens of tiny models are bytes, so a task's documents are longer than the training
    # windows. The models can read them, because they use ALiBi, which has no maximum position.
    return [[*command, "--max_length=512"] if scale == "tiny" else command]


_TABLES_5_AND_6 = (
    "lambada_openai", "arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "wikitext"
)  # fmt: skip


EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment(
            "rmt-moments",
            "variances of stores and retrievals at initialization, by formula and by simulation",
            f"{_RMT}, Tables 1 and 2",
            compute=moments.page,
            takes="seconds",
        ),
        Experiment(
            "rmt-counts",
            "parameters and FLOPs by the size of the residual, and for the paper's models",
            f"{_RMT}, Figure 1, Tables 4 and 7 to 9",
            compute=counts.page,
            takes="seconds",
        ),
        Experiment(
            "rmt-scaling",
            "loss of RMT and Transformer by FLOPs and weights, with fits",
            f"{_RMT}, Figures 2 and 3, Tables 3, 4, 8 and 9",
            plan=trained.rmt_scaling,
        ),
        Experiment(
            "rmt-largest",
            "loss of the largest RMT and Transformer after equal tokens: docs/guides/reproduce.md",
            f"{_RMT}, Table 3",
            plan=_largest,
        ),
        Experiment(
            "rmt-variants",
            "RMT compared with other residual systems",
            f"{_RMT}, Figure 5 and Table 10",
            plan=trained.rmt_variants,
        ),
        Experiment(
            "rmt-key-dim",
            "a larger residual at the same weights and FLOPs",
            f"{_RMT}, Figure 6",
            plan=residual_size.rmt_key_dim,
        ),
        Experiment(
            "rmt-tasks",
            "tasks and perplexities of the largest models, in pairs; needs --data_dir",
            f"{_RMT}, Tables 5 and 6",
            plan=_largest,
            reports=_tasks,
            tasks=_TABLES_5_AND_6,
        ),
        Experiment(
            "rmt-step",
            "estimated time of a train step and of its parts, and its memory",
            f"{_RMT}, section 4.2, Memory and Runtime",
            reports=_rmt_steps,
            takes="10 minutes on two CPU cores",
        ),
        Experiment(
            "attnres-traffic",
            "elements moved per sublayer, counted in compiled programs",
            f"{_ATTNRES}, Table 1",
            reports=_traffic,
            takes="an hour on two CPU cores",
        ),
        Experiment(
            "attnres-scaling",
            "loss of plain, Block, Full and mHC-lite by FLOPs, with fits",
            f"{_ATTNRES}, Table 2 and Figure 4",
            plan=trained.attnres_scaling,
        ),
        Experiment(
            "attnres-smallest",
            "loss of plain, Block and Full at the smallest size: docs/guides/reproduce.md",
            f"{_ATTNRES}, Table 2, first row",
            plan=_smallest,
        ),
        Experiment(
            "attnres-ablations",
            "ablations of attention over depth",
            f"{_ATTNRES}, Table 4",
            plan=trained.attnres_ablations,
        ),
        Experiment(
            "attnres-block-size",
            "number of sublayers per block",
            f"{_ATTNRES}, Figure 6",
            plan=trained.attnres_block_size,
        ),
        Experiment(
            "attnres-dynamics",
            "weights on earlier layers; outputs and gradients by depth",
            f"{_ATTNRES}, Figures 5 and 8",
            plan=_depth_plan,
            reports=_depth,
        ),
        Experiment(
            "attnres-overheads",
            "estimated cost of Block AttnRes for a train step, a pipeline and a new token",
            f"{_ATTNRES}, section 4",
            reports=_attnres_steps,
            takes="half an hour on two CPU cores",
        ),
        Experiment(
            "ladder",
            "RMT, Block AttnRes and both together, at several sizes, with fits",
            "in neither paper",
            plan=trained.ladder,
        ),
        Experiment(
            "cores",
            "both residuals with Llama's and Kimi Linear's cores",
            "in neither paper",
            plan=trained.today,
        ),
        Experiment(
            "depth",
            "attention over depth in models of 4 to 32 layers, with a search of its learning rate",
            "in neither paper at this size",
            plan=depth.plan,
        ),
        Experiment(
            "depth-other-text",
            "the models of 16 layers on another text, with the rates found on the first",
            "in neither paper at this size",
            plan=depth.other_text,
        ),
        Experiment(
            "depth-rate",
            "learning-rate factors of attention over depth at two depths and two batch sizes",
            "in neither paper",
            plan=depth.rates,
        ),
        Experiment(
            "wide-residuals",
            "wide streams and RMT at equal bytes of residual, equal weights and equal FLOPs",
            "in neither paper",
            plan=wide_residuals.plan,
        ),
        Experiment(
            "growth",
            "D_k that grows after a quarter of the steps",
            "in neither paper",
            plan=residual_size.growth,
        ),
        Experiment(
            "systems",
            "every residual system after equal tokens",
            "in neither paper",
            plan=trained.all_systems,
        ),
    )
}


def experiment(name: str) -> Experiment:
    """Return the experiment called `name`.

    Raises:
      UsageError: there is no experiment with this name.
    """
    if name not in EXPERIMENTS:
        raise UsageError(unknown("experiment", name, EXPERIMENTS))
    return EXPERIMENTS[name]


# Hours are reported for these chips, on the assumption that runs reach this fraction of peak
# FLOP/s. That of v5p is not measured.
_CHIPS = {"v5p": ("TPU v5", 0.4), "H100": ("NVIDIA H100", plan.H100_SHARE)}
# The FLOP/s that two CPU cores reach on tiny models, from the experiment `ladder` in
# docs/results.md.
_CPU = 1.2e10


def table() -> str:
    """Return a Markdown table of all experiments, with their runs, tokens, FLOPs and hours."""
    lines = ["experiment | shows | source | scale | runs | tokens | FLOPs | takes"]
    for e in EXPERIMENTS.values():
        if e.plan is None:
            lines.append(f"{e.name} | {e.shows} | {e.source} | | | | | {e.takes}")
            continue
        for scale in ("tiny", "paper"):
            runs = list(plan.all_runs(e.plan(scale)))
            total = sum(map(plan.flops, runs))
            hours = {
                name: total / (share * cost.peak_flops(chip))
                for name, (chip, share) in _CHIPS.items()
            }
            hours = {"two CPU cores": total / _CPU} if scale == "tiny" else hours
            takes = ", ".join(f"{_hours(seconds)} on {name}" for name, seconds in hours.items())
            about = f"{e.name} | {e.shows} | {e.source}" if scale == "tiny" else " | | "
            lines.append(
                f"{about} | {scale} | {len(runs)} | {sum(map(plan.tokens, runs)):.2g} | "
                f"{total:.2g} | {takes}"
            )
    shares = " and ".join(f"{share:.0%} of the peak of {n}" for n, (_, share) in _CHIPS.items())
    return (
        f"{markdown(lines)}\n\nFLOPs by rmt_tpu.cost. Hours on chips assume {shares}; hours on "
        "CPU cores are extrapolated from docs/results.md. Experiments share runs."
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h"
