"""Runs of recipes.train that tests share; who changes one copies it."""

import pytest

from tests import cli


@pytest.fixture(scope="session")
def trained_and_told(tmp_path_factory):
    """A run with three checkpoints and evaluations, and what it said."""
    workdir = tmp_path_factory.mktemp("trained")
    flags = (*cli.TINY, *cli.SELDOM, f"--workdir={workdir}")
    return workdir, cli.succeed("train", *flags)


@pytest.fixture(scope="session")
def trained(trained_and_told):
    return trained_and_told[0]


@pytest.fixture(scope="session")
def often_saved(tmp_path_factory):
    """A run that is saved so often that there are many instants to end it at."""
    return cli.train(tmp_path_factory.mktemp("often"), *cli.OFTEN)
