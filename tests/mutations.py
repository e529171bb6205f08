"""Estimate which share of slips in the code the tests notice: `make mutations`.

The program records which lines each test file's fast tests run, draws product lines, puts one slip
in each in a copy of the project, and runs the fast tests of the files that run the line until one
fails or the budget is spent. In the end it tries the slips that survived with slow tests, first of
the same files and then of others that run the slip's file, with the same budget. Another run goes
on where one was cut off while the code is the same. mutmut and cosmic-ray do not serve: mutmut runs
tests in one process, which these must not share, and cosmic-ray runs one command for every slip.

A line `FILE:LINE: OPERATOR: BEFORE -> AFTER  # REASON` of `tests/mutations_excused.txt` excuses a
slip that changes nothing: it is not counted, and neither is one that no test has run.
"""

import argparse
import ast
import hashlib
import itertools
import json
import queue
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lines import FOLDER, PACKAGES, read

ROOT = Path(__file__).resolve().parents[1]
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
PYTEST = "-m pytest -v --tb=no --no-header --disable-warnings -p no:cacheprovider".split()
PYTEST += ["-o", "faulthandler_timeout=120", "-o", "faulthandler_exit_on_timeout=true"]  # a test's
TIERS = {"fast": "not slow and not compile", "slow": "slow and not compile"}
TEST = re.compile(
    r"^(\S+_test\.py::.+?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|X|Timeout).*)?$", re.MULTILINE
)


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


def statement(source: bytes, line: int) -> tuple[range, bool]:
    """Return the lines of the innermost statement at a line, and whether a function runs it."""
    found, runs = range(line, line + 1), False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            compound = getattr(node, "body", None)
            last = compound[0].lineno - 1 if compound else node.end_lineno
            if line <= max(last, node.lineno):
                found = range(node.lineno, max(last, node.lineno) + 1)
            elif isinstance(node, ast.FunctionDef):
                runs = True
    return found, runs


def tests_of(slip: tuple, source: bytes, lines: dict, seconds: dict, tier: str) -> list[str]:
    """Return the test files that run a slip: its own first, then the fastest.

    A statement that runs with an import, such as a constant or a default, may be noticed by each
    test that runs any line of its file. Slow tests of all such files are tried for every slip,
    because their lines are not recorded.
    """
    file, line = slip[:2]
    ran, (those, runs) = lines.get(file, {}), statement(source, line)
    every = {test for tests in ran.values() for test in tests} - {"", *LEFT_TESTS}
    found = (
        {test for one, tests in ran.items() if one in those for test in tests} if runs else every
    )
    own = f"tests/{file[:-3]}_"
    some = every if found and tier == "slow" else every & found
    return sorted(some, key=lambda test: (test not in found, own not in test, seconds[test]))


def pytest(project: Path, seconds: float, *arguments: str, **environment) -> tuple[bool, str]:
    """Return whether no test has failed in this time, and which one began last."""
    values = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", f"PYTHONPATH={project}", *values, "timeout", "-k9", str(seconds)]
    command, output = [*command, sys.executable, *PYTEST, *arguments], project.with_name("output")
    with output.open("wb") as told:
        code = subprocess.call(command, cwd=project, stdout=told, stderr=told)
    text = output.read_text("utf-8")
    assert "ERROR: file or directory not found" not in text, text
    # pytest's 5 says that no test was selected; the others, that time was over.
    return code in (0, 5, 124, 137, -9), ["", *TEST.findall(text)][-1]


def outcome(project, slip: tuple, tests: list[str], tier: str, budget: float, passed: dict):
    """Try a slip with one tier; return it or "survived", and the test that noticed."""
    file, _, start, end, after, _ = slip
    path, over = project / file, time.time() + budget
    source, text = path.read_bytes(), after if after == "pass" else f"({after})"
    while tests and time.time() < over:
        some = [f"--deselect={test}" for test, well in passed.items() if not well]
        # Its size is not the source's, so Python compiles each anew, even within a second.
        path.write_bytes(source[:start] + text.encode() + source[end:])
        some += tests[:FILES_AT_ONCE]
        well, test = pytest(project, over - time.time(), "-x", "-m", TIERS[tier], *some)
        path.write_bytes(source)
        if well:
            tests = tests[FILES_AT_ONCE:]
            continue
        if test and test not in passed:  # as a slow one is, which was not recorded
            passed[test], _ = pytest(project, budget, test)
        if passed.get(test, True):
            return tier, test or "collection"
    return "survived", ""


def counted(rows) -> list[str]:
    return [row["outcome"] for row in rows if row["outcome"] in (*TIERS, "survived")]


def report(rows: list[dict]) -> str:
    """Return a table of shares with Wilson's 95% intervals, and the slips by outcome."""
    lines, z2 = ["package         fast slow   of   share  95% interval"], 1.96**2
    for package in (*PACKAGES, ""):
        ours = counted(row for row in rows if row["slip"].startswith(package))
        if n := len(ours):
            fast, slow = map(ours.count, TIERS)
            k = fast + slow
            centre, spread = k + z2 / 2, (z2 * (k * (n - k) / n + z2 / 4)) ** 0.5
            low, high = ((centre + sign * spread) / (n + z2) for sign in (-1, 1))
            share = f"{k / n:7.1%}  {low:.1%} to {high:.1%}"
            lines.append(f"{package or 'all':15} {fast:4} {slow:4} {n:4} {share}")
    for title in ("survived", "not run", "excused"):
        some = [row["slip"] for row in rows if row["outcome"] == title]
        lines += [f"\n{title}: {len(some)}", *some]
    return "\n".join(lines)


def recorded(folder: Path, project: Path, jobs: int):
    """Return what `tests.lines.read` does, of all tests; those of an earlier run are read again."""
    if not folder.exists():
        print("recording which lines each test file runs", flush=True)
        some = folder.with_suffix(".some")
        shutil.rmtree(some, ignore_errors=True)
        some.mkdir()
        parallel = ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
        options = ["-p", "tests.lines", "-m", TIERS["fast"], *parallel]
        pytest(project, 7200, *options, **{FOLDER: some})
        assert any(some.iterdir()), f"{project.with_name('output')} says why no test ran"
        some.rename(folder)
    return read(folder, project)


def main(argv: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--count", type=int, default=200, help="slips that tests run")
    parser.add_argument("--budget", type=float, default=300, help="seconds of a slip's fast tests")
    parser.add_argument("--jobs", type=int, default=2, help="slips that are tried at once")
    options = parser.parse_args(argv)
    excuses = (root / "tests/mutations_excused.txt").read_text("utf-8").splitlines()
    excused = dict(line.split("  # ") for line in excuses if not line.startswith("#"))
    assert len(excused) <= MOST_EXCUSED, f"more than {MOST_EXCUSED} slips are excused"
    files = sorted(file for top in (*PACKAGES, "tests") for file in (root / top).rglob("*.py"))
    sources = {str(file.relative_to(root)): file.read_bytes() for file in files}
    folder, code, free = root / "build/mutations", fingerprint(sources), queue.SimpleQueue()

    def not_copied(source, names):  # a folder of the code may have such a name too
        matching = shutil.ignore_patterns(*NOT_COPIED)
        return matching(source, names) if Path(source) == root else ["__pycache__"]

    for number in range(options.jobs):
        free.put(project := folder / f"{number}/copy")
        shutil.rmtree(project, ignore_errors=True)
        shutil.copytree(root, project, symlinks=True, ignore=not_copied)
        (folder / "cache").mkdir(exist_ok=True)
        (project / ".cache").symlink_to("../../cache")  # not the project's own programs
    ran, passed, seconds = recorded(folder / f"{code}.lines", project, options.jobs)
    failing = [test for test, well in passed.items() if not well]
    print("\n".join(f"fails without a slip, and is left out: {test}" for test in failing))
    log = folder / f"{code}.{options.seed}.jsonl"
    log.touch()
    known = {row["slip"]: row for row in map(json.loads, log.read_text("utf-8").splitlines())}

    def tried(slip, tier):
        name, begin = f"{slip[0]}:{slip[1]}: {slip[-1]}", time.time()
        if name in excused:
            return {"slip": name, "outcome": "excused"}
        if (row := known.get(name)) and (
            row["outcome"] != "survived" or row["tier"] in (tier, "slow")
        ):
            return row
        if not (tests := tests_of(slip, sources[slip[0]], ran, seconds, tier)):
            return {"slip": name, "outcome": "not run"}
        project = free.get()
        found, by = outcome(project, slip, tests, tier, options.budget, passed)
        free.put(project)
        spent = round(time.time() - begin)
        known[name] = row = dict(slip=name, outcome=found, tier=tier, by=by, seconds=spent)
        with log.open("a") as kept:
            print(json.dumps(row), file=kept)
        print(json.dumps(row), flush=True)
        return row

    slips_left, taken, rows = iter(draw(sources, options.seed)), [], []
    with ThreadPoolExecutor(options.jobs) as pool:
        while some := list(itertools.islice(slips_left, options.count - len(counted(rows)))):
            taken += some
            rows += pool.map(tried, some, itertools.repeat("fast"))
        rows = list(pool.map(tried, taken, itertools.repeat("slow")))
    print(report(rows))


if __name__ == "__main__":
    main()
