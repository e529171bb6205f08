"""Preflight reports (see `preflight`), as text and as pictures."""

from pathlib import Path

from rmt_tpu.analysis.decode import STEPS
from rmt_tpu.analysis.preflight import Preflight
from rmt_tpu.analysis.preflight_advice import advice
from rmt_tpu.estimator.calibration import error_bar

_WIDTH = 40  # This is the length of a bar in characters.
_MEANING = {
    "parameters": "as stored between steps",
    "optimizer": "moments, counts and bfloat16 copies of weights",
    "cache": "for whole prompts",
    "batch": "and other arguments",
    "activations": "kept by the forward pass for the backward pass",
    "temporaries": "arrays within a step, workspace and gaps",
    "program": "instructions",
}
_FORMS = {
    "cudnn": "cuDNN's fused kernels",
    "mosaic_tpu": "kernels for TPUs",
    "xla": "plain JAX, with an online softmax if there are many logits",
}


def report_text(report: Preflight, name: str, count: int = 12) -> str:
    """Return a preflight report for a terminal, with the `count` largest buffers."""
    sections = [
        _heading(report, name),
        _attention(report),
        _memory(report),
        _buffers(report, count),
        _collectives(report),
        _launches(report),
        _time(report),
        _advice(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


# A segment of a bar is drawn if it is at least this fraction of the bar's length.
_THINNEST = 0.003


def draw_memory(report: Preflight, path: str | Path, name: str) -> None:
    """Draw the memory use of a device as one stacked bar, with the memory limit."""
    from matplotlib.figure import Figure

    unit, name_of_unit = _unit(report)
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for i, kind in enumerate(report.kinds):
        size = report.memory[kind] / unit
        # A segment that is too thin to see is also left out of the legend.
        label = f"{kind} {size:.2f}" if size > _THINNEST * _scale(report) / unit else "_"
        axes.barh([0], [size], 0.5, left=left, label=label, color=f"C{i}")
        left += size
    shown = _scale(report) / unit
    if shown >= report.limit / unit:
        limit = report.limit / unit
        axes.axvline(limit, color="black", linestyle="--", label=f"HBM {limit:.2f}")
    axes.set(xlim=(0, 1.05 * shown), ylim=(-0.5, 0.5), yticks=[])
    axes.set_xlabel(f"{name_of_unit} per device, from the compiler's buffer assignment")
    axes.set_title(f"{name} on {report.target.label}: {_verdict(report)}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)


def _unit(report: Preflight) -> tuple[int, str]:
    """Return the unit in which sizes are shown: its number of bytes and its name.

    The unit is MiB if every kind of memory takes less than 0.1 GiB, and GiB otherwise.
    """
    small = max(report.memory.values()) < 0.1 * 2**30
    return (2**20, "MiB") if small else (2**30, "GiB")


def _scale(report: Preflight) -> int:
    """Return the number of bytes that a bar of full length represents.

    It is the size of a device's memory. If sizes are shown in MiB, it is the number of bytes in
    use.
    """
    small = _unit(report)[1] == "MiB"
    return max(report.used, 1) if small else max(report.used, report.limit)


def _verdict(report: Preflight) -> str:
    used, limit = report.used / 2**30, report.limit / 2**30
    if report.fits:
        unit, name = _unit(report)
        amount = f"{used:.2f}" if name == "GiB" else f"{report.used / unit:.2f} MiB"
        return f"FITS, {amount} of {limit:.2f} GiB per device ({used / limit:.0%})"
    return f"DOES NOT FIT, {used:.2f} GiB needed, {limit:.2f} GiB per device"


def _heading(report: Preflight, name: str) -> str:
    train, model = report.config.train, report.config.model
    mesh = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items() if size > 1) or "data=1"
    if report.prompt is not None:
        prompt, rest = report.prompt, ""
        work = f"a prompt of {prompt.tokens} tokens, {prompt.part} at a time"
        if prompt.rows is not None:
            work = f"{STEPS} new tokens in each of {prompt.rows} rows of {prompt.tokens} tokens"
    else:
        parts = f" in {train.parts} parts" if train.parts > 1 else ""
        work = f"{train.batch_size} x {report.config.data.seq_len} tokens per step{parts}"
        rest = f", remat {model.remat}"
    return (
        f"{name} on {report.target.label}: {_verdict(report)}\n"
        f"{report.devices} device{'s' * (report.devices > 1)}, mesh {mesh}; {work}, "
        f"{model.compute_dtype}, vocabulary {model.vocab_size}{rest}"
    )


def _attention(report: Preflight) -> str:
    lines = []
    for attends in report.attention:
        form, why = _FORMS[attends.form], ""
        if attends.why is not None:
            why = f"; no kernel: {attends.why}"
        lines.append(f"{attends.core}, heads of {attends.size}: {form}{why}")
    return "\n".join(lines)


def _memory(report: Preflight) -> str:
    scale, (unit, name) = _scale(report), _unit(report)
    source = "that libtpu leaves to a program"
    if report.target.platform != "tpu":
        source = "in total (JAX takes 75 % unless XLA_PYTHON_CLIENT_MEM_FRACTION is set)"
    limit = f"{report.limit / 2**30:.2f} GiB" if name != "GiB" else f"{report.limit / 2**30:.2f}"
    lines = [f"memory per device in {name}, of {limit} {source}"]
    for kind in report.kinds:
        size = report.memory[kind]
        unknown = kind == "program" and not report.fits
        amount = "   ?  " if unknown else f"{size / unit:6.2f}"
        bar = "#" * _length(size, scale)
        lines.append(f"  {kind:12}{amount}  {bar:{_WIDTH}}  {_MEANING[kind]}")
    used, limit = _length(report.used, scale), _length(report.limit, scale)
    bar = "".join(
        "|" if i == limit - 1 else "#" if i < used else "." if i < limit else " "
        for i in range(_WIDTH)
    )
    free = (report.limit - report.used) / 2**30
    in_gib = "" if name == "GiB" else " GiB"
    over = f"{free:.2f}{in_gib} free" if free >= 0 else f"{-free:.2f}{in_gib} over the limit"
    lines.append(f"  {'all':12}{report.used / unit:6.2f}  {bar}  {over}")
    return "\n".join(lines)


def _length(size: int | float, scale: int | float) -> int:
    return round(_WIDTH * size / scale) if scale else 0


def _buffers(report: Preflight, count: int) -> str:
    rows = [(f"{b.bytes / 2**20:.1f}", b.kind, b.shape, b.name) for b in report.buffers[:count]]
    title = f"the {len(rows)} largest buffers at peak memory"
    return f"{title}\n{_table(('MiB', 'kind', 'shape', 'name'), rows)}"


def _collectives(report: Preflight) -> str:
    if not report.fits:
        return ""
    if not report.traffic:
        return "no collectives"
    target = report.target
    rows = [
        (
            t.kind,
            t.axes + t.between_slices * ", between slices",
            str(t.calls),
            f"{t.bytes / 1e6:.1f}",
            f"{t.overlapped / t.bytes:.0%}",
            f"{t.bytes / target.network(t.between_slices) * 1e3:.2f}",
        )
        for t in report.traffic
    ]
    title = (
        f"collectives of a step; ASSUMED: {target.interconnect / 1e9:.0f} GB/s out of a device, "
        'the maker\'s figure for all links together ("most" below: those that an axis can use)'
    )
    if target.slices > 1:
        title += (
            f"; {target.dcn / 1e9:.2f} GB/s per device between slices, its share of the network"
        )
    heads = ("kind", "mesh axes", "calls", "MB sent", "overlapped", "ms")
    return f"{title}\n{_table(heads, rows)}"


def _launches(report: Preflight) -> str:
    if report.launches is None:
        return ""
    # XLA asks cuDNN for the size of its workspace only when a GPU is present.
    return (
        f"kernels and copies launched: {report.launches:,} per step; cuDNN's workspace is unknown"
    )


def _time(report: Preflight) -> str:
    time = report.time
    if time is None:
        return ""
    lines = [
        "time of a step: ESTIMATE, each instruction the longer of its schedule and memory traffic"
    ]
    parts = time.parts | {"collectives": time.collectives}
    for part, seconds in parts.items():
        bar = "#" * _length(seconds, time.total)
        lines.append(f"  {part:12}{seconds * 1e3:8.2f} ms {seconds / time.total:4.0%}  {bar}")
    tokens = report.tokens
    hidden = (
        f", {time.least * 1e3:.2f} ms if overlapped collectives cost nothing"
        if time.overlapped
        else ""
    )
    lines.append(f"  {'step':12}{time.total * 1e3:8.2f} ms{hidden}")
    least, most = time.range
    three = (least, time.total, most)
    words = [
        ", ".join(f"{seconds * 1e3:.2f}" for seconds in three) + " ms",
        ", ".join(f"{tokens / seconds:,.0f}" for seconds in three) + " tokens/s",
        "MFU " + ", ".join(f"{time.mfu_of(seconds):.1%}" for seconds in three),
    ]
    lines.append(f"  least, best guess and most: {'; '.join(words)}")
    if report.target.assumed:
        lines.append(f"  assumed for kernels: {report.target.assumed}")
    if time.unknown_loops:
        lines.append(
            f"  {time.unknown_loops} loops of unknown length count once, or as kernels declare"
        )
    lines.append(f"  {error_bar([report.target.name])}")
    return "\n".join(lines)


def _advice(report: Preflight) -> str:
    if report.fits:
        return ""
    found = advice(report)
    if not found:
        if report.prompt is not None:
            fewer = "" if report.prompt.rows is None else ", or fewer rows of --decode"
            axes = "tensor, sequence or key"
            return f"what to change: more devices on {axes}, or a shorter --prompt{fewer}"
        return "what to change: use a smaller model; no other change is legal on this topology"
    lines = ["what to change, best first (sizes are estimated in proportion)"]
    for i, step in enumerate(found, start=1):
        size = "run preflight again for the size"
        if step.bytes is not None:
            end = "fits" if step.bytes <= report.limit else "still does not fit"
            size = f"about {step.bytes / 2**30:.2f} GiB, which {end}"
        lines.append(f"  {i}. {step.flags}: {step.why}; {size}")
    return "\n".join(lines)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as text, with right-aligned numbers."""
    columns = list(zip(heads, *rows, strict=True))
    lines = []
    for row in (heads, *rows):
        cells = []
        for text, column in zip(row, columns, strict=True):
            width = max(map(len, column))
            number = all(cell.rstrip("%").replace(".", "").isdigit() for cell in column[1:])
            cells.append(text.rjust(width) if number else text.ljust(width))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
