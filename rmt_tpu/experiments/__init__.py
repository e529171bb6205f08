"""The papers' experiments: the runs or computations of each, and the page with its results."""
