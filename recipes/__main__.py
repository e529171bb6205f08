"""List the programs of `recipes`, one line each: `python -m recipes`."""

import ast
from pathlib import Path

from recipes import program

_NO_PROGRAMS = (
    "__init__",
    "__main__",
    "common",
    "effects",
    "interrupts",
    "local",
    "members",
    "program",
    "several",
    "texts",
    "trained",
)


def main() -> int:
    """Print each recipe's command and the first line of its docstring; return 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    programs = {file.stem: _first_line(file) for file in files if file.stem not in _NO_PROGRAMS}
    width = max(map(len, programs))
    for name, line in programs.items():
        print(f"python -m recipes.{name:<{width}}  {line}")
    print("\n--help lists a program's flags. Each is also installed as a command, like rmt-train.")
    return 0


def _first_line(file: Path) -> str:
    """Return the first line of a program's docstring.

    The file is parsed, because an import would define the program's flags.
    """
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).partition("\n")[0]


def run() -> None:
    """Run `main` as a program."""
    program.start(main, only_printed=True)


run()
