"""The papers' experiments: the runs or computations of each, and the page of its results."""
