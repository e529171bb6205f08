"""The papers' experiments: what each trains or computes, and the page of its results."""
