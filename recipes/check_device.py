"""Check the results of the kernels on this machine's device, and measure their speed.

    python -m recipes.check_device
    python -m recipes.check_device --op=key_vector,attention --output=device.json

Run this command first on a new machine. Every kernel that programs use on this device runs at two
model sizes. Its results and gradients are compared with its equations, evaluated in float32. An
int16 residual that it restores must equal the original bit for bit. Each kernel is timed. A matrix
product and a copy are timed too, for comparison. The exit code is 1 if anything differs or fails.
An interrupted check keeps the results in --output. A CPU has no kernels, so there plain JAX is
checked at small sizes.
"""

import contextlib
import json
import sys

from absl import flags

from recipes import local, program
from rmt_tpu.errors import UsageError, unknown

_OP = flags.DEFINE_list("op", ["all"], "ops to check, like key_vector,attention, or all")
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation",
    "auto",
    ["auto", "pallas", "xla", "mosaic_gpu"],
    "auto: the kernels that programs use on this device; pallas: all kernels; xla: plain JAX; "
    "mosaic_gpu: like auto, but key-vector ops and depth attention use Mosaic GPU kernels where "
    "they can",
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the results")
_TIME = flags.DEFINE_bool(
    "time", True, "also time every call, and for comparison one matrix product and one copy"
)


def main() -> int:
    """Check the ops that --op names; return 0 if all results are right, otherwise 1."""
    import jax

    from pallas_kernels.platform import preferring
    from rmt_tpu.analysis import device_check
    from rmt_tpu.analysis.device_cases import OPS

    for op in _OP.value:
        if op not in ("all", *OPS):
            raise UsageError(unknown("--op", op, ["all", *OPS]))
    if not _OP.value:
        raise UsageError(f"--op= is empty; legal: all, {', '.join(OPS)}")
    output = None if _OUTPUT.value is None else local.file("output", _OUTPUT.value)
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    on_request = _IMPLEMENTATION.value == "mosaic_gpu"
    implementation = (
        None if on_request or _IMPLEMENTATION.value == "auto" else _IMPLEMENTATION.value
    )
    rates = device_check.measure_rates(small=on_cpu) if _TIME.value else None
    ops = list(OPS) if "all" in _OP.value else _OP.value
    cases = [case for op in ops for case in OPS[op]("small" if on_cpu else "real")]
    rows = []
    for number, case in enumerate(cases, start=1):
        with preferring("mosaic_gpu") if on_request else contextlib.nullcontext():
            row = device_check.check(case, implementation, timed=_TIME.value)
        rows.append(row)
        time = "" if row.seconds is None else f", {1e3 * row.seconds:.3g} ms"
        verdict = "ok" if row.ok else "NOT OK"
        line = f"{number}/{len(cases)} {case.op} {case.size}: {verdict}{time}"
        print(line, file=sys.stderr, flush=True)
        # Write the file after every case, so that an interrupted check keeps its results.
        if output is not None:
            values = device_check.record(rows, rates, device)
            text = json.dumps(values, indent=1, allow_nan=False) + "\n"
            with local.writing("output", _OUTPUT.value):
                output.write_text(text, encoding="utf-8")
    wrong = sum(not row.ok for row in rows)
    print(f"{device.device_kind}, jax {jax.__version__}")
    if on_cpu:
        print("A CPU has no kernels; the plain JAX forms are checked, at small sizes.")
    if rates is not None:
        product, copy = f"{rates.flops / 1e12:.3g} TFLOP/s", f"{rates.bytes / 1e9:.3g} GB/s"
        print(f"Matrix product: {product}. Copy: {copy}.")
    print(device_check.table(rows, rates))
    failed = f"{wrong} of {len(rows)} checks differ or fail"
    print(failed if wrong else f"all {len(rows)} checks pass")
    return 1 if wrong else 0


def run() -> None:
    """Run `main` as a program; `rmt-check-device` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
