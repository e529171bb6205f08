"""The papers' experiments: what each trains or computes, and the page with its results."""
