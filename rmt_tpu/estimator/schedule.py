"""The number of cycles of a kernel or fusion, computed from the schedule that libtpu dumps.

The dump `*-<name>-<n>-final_bundles.txt` has one line per VLIW bundle, in execution order:

    0x2d LB: >> { ... %s24 = sphi %s39, %s89 ... } /* Start region 88 :: ... */
    ...          %s89 = sadd.s32 2, %s24 ...   %p1 = scmp.ge.s32.totalorder %s89, 4 /* loop exit ..
    0x735  : >> { ...  %188 = sbr.rel (!%p1) target = $region88 }

A loop extends from a bundle marked LB to the branch back to the region that starts at that bundle.
A bundle takes one cycle, unless it stalls: a matrix product waits until its matrix unit has
finished the previous product. `_stalled` simulates these stalls.

The model ignores bank conflicts in VMEM, latencies, the time to issue DMAs, and the first and last
steps of the pipeline. It counts a conditional region as executed. If a kernel executes only one of
several adjacent branches, the model counts only the longest. The model also assumes that results of
products are available at once. With the latencies that libtpu states, estimates were up to 2.3
times the measured times. Without them, estimates are close to the measured times (see
`calibration`).
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rmt_tpu.estimator.topology import MatrixUnit

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{")
_REGION = re.compile(r"Start region (\d+)")
_ANY_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel(?: \((!?%\w+)\))? target = \$region(\d+)")
# Matches the predicate of an instruction, if it has one.
_OPERAND = r"(?:\(!?%\w+\),? ?)?"
_EXIT = re.compile(r"(%\w+) = scmp\.ge\S*\s+" + _OPERAND + r"(%\w+), (-?\d+)")
_STEP = re.compile(r"(%\w+) = sadd\.s32 " + _OPERAND + r"(\d+), (%\w+)")
_STEP_REVERSED = re.compile(r"(%\w+) = sadd\.s32 " + _OPERAND + r"(%\w+), (\d+)")
_PHI = re.compile(r"(%\w+) = sphi (%\w+), (%\w+)")
_COPY = re.compile(r"(%\w+) = smov " + _OPERAND + r"(%\w+)")
_SPILL = re.compile(r"sst \[smem:\[(#\w+_spill)\]\] " + _OPERAND + r"(%\w+)")
_FILL = re.compile(r"(%\w+) = sld " + _OPERAND + r"\[smem:\[(#\w+_spill)\]\]")
_CONSTANT = re.compile(r"(%\w+) = smov " + _OPERAND + r"(-?\d+)\b")
_MATRIX = re.compile(r"(vmatmul|vmatpush)([a-z0-9.\[\]]*)\.mxu(\d)")
# A product whose name contains this text has its left-hand rows in a register of the matrix unit.
_OWN_ROWS = ".lmr."
_VMEM_COPY = "dma.vmem_to_vmem"
# A grid's loop runs two more iterations than the grid has steps, because the grid runs as a
# pipeline of three stages: copy in, compute, copy out.
_PIPELINE = "iteration index, stage"
_PIPELINE_EXTRA = 2
# The minimum number of bundles that execute after a branch before the branch is taken.
_DELAY_SLOTS = 4
# The number of simulated iterations of a loop. Only the last iteration counts, because it includes
# the stalls that earlier iterations cause.
_ITERATIONS = 4


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a schedule, or the whole schedule, which counts as a loop with one trip.

    All counts except `trips` are per iteration, and exclude inner loops.

    Attributes:
      trips: the number of iterations, or None if it could not be read.
      bundles: the number of VLIW bundles.
      cycles: the number of cycles, including stalls for matrix units.
      mxu_cycles: the number of cycles in which the busiest matrix unit is working.
      units: maps each functional unit to the number of its issue slots that are used.
      inner: the loops directly inside this loop.
    """

    trips: int | None
    bundles: int
    cycles: int
    mxu_cycles: int
    units: dict[str, int]
    inner: tuple["Loop", ...] = ()

    def walk(self, times: int = 1) -> Iterator[tuple["Loop", int]]:
        """Yield this loop and all inner loops, each with its total number of iterations.

        A loop with an unknown trip count counts as one iteration.
        """
        times *= self.trips or 1
        yield self, times
        for loop in self.inner:
            yield from loop.walk(times)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of one instruction; counts are for one call on one core.

    Attributes:
      program: the whole schedule, as a loop with one trip.
      slots: maps each functional unit to its number of slots per bundle.
      copies_in_vmem: whether the instruction copies data from VMEM to VMEM.
    """

    program: Loop
    slots: dict[str, int]
    copies_in_vmem: bool = False

    @property
    def cycles(self) -> int:
        """The total number of cycles, including stalls for matrix units but not for HBM."""
        return sum(loop.cycles * times for loop, times in self.program.walk())

    @property
    def bundles(self) -> int:
        """The total number of bundles executed, which is a lower bound on `cycles`."""
        return sum(loop.bundles * times for loop, times in self.program.walk())

    @property
    def mxu_cycles(self) -> int:
        """The number of cycles in which the busiest matrix unit works."""
        return sum(loop.mxu_cycles * times for loop, times in self.program.walk())

    @property
    def unknown_loops(self) -> int:
        """The number of loops with an unknown trip count; each counts as one iteration."""
        return sum(loop.trips is None for loop, _ in self.program.walk())

    @property
    def unit_use(self) -> dict[str, float]:
        """The fraction of each functional unit's issue slots that is used during all `cycles`."""
        used = Counter()
        for loop, times in self.program.walk():
            used.update({unit: n * times for unit, n in loop.units.items()})
        total = max(self.cycles, 1)
        return {unit: used[unit] / (slots * total) for unit, slots in self.slots.items()}


def parse_schedule(
    bundles_text: str,
    utilization_text: str,
    matrix: MatrixUnit,
    *,
    longest_branch_only: bool = False,
) -> Schedule:
    """Parse a schedule from libtpu's `final_bundles.txt` and `per-bundle-utilization.txt`.

    Args:
      bundles_text, utilization_text: the contents of the two files.
      matrix: the timing of the target's matrix units.
      longest_branch_only: whether to count only the longest of adjacent conditional regions.

    Raises:
      ValueError: the files belong to different programs, or there are no bundles.
    """
    bundles = _bundles(bundles_text)
    slots, use = _utilization(utilization_text)
    if not bundles or len(bundles) != len(use):
        raise ValueError(
            f"libtpu's schedule has {len(bundles)} bundles, and its file of unit usage has "
            f"{len(use)}; the two numbers must be equal and positive"
        )
    spans = _loop_spans(bundles)
    skipped = _skipped_bundles(bundles) if longest_branch_only else frozenset()
    constants = dict(_CONSTANT.findall(bundles_text))

    def build(start: int, end: int, times: int | None, inside: Sequence[tuple[int, int]]) -> Loop:
        outermost = []
        for span in inside:
            if not outermost or span[0] > outermost[-1][1]:
                outermost.append(span)
        own, loops, position = [], [], start
        for first, last in outermost:
            own += range(position, first)
            nested = [s for s in inside if first <= s[0] and s[1] <= last and s != (first, last)]
            trips = _trips(bundles, first, last, constants)
            loops.append(build(first, last, trips, nested))
            position = last + 1
        own = [i for i in (*own, *range(position, end + 1)) if i not in skipped]
        units = Counter()
        for i in own:
            units.update(dict(zip(slots, use[i], strict=True)))
        events = [_events(bundles[i].text) for i in own]
        return Loop(
            trips=times,
            bundles=len(own),
            cycles=_stalled(events, matrix, 1 if times == 1 else _ITERATIONS),
            mxu_cycles=_busiest(events, matrix),
            units=dict(units),
            inner=tuple(loops),
        )

    return Schedule(build(0, len(bundles) - 1, 1, spans), slots, _VMEM_COPY in bundles_text)


@dataclasses.dataclass(frozen=True)
class _Bundle:
    tag: str | None
    depth: int
    text: str


def _bundles(text: str) -> list[_Bundle]:
    return [
        _Bundle(match.group(1), len(match.group(2)), line)
        for line in text.splitlines()
        if (match := _BUNDLE.match(line)) is not None
    ]


def _utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """Return the number of slots of each functional unit, and how many of them each bundle uses."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    names, capacities, *rows = lines
    slots = dict(zip(map(str.strip, names.split(",")), map(int, capacities.split()), strict=True))
    return slots, [[int(n) for n in row.split()] for row in rows]


def _loop_spans(bundles: list[_Bundle]) -> list[tuple[int, int]]:
    """Return the first and last bundle index of each loop, outer loops before inner loops."""
    starts: dict[str, int] = {}
    ends: dict[int, int] = {}
    for i, bundle in enumerate(bundles):
        if bundle.tag == "LB":
            starts |= dict.fromkeys(_REGION.findall(bundle.text), i)
        for _, region in _BRANCH.findall(bundle.text):
            if region in starts:
                ends[starts[region]] = i
    return sorted(ends.items(), key=lambda span: (span[0], -span[1]))


def _skipped_bundles(bundles: list[_Bundle]) -> frozenset[int]:
    """Return the bundles that are not counted.

    Among adjacent conditional regions, only the longest is counted.
    """
    starts = {
        region: i for i, bundle in enumerate(bundles) for region in _ANY_REGION.findall(bundle.text)
    }
    spans = [
        (i + 1 + _DELAY_SLOTS, starts[region] - 1)
        for i, bundle in enumerate(bundles)
        for _, region in _BRANCH.findall(bundle.text)
        if starts.get(region, 0) > i
    ]
    beside: dict[tuple[int, int] | None, list[tuple[int, int]]] = {}
    for span in spans:
        around = [s for s in spans if s[0] <= span[0] and span[1] <= s[1] and s != span]
        nearest = min(around, key=lambda s: s[1] - s[0], default=None)
        beside.setdefault(nearest, []).append(span)
    dropped: set[int] = set()
    for together in beside.values():
        *others, _ = sorted(together, key=lambda s: s[1] - s[0])
        for first, last in others:
            dropped |= set(range(first, last + 1))
    return frozenset(dropped)


def _trips(bundles: list[_Bundle], first: int, last: int, constants: dict[str, str]) -> int | None:
    """Return the trip count of the loop from bundle `first` to `last`, or None if unknown.

    Bundle `first` has the loop's phi instructions, and `last` has the branch back.
    """
    branch, head = bundles[last].text, bundles[first].text
    predicate = next((p for p, _ in _BRANCH.findall(branch) if p.startswith("!")), None)
    end = last + 1  # Some bundles after the branch still belong to the loop.
    while end < len(bundles) and bundles[end].depth >= bundles[last].depth > 0:
        end += 1
    text = _text(bundles[first:end])
    phis = _PHI.findall(head)
    for name, index, bound in _EXIT.findall(text):
        if f"!{name}" != predicate:
            continue
        steps = {new: (int(step), old) for new, step, old in _STEP.findall(text)}
        steps |= {new: (int(step), old) for new, old, step in _STEP_REVERSED.findall(text)}
        step, old = steps.get(_sources(index, text)[-1], (0, ""))
        sources = _sources(old, text)
        starts = [start for now, start, _ in phis if now == sources[-1]]
        header = head
        # Without a phi instruction, the loop counter is kept in a spill slot between iterations.
        if not starts and sources[-1] in steps:
            header = text
            spill_slots = {slot for loaded, slot in _FILL.findall(text) if loaded in sources}
            stored = _SPILL.findall(_text(bundles[:first]))
            starts = [register for slot, register in reversed(stored) if slot in spill_slots]
        if step <= 0 or not starts:
            return None
        trips = -(-(int(bound) - int(constants.get(starts[0], "0"))) // step)
        pipeline = _PIPELINE in header
        return max(trips - _PIPELINE_EXTRA, 1) if pipeline else trips
    return None


def _text(bundles: list[_Bundle]) -> str:
    return "\n".join(bundle.text for bundle in bundles)


def _sources(register: str, text: str) -> list[str]:
    """Return a register and the registers that it was copied from, ending with the original."""
    copies = dict(_COPY.findall(text))
    stores = [(found.start(), *found.groups()) for found in _SPILL.finditer(text)]
    for found in _FILL.finditer(text):
        loaded, slot = found.groups()
        # Several registers may use the same spill slot. If no store precedes the load, the previous
        # iteration stored the value.
        before = [stored for at, to, stored in stores if to == slot and at < found.start()]
        after = [stored for at, to, stored in stores if to == slot and at > found.start()]
        if before or after:
            copies[loaded] = (before or after)[-1]
    seen = [register]
    while copies.get(seen[-1], register) not in seen:
        seen.append(copies[seen[-1]])
    return seen


# Simulating stalls for matrix units ----------------------------------------------------------

# An operation of a matrix unit. It is either a product or a push, which loads data into the unit.
# The items are: whether it is a product, the end of its name, which describes its operands, and the
# name of the unit.
_Event = tuple[bool, str, str]


def _events(text: str) -> list[_Event]:
    return [(name == "vmatmul", suffix, unit) for name, suffix, unit in _MATRIX.findall(text)]


def _occupied(suffix: str, matrix: MatrixUnit) -> int:
    """Return the number of cycles for which a product occupies its matrix unit.

    On v5e and v5p, the product `vmatmul.lmr` reads its rows from a register of the unit, and has 8
    rows instead of 16. Two facts show this. libtpu's critical-path dumps state half the time for
    such a product, and with 8 rows the FLOPs of an instruction's products have the correct sum.
    """
    if ".f32" in suffix:
        return matrix.rows8_float32
    return matrix.rows16 // 2 if _OWN_ROWS in suffix else matrix.rows16


def _busiest(bundles: list[list[_Event]], matrix: MatrixUnit) -> int:
    busy = Counter()
    for product, suffix, unit in (event for bundle in bundles for event in bundle):
        if product:
            busy[unit] += _occupied(suffix, matrix)
    return max(busy.values(), default=0)


def _stalled(bundles: list[list[_Event]], matrix: MatrixUnit, iterations: int) -> int:
    """Return the number of cycles of a loop's last iteration, including stalls for matrix units."""
    free, pushed, loaded = Counter(), Counter(), {}
    time = start = 0
    for _ in range(iterations):
        start = time
        for bundle in bundles:
            time += 1
            for product, _, unit in bundle:
                if product:
                    ready = loaded.get(unit, -matrix.push_to_product) + matrix.push_to_product
                    time = max(time, free[unit], ready)
                else:
                    time = max(time, pushed[unit])
            for product, suffix, unit in bundle:
                if product:
                    free[unit] = time + _occupied(suffix, matrix)
                else:
                    pushed[unit] = time + matrix.push
                    loaded[unit] = time
    return time - start
