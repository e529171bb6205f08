"""Checkpoints when savers are killed and when storage fails: the trials, as tables.

    python -m tests.storage_trials --trials=50

A trial that does not end as it must is an AssertionError.
"""

import argparse

from tests.storage_failures import FAILURES, fail, failure_table
from tests.storage_kills import kill, kill_table, places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=50, help="kills in each place")
    parser.add_argument("--failures", type=int, default=5, help="trials of each failure")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with places() as new:
        rows = []
        for kind in ("local", "gs"):
            for processes in (1, 2):
                rows.append(kill(new(kind), processes, options.trials, options.seed))
        print(kill_table(rows), end="\n\n", flush=True)
        done = {}
        for name, failure in FAILURES.items():
            for kind in failure.places:
                fail(name, new, kind, options.failures, options.seed)
                done[name, kind] = options.failures
        print(failure_table(done))


if __name__ == "__main__":
    main()
