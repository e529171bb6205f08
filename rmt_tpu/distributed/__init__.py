"""Coordination of several processes: how they find each other, agree and shut down together."""
