"""Estimate which share of slips in the code the tests notice: `make mutations`.

The program draws product lines, puts one slip in each in a copy of the project, and runs the fast
tests that are nearest by imports until one fails or the budget is spent. Another run goes on where
one was cut off while the code is the same. mutmut and cosmic-ray do not serve: they run one command
for every slip, or first trace a run of all tests, and this suite takes too long for either.

A line `FILE:LINE: OPERATOR: BEFORE -> AFTER  # REASON` of `tests/mutations_excused.txt` excuses a
slip that changes nothing: it is not counted, and neither is one that no test has run.
"""

import argparse
import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rmt_tpu", "pallas_kernels", "sharding", "recipes")
NOT_COPIED = (".git", ".venv*", ".cache", "build", "dist", "runs", "reports", "bazel-*")
MOST_EXCUSED, FILES_AT_ONCE = 10, 6
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub"
SWAPS = dict(pair.split() for pair in PAIRS.split(", "))
SWAPS |= {b: a for a, b in SWAPS.items()}
SWAPS |= dict(Mult="Add", Div="Mult", FloorDiv="Mult", Mod="Mult", BitAnd="BitOr")
SYMMETRIC = re.compile(r"(.*\.)?(max|min|maximum|minimum|logical_(and|or))")
TEXTS = str | bytes | ast.JoinedStr | ast.List | ast.Tuple
LEFT = re.compile(rb"raise\b|__all__ =|(logging|warnings|_TOLD)\.|if (TYPE_CHECKING|__name__)\b")
LEFT_FIELDS = {"annotation", "returns", "msg", "pattern"}
LEFT_TESTS = {"tests/build_test.py", "tests/docs_test.py"}  # they read the text of the code
PYTEST = "-m pytest -x -v --tb=no --no-header --disable-warnings -p no:cacheprovider".split()
PYTEST += ["-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true"]  # a test's
PYTEST += ["-m", "not slow and not compile"]
TEST = re.compile(r"^(\S+_test\.py::.+?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|X).*)?$", re.MULTILINE)


def variants(node: ast.AST):
    """Yield (operator, node that is replaced, its new text) for each slip of a node."""

    def changed(operator, **fields):
        return operator, node, ast.unparse(type(node)(**(vars(node) | fields)))

    op = type(getattr(node, "op", None) or getattr(node, "ops", [None])[0]).__name__
    other = getattr(ast, SWAPS[op])() if op in SWAPS else None
    match node:
        case ast.Compare(ops=[_, *rest]):
            yield changed("comparison", ops=[other, *rest])
        case ast.BoolOp():
            yield changed("and/or", op=other)
        case ast.BinOp(left=left, right=right) if other:
            if not any(isinstance(getattr(x, "value", x), TEXTS) for x in (left, right)):
                yield changed("arithmetic", op=other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "dropped not", node, ast.unparse(operand)
        case ast.Constant(value=(bool() | int() | float()) as x):
            others = {bool: [not x], int: [x - 1, x + 1], float: [x * 2 or 1.0]}[type(x)]
            yield from (("constant", node, str(other)) for other in others)
        case ast.Call(func=func, args=[a, b, *rest]) if not SYMMETRIC.fullmatch(ast.unparse(func)):
            if not isinstance(a, ast.Starred) and ast.unparse(a) != ast.unparse(b):
                yield changed("swapped arguments", args=[b, a, *rest])
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "removed statement", node, "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "returned None", value, "None"
    for test in [getattr(node, "test", None), *getattr(node, "ifs", [])]:
        if test and not isinstance(test, ast.UnaryOp):  # whose `not` is dropped
            yield "negated condition", test, f"not ({ast.unparse(test)})"


def slips(source: bytes):
    """Yield (line, start, end, text, name): `text` replaces the bytes from start to end."""
    lines, nodes = source.splitlines(keepends=True), [ast.parse(source)]
    for node in nodes:
        statement = isinstance(node, ast.stmt) and lines[node.lineno - 1].strip()
        if isinstance(node, ast.JoinedStr) or (statement and LEFT.match(statement)):
            continue
        for operator, place, after in variants(node):
            start = sum(map(len, lines[: place.lineno - 1])) + place.col_offset
            end = sum(map(len, lines[: place.end_lineno - 1])) + place.end_col_offset
            yield place.lineno, start, end, after, f"{operator}: {ast.unparse(place)} -> {after}"
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            nodes += [c for c in children if isinstance(c, ast.AST) and name not in LEFT_FIELDS]


def fingerprint(*parts) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def draw(sources: dict[str, bytes], seed: int) -> list[tuple]:
    """Return (file, *slip) for each line; order and slips stay when other lines change."""
    drawn = {}
    for file in (file for file in sources if not file.startswith("tests/")):
        lines = sources[file].splitlines()
        for slip in slips(sources[file]):
            place = fingerprint(seed, file, lines[max(slip[0] - 2, 0) : slip[0]])
            one = fingerprint(place, slip[4]), (file, *slip)
            drawn[place] = min(one, drawn.get(place, one))
    return [slip for _, (_, slip) in sorted(drawn.items())]


def users(sources: dict[str, bytes]) -> dict[str, set[str]]:
    """Return for each file the files that import its module or name it in a text."""
    names = {file: file[:-3].replace("/", ".").removesuffix(".__init__") for file in sources}
    found = {file: set() for file in sources}
    for file, source in sources.items():
        words = {names[file], *re.findall(r"\w[\w.]*\w", source.decode())}
        words |= {"recipes"} if file.startswith("tests/") else set()  # which `tests.cli` runs
        for other, name in names.items():  # the package and the module's own name, or both in one
            if name in words or words.issuperset(name.rsplit(".", 1)):
                found[other].add(file)
    return found


def tests_of(file: str, used_by: dict[str, set[str]]) -> list[str]:
    """Return the test files that reach a file: its own first, then the nearest by imports."""
    own, beside, queue = f"tests/{file[:-3]}_", f"tests/{file.rpartition('/')[0]}", [file]
    for one in queue:
        queue += sorted(used_by[one] - set(queue))
    tests = [test for test in queue if test.endswith("_test.py") and test not in LEFT_TESTS]
    return sorted(tests, key=lambda t: (own not in t, t not in used_by[file], beside not in t))


def pytest(project: Path, seconds: float, *arguments: str) -> tuple[bool, str]:
    """Return whether no test has failed in this time, and which one began last."""
    command = ["env", f"PYTHONPATH={project}", "timeout", "-k9", str(seconds), sys.executable]
    command, output = [*command, *PYTEST, *arguments], project.with_name("output")
    with output.open("wb") as told:
        code = subprocess.call(command, cwd=project, stdout=told, stderr=told)
    # pytest's 5 says that no test was selected; the others, that time was over.
    return code in (0, 5, 124, 137, -9), ["", *TEST.findall(output.read_text("utf-8"))][-1]


def outcome(project: Path, slip: tuple, tests: list[str], budget: float, passes: dict[str, bool]):
    """Try a slip; return "noticed", "survived" or "not run", and the test that noticed."""
    file, _, start, end, after, _ = slip
    path, marker, over = project / file, project.with_name("marker"), time.time() + budget
    mark, source = f"__import__('os').makedirs({str(marker)!r}, exist_ok=True)", path.read_bytes()
    text = f"{mark}; pass" if after == "pass" else f"({mark} or ({after}))"
    shutil.rmtree(marker, ignore_errors=True)
    while tests and time.time() < over - (0 if marker.exists() else budget / 2):
        some, left = tests[:FILES_AT_ONCE], [f"--deselect={t}" for t in passes if not passes[t]]
        # Its size is not the source's, so Python compiles each anew, even within a second.
        path.write_bytes(source[:start] + text.encode() + source[end:])
        well, test = pytest(project, over - time.time(), *some, *left)
        path.write_bytes(source)
        if well:
            tests = tests[FILES_AT_ONCE:]
            continue
        if test not in passes or not test:
            passes[test] = pytest(project, budget, *([test] if test else ["--co", *some]))[0]
        if passes[test]:
            return "noticed" if marker.exists() else "not run", test or "collection"
        assert test, f"without a slip, these are not collected: {some}"
        print(f"fails without a slip, and is left out: {test}", flush=True)
    return "survived" if marker.exists() else "not run", ""


def report(rows: list[dict]) -> str:
    """Return a table of shares with Wilson's 95% intervals, and the slips by outcome."""
    lines, z2 = ["package         noticed   of   share  95% interval"], 1.96**2
    for package in (*PACKAGES, ""):
        ours = [row["outcome"] for row in rows if row["slip"].startswith(package)]
        k, n = ours.count("noticed"), ours.count("noticed") + ours.count("survived")
        if n:
            centre, spread = k + z2 / 2, (z2 * (k * (n - k) / n + z2 / 4)) ** 0.5
            low, high = ((centre + sign * spread) / (n + z2) for sign in (-1, 1))
            lines.append(f"{package or 'all':15} {k:7} {n:4} {k / n:7.1%}  {low:.1%} to {high:.1%}")
    for title in ("survived", "not run", "excused"):
        some = [row["slip"] for row in rows if row["outcome"] == title]
        lines += [f"\n{title}: {len(some)}", *some]
    return "\n".join(lines)


def main(argv: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--count", type=int, default=200, help="slips that tests run")
    parser.add_argument("--budget", type=float, default=600, help="seconds of tests for a slip")
    options = parser.parse_args(argv)
    excuses = (root / "tests/mutations_excused.txt").read_text("utf-8").splitlines()
    excused = dict(line.split("  # ") for line in excuses if not line.startswith("#"))
    assert len(excused) <= MOST_EXCUSED, f"more than {MOST_EXCUSED} slips are excused"
    files = sorted(file for top in (*PACKAGES, "tests") for file in (root / top).rglob("*.py"))
    sources = {str(file.relative_to(root)): file.read_bytes() for file in files}
    folder = root / f"build/mutations/{options.seed}"
    project, log = folder / "copy", folder / f"{fingerprint(sources)}.jsonl"
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(root, project, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (folder / "cache").mkdir(exist_ok=True)
    (project / ".cache").symlink_to("../cache")  # not the project's own programs
    log.touch()
    known = {row["slip"]: row for row in map(json.loads, log.read_text("utf-8").splitlines())}
    used_by, passes, rows = users(sources), {}, []
    for slip in draw(sources, options.seed):
        if sum(row["outcome"] in ("noticed", "survived") for row in rows) >= options.count:
            break
        name, begin = f"{slip[0]}:{slip[1]}: {slip[-1]}", time.time()
        row = known.get(name, {"slip": name})
        if name in excused:
            row["outcome"] = "excused"
        elif "outcome" not in row:
            found = outcome(project, slip, tests_of(slip[0], used_by), options.budget, passes)
            row |= {"outcome": found[0], "by": found[1], "seconds": round(time.time() - begin)}
            with log.open("a") as kept:
                print(json.dumps(row), file=kept)
            print(json.dumps(row), flush=True)
        rows.append(row)
    print(report(rows))


if __name__ == "__main__":
    main()
