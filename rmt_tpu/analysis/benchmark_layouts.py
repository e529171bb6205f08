"""Functions that return the tables of docs/benchmarks as Markdown, from the JSON of recipes.

A source is a recipe whose report has one or more parts, such as one part per chip (see
`benchmark_tables`). Each argument of a function belongs to one source. It maps the name of each
part to the JSON values of its report.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rmt_tpu.analysis import compare, peers
from rmt_tpu.estimator import calibration
from rmt_tpu.tables import markdown, scaled

Reports = Mapping[str, Any]

_BEST_GUESS = "best guess"
_MODELS = ("least", _BEST_GUESS, "most")
# Each row of the table of a train step adds the cycles of these parts of a report.
_PARTS = {
    "residual: stores, norms, reads": ("residual",),
    "projections: W_Q, W_K, W_V, W_O": ("projections",),
    "attention": ("attention",),
    "feed-forward": ("feed_forward",),
    "unembedding and loss": ("loss",),
    "optimizer": ("optimizer",),
    "embedding and other": ("embedding", "other"),
}


def ops(*sources: Reports) -> str:
    """Return a table of what ops cost.

    Each source has one report of `recipes.kernel_report` per chip.

    Each row shows one call: its cost in the forward pass, and in the forward and backward pass.
    """
    titles = ["op", "least MB", "kernel MB", "plain MB"]
    over = f"plain time over kernel's, {' / '.join(sources[0])}"
    lines = [[*titles, f"forward: {over}", "training"]]
    for reports in sources:
        found: dict[str, list[tuple]] = {}
        for rows in zip(*(report["rows"] for report in reports.values()), strict=True):
            name = f"{rows[0]['op'].replace('_', ' ')}, {rows[0]['case']}"
            found.setdefault(name, []).append(rows)
        for name, passes in found.items():
            cells = [name]
            for kind in ("work", "cost", "portable_cost"):
                cells.append("; ".join(f"{rows[0][kind]['bytes'] / 1e6:,.0f}" for rows in passes))
            for rows in passes:
                cells.append(" / ".join(f"{row['speedup']:.2f}" for row in rows))
            lines.append(cells)
    return markdown(lines) + "\n"


def steps(*sources: Reports) -> str:
    """Return a table of the train steps of two models.

    Each source has reports of `recipes.kernel_report --step`, named `<preset>@<chip>`. The sources
    differ in the number of sequences per step.
    """
    presets, chips = (_distinct(part.split("@")[i] for part in sources[0]) for i in (0, 1))
    lines = [["tokens", f"million cycles, {' / '.join(presets)}", *chips]]
    for reports in sources:
        costs = {part: report["steps"][0] for part, report in reports.items()}

        def row(
            name: str, value: Callable[[Any], float], ratio: str = "", costs: Any = costs
        ) -> None:
            cells = []
            for chip in chips:
                first, second = (value(costs[f"{preset}@{chip}"]) for preset in presets)
                quotient = f" = {ratio}{first / second:.2f}{ratio[::-1]}" if name in _MODELS else ""
                cells.append(f"{first:.1f} / {second:.1f}{quotient}")
            sequences = costs[f"{presets[0]}@{chips[0]}"]["tokens"] // 512
            lines.append([f"{sequences} x 512", name, *cells])

        for model in _MODELS:
            bold = "**" if model == _BEST_GUESS else ""
            row(model, lambda cost, model=model: cost["cycles_by_model"][model] / 1e6, bold)
        row("HBM traffic, GB", lambda cost: cost["hbm_bytes"] / 1e9)
        row("temporary memory, GB", lambda cost: cost["temporary_bytes"] / 1e9)
    return markdown(lines) + "\n"


def peer_steps(*sources: Reports) -> str:
    """Return a table of our train steps beside MaxText's, by `recipes.peer_report`."""
    rows = (row for reports in sources for report in reports.values() for row in report["rows"])
    return peers.table(list(rows)) + "\n"


def measured_steps(reports: Reports) -> str:
    """Return a table of measured train steps.

    The argument maps the name of a device to its report, made by `recipes.kernel_report --step`.
    All reports have the same steps.
    """
    lines = [["train step", *(f"{title}, {d}" for d in reports for title in ("ms", "tokens/s"))]]
    lines[0] += ["launches", "temporary, MiB"]
    for steps in zip(*(report["steps"] for report in reports.values()), strict=True):
        cells = [f"`{steps[0]['preset']}`"]
        for step in steps:
            cells += [f"{1e3 * step['seconds']:.1f}", f"{step['tokens'] / step['seconds']:,.0f}"]
        launches = sum(count for _, count, _ in steps[0]["instructions"])
        lines.append([*cells, f"{launches:,.0f}", f"{steps[0]['temporary_bytes'] / 2**20:,.0f}"])
    return markdown(lines) + "\n"


def measured_ops(reports: Reports) -> str:
    """Return a table of measured ops with kernels and in plain JAX, forward and backward.

    The argument maps "kernels" and "plain" to the reports of these implementations on one device.
    Each row of a report is about one call. It has the op, the size, the time in seconds, and the
    minimum number of bytes that the call moves.
    """
    lines = [["op", "size", "kernels, us", "plain JAX, us", "ratio", "least bytes over 3 TB/s, us"]]
    kernels, plain = reports["kernels"], reports["plain"]
    for kernel, xla in zip(kernels["rows"], plain["rows"], strict=True):
        fast, slow = 1e6 * kernel["seconds"], 1e6 * xla["seconds"]
        cells = [
            f"{fast:,.0f}",
            f"{slow:,.0f}",
            f"{fast / slow:.2f}",
            f"{kernel['bytes'] / 3e6:,.0f}",
        ]
        lines.append([kernel["op"].replace("_", " "), kernel["size"], *cells])
    return markdown(lines) + "\n"


def step_parts(reports: Reports) -> str:
    """Return a table of the cycles that each part of a train step takes, for two models.

    Cycles are in millions. The argument maps `<preset>@<chip>` to a report of
    `recipes.kernel_report --step`.
    """
    presets, chips = (_distinct(part.split("@")[i] for part in reports) for i in (0, 1))
    lines = [[f"part, {' / '.join(chips)}", *reversed(presets)]]
    for name, parts in _PARTS.items():
        cells = [name]
        for preset in reversed(presets):
            found = (reports[f"{preset}@{chip}"]["steps"][0]["parts"] for chip in chips)
            cells.append(" / ".join(f"{sum(of[part] for part in parts) / 1e6:.1f}" for of in found))
        lines.append(cells)
    return markdown(lines) + "\n"


def residuals(*sources: Reports) -> str:
    """Return a table of what a train step costs with each kind of residual.

    Each source has reports of `recipes.kernel_report --step`, named `<residual>@<chip>`. The first
    residual is the standard one, called "plain". A cell has the cycles of a step divided by the
    cycles with the standard residual. It shows the best guess, and then the range over all cost
    models. It is "-" if a source lacks the report.
    """
    names = _distinct(part.split("@")[0] for reports in sources for part in reports)
    costs = [{part: of["steps"][0] for part, of in reports.items()} for reports in sources]
    chips_of = [_distinct(part.split("@")[1] for part in source) for source in costs]
    pairs = list(zip(costs, chips_of, strict=True))
    bases = [source[f"{names[0]}@{chips[0]}"]["preset"] for source, chips in pairs]
    columns = zip(bases, chips_of, strict=True)
    lines = [["residual", *(f"{base}, {chip}" for base, chips in columns for chip in chips)]]
    lines[0] += [f"{base}: temporary memory, GB" for base in bases]
    for name in names:
        cells = [name]
        for source, chips in pairs:
            for chip in chips:
                if f"{name}@{chip}" not in source:
                    cells.append("-")
                    continue
                this, plain = (source[f"{n}@{chip}"]["cycles_by_model"] for n in (name, names[0]))
                ratios = [this[model] / plain[model] for model in _MODELS]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                million = f"{plain[_BEST_GUESS] / 1e6:.1f} million cycles"
                best = this[_BEST_GUESS] / plain[_BEST_GUESS]
                cells.append(million if name == names[0] else f"**{best:.2f}** ({spread})")
        for source, chips in pairs:
            found = (source.get(f"{name}@{chip}", {}).get("temporary_bytes") for chip in chips)
            cells.append(" / ".join(f"{size / 1e9:.1f}" if size else "-" for size in found))
        lines.append(cells)
    return markdown(lines) + "\n"


def gpu_programs(reports: Reports) -> str:
    """Return a table of programs that were compiled for GPUs by `recipes.preflight`.

    The reports are named `<program>@<GPU>`. A cell has one number per GPU, or "-" if there is no
    report.
    """
    programs, gpus = (_distinct(part.split("@")[i] for part in reports) for i in (0, 1))
    names = ", ".join(gpus)
    lines = [["program", f"launches: {names}", f"temporary, MiB: {names}", f"all, GiB: {names}"]]
    columns = (
        lambda report: f"{report['launches']:,}",
        lambda report: f"{report['memory_bytes']['temporaries'] / 2**20:,.0f}",
        lambda report: f"{report['used_bytes'] / 2**30:.2f}",
    )
    for program in programs:
        found = [reports.get(f"{program}@{gpu}") for gpu in gpus]
        cells = (", ".join(cell(report) if report else "-" for report in found) for cell in columns)
        lines.append([f"`{program}`", *cells])
    return markdown(lines) + "\n"


def gpu_traffic(reports: Reports) -> str:
    """Return a table of the memory traffic of ops on GPUs, by `rmt_tpu.analysis.gpu_traffic`.

    The reports are named after GPUs. Cells have a number per GPU, or one number if all are equal,
    and "-" if an implementation does not support the call.
    """
    names = {"xla": "plain JAX", "triton": "Triton", "mosaic_gpu": "Mosaic GPU"}
    lines = [["op", "size", "least, MB", *(f"{name}, MB" for name in names.values())]]
    lines[0].append("launches: " + ", ".join(names.values()))

    def cell(found: list[Any], number: Callable[[Any], str]) -> str:
        texts = [number(value) if value else "-" for value in found]
        return ", ".join(texts if len(set(texts)) > 1 else texts[:1])

    megabytes = lambda value: f"{value['bytes'] / 1e6:,.0f}"
    launches = lambda value: str(value["launches"])
    for of_gpus in zip(*reports.values(), strict=True):
        first = of_gpus[0]
        cells = [first["op"].replace("_", " "), first["size"], f"{first['least'] / 1e6:,.0f}"]
        of = {name: [row[name] for row in of_gpus] for name in names}
        cells += [cell(found, megabytes) for found in of.values()]
        lines.append([*cells, "; ".join(cell(found, launches) for found in of.values())])
    return markdown(lines) + "\n"


def decode(*sources: Reports) -> str:
    """Return a table of estimated decode steps.

    Each source has one report of `recipes.decode_report` per chip. A cell is "-" if the step does
    not fit in the chip's memory.
    """
    lines = [["preset", "rows", "context", "least, ms", "step, ms", "share of bandwidth"]]
    lines[0].append("temporary, MB")
    for reports in sources:
        for rows in zip(*(report["rows"] for report in reports.values()), strict=True):
            case = rows[0]["case"]
            temporary = [row["cost"] and row["cost"]["temporary_bytes"] for row in rows]
            cells = [
                _each([row["least_seconds"] for row in rows], 1e3, ".2f"),
                _each([row["seconds"] for row in rows], 1e3, ".2f"),
                _each([row["of_bandwidth"] for row in rows], 1, ".2f"),
                _each(temporary, 1e-6, ",.1f"),
            ]
            lines.append([case["preset"], str(case["batch"]), f"{case['context']:,}", *cells])
    return markdown(lines) + "\n"


def decode_host(reports: Reports) -> str:
    """Return a table of decode steps that `recipes.decode_report` timed on one machine."""
    (report,) = reports.values()
    rows = {(row["case"]["batch"], row["case"]["preset"]): row for row in report["rows"]}
    presets = _distinct(preset for _, preset in rows)
    titles = (f"{preset}: ms a step (least to most)" for preset in presets)
    lines = [["rows", *(cell for title in titles for cell in (title, "tokens/s"))]]
    for batch in _distinct(batch for batch, _ in rows):
        cells = [str(batch)]
        for preset in presets:
            row = rows[batch, preset]
            least, most = (f"{seconds * 1e3:.3f}" for seconds in row["span"])
            cells.append(f"{row['seconds'] * 1e3:.3f} ({least} to {most})")
            cells.append(f"{batch / row['seconds']:,.0f}")
        lines.append(cells)
    return markdown(lines) + "\n"


def counts(reports: Reports) -> str:
    """Return a table of parameters and FLOPs for residuals of several sizes.

    The largest residual is 8 times the size of the smallest. Each cell also shows the growth
    relative to the smallest size. The argument contains the report of `recipes.experiment
    rmt-counts`.
    """
    (report,) = reports.values()
    lines = [["numbers in a token's residual"]]
    lines[0] += [f"{name}: {what}" for name in report for what in ("parameters", "MFLOP a token")]
    first = [rows[0] for rows in report.values()]
    for rows in zip(*report.values(), strict=True):
        times = rows[0]["residual_size"] / first[0]["residual_size"]
        if times not in (1, 2, 4, 8):
            continue
        cells = [f"{rows[0]['residual_size']:,}"]
        for row, base in zip(rows, first, strict=True):
            for key, scale, form in (("parameters", 1, ",.0f"), ("flops", 1e6, ",.1f")):
                more = row[key] / base[key] - 1
                cells.append(f"{row[key] / scale:{form}}" + (f" ({more:+.2%})" if more else ""))
        lines.append(cells)
    return markdown(lines) + "\n"


def comparison(reports: Reports) -> str:
    """Return a table of the losses of trained models, from the JSON of `recipes.compare`."""
    (rows,) = reports.values()
    results: dict[str, list[compare.RunResult]] = {}
    for row in rows:
        results.setdefault(row["name"], []).append(compare.RunResult(**row))
    return compare.markdown(results)


def moments(reports: Reports) -> str:
    """Return a table of losses for two dtypes of the optimizer's first moment.

    The argument maps each dtype to the JSON of `recipes.compare`. A difference compares two runs
    with the same seed: the loss with the second dtype minus the loss with the first.
    """
    first, second = reports
    losses = {
        dtype: {(run["name"], run["seed"]): run["held_out_loss"] for run in runs}
        for dtype, runs in reports.items()
    }
    lines = [["preset", f"loss, {first}", f"loss, {second}", "differences by seed", "mean"]]
    for name in _distinct(name for name, _ in losses[first]):
        seeds = [seed for other, seed in losses[first] if other == name]
        pairs = [(losses[first][name, seed], losses[second][name, seed]) for seed in seeds]
        differences = [after - before for before, after in pairs]
        means = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        cells = [f"{mean:.4f}" for mean in means]
        cells.append(", ".join(f"{difference:+.4f}" for difference in differences))
        lines.append([f"`{name}`", *cells, f"{sum(differences) / len(pairs):+.4f}"])
    return markdown(lines) + "\n"


def storage(reports: Reports) -> str:
    """Return a table of how long a save and a restore take, from `recipes.storage_report`."""
    (report,) = reports.values()
    lines = [["", "save, s", "blocked, s", "of the save", "restore, s", "GB stored"]]
    for row in report["rows"]:
        share = f"{row['blocked'] / row['save']:.2%}"
        cells = [f"{row['save']:.2f}", f"{row['blocked']:.4f}", share, f"{row['restore']:.2f}"]
        lines.append([row["name"], *cells, f"{row['stored_bytes'] / 1e9:.3f}"])
    return markdown(lines) + "\n"


def calibration_calls() -> str:
    """Return a table that compares the published time of each kernel call with our estimate."""
    return calibration.table().split("\n\n")[0] + "\n"


def calibration_agreement() -> str:
    """Return a table of how well the estimates agree with published times.

    It has one row per chip and kind of call.
    """
    return calibration.table().split("\n\n")[1]


def _each(values: Sequence[int | float | None], scale: int | float, form: str) -> str:
    return " / ".join(scaled(value, scale, form) for value in values)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
