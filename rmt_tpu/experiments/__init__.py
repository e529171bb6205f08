"""Experiments from the papers, and the pages with their results."""
