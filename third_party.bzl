"""PyPI packages as dependencies."""

load("@pypi//:requirements.bzl", "requirement")

def third_party(names):
    """The labels of PyPI packages, each label once.

    Without @pypi's own packages (an environment in their place), many names are one label.

    Args:
      names: as on PyPI, like "absl-py".
    """
    return {requirement(name): None for name in names}.keys()
