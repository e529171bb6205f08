"""Experiments from the papers: what each one trains or computes, and a page of its results."""
