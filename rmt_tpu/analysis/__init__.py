"""Estimates and measurements of what models cost, and tools that compare trained models."""
