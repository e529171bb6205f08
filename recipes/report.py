"""Draw a figure of the papers from this code.

    python -m recipes.report --figure=resource_scaling --output=reports

resource_scaling: parameters and FLOPs against the size of the residual (Figure 1 of the RMT paper).
"""

from pathlib import Path

from absl import flags

from recipes import program
from rmt_tpu.errors import UsageError, unknown

_FIGURES = ("resource_scaling",)
_FIGURE = flags.DEFINE_string("figure", "resource_scaling", f"one of {', '.join(_FIGURES)}")
_OUTPUT = flags.DEFINE_string("output", "reports", "folder for the picture and the table")


def main() -> int:
    from rmt_tpu.analysis.scaling import draw_resource_scaling

    if _FIGURE.value not in _FIGURES:
        raise UsageError(unknown("--figure", _FIGURE.value, _FIGURES))
    folder = Path(_OUTPUT.value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        picture = folder / f"{_FIGURE.value}.png"
        table = draw_resource_scaling(picture)
        picture.with_suffix(".md").write_text(table, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output={folder} cannot be written: {error.strerror}") from None
    print(table)
    print(f"picture: {picture}")
    return 0


def run() -> None:
    program.start(main)


if __name__ == "__main__":
    run()
