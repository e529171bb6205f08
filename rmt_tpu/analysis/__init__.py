"""Costs of a model, computed or measured."""
