"""Test rules."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_tests(files):
    """A target for each test file: under pytest, with the settings of pyproject.toml.

    What runs is the fast tier; `--test_env=TIER=compile` or `=all` is another.

    Args:
      files: their paths from this folder.
    """
    for file in files:
        py_test(
            name = file[:-len(".py")],
            size = "enormous",
            srcs = [
                file,
                "run_pytest.py",
            ],
            args = ["%s/%s" % (native.package_name(), file)],
            data = ["//:read_by_tests"],
            main = "run_pytest.py",
            deps = [":tests"],
        )
