"""Compilation for TPUs on a machine without one."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from rmt_tpu.estimator.topology import compiler_environment, parse_topology


def device_of(topology: str) -> jax.Device:
    """The first of "v5e:2x2" or the like."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def place_on(topology: str):
    """`array(dtype, *shape)`, on a device of "v5e:2x2" or the like."""
    sharding = SingleDeviceSharding(device_of(topology))
    return lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def placed_on(topology: str, shapes: Any) -> Any:
    """A tree of shapes, on a device of "v5e:2x2" or the like."""
    array = place_on(topology)
    return jax.tree.map(lambda x: array(x.dtype, *x.shape), shapes)


def schedules(
    topology: str, jobs: Sequence[tuple[str, dict[str, Any]]], folder: pathlib.Path
) -> list[dict[str, str]]:
    """Final schedules of the programs that jobs lower, as text by instruction.

    A process of its own compiles them. A job is "module:function", which is given a device and the
    arguments beside its name, and gives what is lowered for it.
    """
    target = parse_topology(topology)
    (folder / "request.json").write_text(json.dumps({"topology": target.options}))
    lines = [
        json.dumps({"function": function, "arguments": arguments, "whole_topology": False})
        for function, arguments in jobs
    ]
    command = [sys.executable, "-m", "rmt_tpu.estimator.worker", str(folder)]
    environment = os.environ | compiler_environment(target, str(folder / "dump"))
    text = "\n".join(lines) + "\n"
    subprocess.run(command, env=environment, input=text, encoding="utf-8", check=True)
    end = ".bundles.txt"
    found = []
    for i in range(len(jobs)):
        told = json.loads((folder / str(i) / "result.json").read_text())
        assert "error" not in told, told
        paths = (folder / str(i)).glob(f"*{end}")
        found.append({path.name.removesuffix(end): path.read_text() for path in paths})
    return found
