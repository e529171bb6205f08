"""What a model costs, computed and not measured."""
