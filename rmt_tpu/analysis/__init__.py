"""Estimates and measurements of the cost of models, and tools that compare trained models."""
