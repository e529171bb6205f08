"""Parsing of meshes such as "data=2,fsdp=4".

The module does not import jax, so that a program can report a wrong mesh before it loads jax.
"""

from sharding.errors import MeshError

# The mesh axes from the outermost to the innermost. Devices along the outermost axis communicate
# least. Devices along the innermost axis are neighbours in the network.
AXES = ("stage", "data", "fsdp", "expert", "key", "sequence", "tensor")


def parse_mesh(spec: str) -> dict[str, int]:
    """Return the axis sizes given in a text such as "data=2,fsdp=4", in the order of the text.

    At most one axis may have size -1, which means all devices that the other axes leave.

    Raises:
      MeshError: the text does not describe a mesh.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, spec.split(",")):
        axis, equals, text = part.partition("=")
        if axis not in AXES or axis in sizes:
            problem = "is given twice" if axis in sizes else "is unknown"
            raise MeshError(
                f"--mesh={spec!r}: axis {axis!r} {problem}; legal axes: {', '.join(AXES)}"
            )
        if not equals or not _is_size(text):
            raise MeshError(
                f"--mesh={spec!r}: {part!r} must be axis=size, with a size of at least 1, or -1"
            )
        sizes[axis] = int(text)
    fills = [axis for axis, size in sizes.items() if size == -1]
    if len(fills) > 1:
        raise MeshError(
            f"--mesh={spec!r} has -1 for {' and '.join(fills)}; legal: -1 for at most one axis"
        )
    return sizes


def _is_size(text: str) -> bool:
    # No device count has ten digits, and Python refuses to parse a number of thousands of digits.
    return text == "-1" or (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0)
