"""Test rules."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, deps = [], recipes = [], size = "medium", tags = [], **kwargs):
    """Runs NAME.py, slow tests included, under pytest with the settings of pyproject.toml.

    Args:
      name: of the file, without .py.
      deps: what the file imports.
      recipes: those that it runs as programs.
      size: medium is 5 minutes at most, large 15, enormous an hour.
      tags: for Bazel.
      **kwargs: for py_test.
    """
    py_test(
        name = name,
        size = size,
        srcs = [
            name + ".py",
            "//tests:run_pytest.py",
        ],
        args = ["%s/%s.py" % (native.package_name(), name)],
        data = ["//:pyproject.toml"],
        main = "//tests:run_pytest.py",
        # A program that is run has threads of its own.
        tags = tags + (["cpu:2"] if recipes else []),
        deps = deps + ["//recipes:" + recipe for recipe in recipes] + ["//tests:conftest"],
        **kwargs
    )
