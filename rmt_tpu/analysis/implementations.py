"""Tables of the implementation that each op uses by default on each platform.

`python -m rmt_tpu.analysis.implementations docs/implementations.md` writes the tables into that
page. Each entry is what `Implementations.chosen` chooses for a call with abstract operands.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.causal_attention.interface import AttentionOperands, Cap, PartOperands, Window
from pallas_kernels.delta_attention.interface import DeltaOperands
from pallas_kernels.depth_attention.interface import Merge, MergeAt, MergeRead, Partial
from pallas_kernels.key_vector.interface import SiteOperands
from pallas_kernels.platform import Implementations
from pallas_kernels.shapes import ALL_SITES, RMT_305M, TOKENS, KeyVector, array
from pallas_kernels.target import lowering_for
from rmt_tpu.tables import markdown

# The devices of each column of the table. A short name maps to jax's name of the device kind.
DEVICES = {
    "TPU": {
        "v4": "TPU v4",
        "v5e": "TPU v5 lite",
        "v5p": "TPU v5",
        "v6e": "TPU v6 lite",
        "tpu7x": "TPU7x",
    },
    "CUDA": {
        "A100": "NVIDIA A100-SXM4-40GB",
        "H100": "NVIDIA H100 80GB HBM3",
        "B200": "NVIDIA B200",
    },
}
_BEGIN, _END = "<!-- The tables below are generated. -->\n", "<!-- End of the tables. -->"
_PLAIN = "plain JAX"
_OTHERS = "Calls that use another implementation"
_NOT_FASTER = "the kernel is not estimated to be faster"


class OpCall(NamedTuple):
    """A call of an op, for which the table shows the implementation.

    Attributes:
      words: a description of the call, shown in the table of unusual calls; "" for a usual call.
      op: the name of the function that every implementation of the op has, such as "forward".
      args: the operands, as `ShapeDtypeStruct`s.
    """

    words: str
    op: str
    args: tuple


class ImplementationRow(NamedTuple):
    """A row of the table, for ops that have the same implementations.

    Attributes:
      ops: the names of the public ops.
      group: the name of the ops' `Implementations`.
      calls: first the usual calls, from training and decoding in bfloat16, and then unusual calls.
      operand_kind: "vectors" or "matrices" if another row has the same ops; otherwise "".
    """

    ops: tuple[str, ...]
    group: str
    calls: tuple[OpCall, ...]
    operand_kind: str = ""

    @property
    def name(self) -> str:
        """The name of the first op, and its kind of operands if another row has the same op."""
        return f"`{self.ops[0]}`" + (f" of {self.operand_kind}" if self.operand_kind else "")


def rows() -> list[ImplementationRow]:
    """Return all rows of the table, in order."""
    return [*_key_vector(), *_depth(), *_depth_sums(), *_attention(), *_experts()]


@functools.cache
def groups() -> dict[str, Implementations]:
    """Return a dict from name to group, for all groups of implementations in `pallas_kernels`."""
    modules = [m for name, m in sys.modules.items() if name.startswith("pallas_kernels")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.name: value for value in values if isinstance(value, Implementations)}


def _key_vector() -> Iterator[ImplementationRow]:
    def both(words: str, size: KeyVector, tokens=TOKENS, data="bfloat16", residual=None):
        site = size.site(tokens, data, residual)
        yield OpCall(words, "forward", (site,))
        yield OpCall(words, "backward", (size.backward(tokens, data, residual),))

    size = RMT_305M
    ops = "store_norm_retrieve", "store_norm_retrieve_with_statistics", "undo", "store"
    ops += "store_forward", "store_backward", "norm_retrieve", "norm_retrieve_again"
    calls = (
        *both("", size),
        *both("", size, residual="int16"),
        *both("float32", size, data="float32"),
        *both("float16", size, data="float16"),
        *both("64 tokens", size, (16, 64)),
        *both("`D_k` of 8192", size._replace(K=8192)),
    )
    yield ImplementationRow(ops, "key_vector", calls)
    layers = lambda dtype: _layers(size.site((8,), dtype), dtype)
    calls = (
        OpCall("", "at_layer", (layers("bfloat16"), array("int32"))),
        OpCall("float16", "at_layer", (layers("float16"), array("int32"))),
    )
    yield ImplementationRow(("store_norm_retrieve_at",), "key_vector_at", calls)


def _layers(site: SiteOperands, dtype: str) -> SiteOperands:
    """Return the operands of an op in `dtype`, with keys and gains stacked for 24 layers."""
    stacked = lambda x: array(dtype, 24, *x.shape)
    keys = {name: stacked(getattr(site, name)) for name in ("store_keys", "gain", "read_keys")}
    return site._replace(**keys)


def _depth() -> Iterator[ImplementationRow]:
    def both(words: str, dtype: str):
        arguments, cotangents = (
            ALL_SITES.partial((8192,), dtype),
            ALL_SITES.partial_cotangents((8192,), dtype),
        )
        yield OpCall(words, "partial", (arguments,))
        yield OpCall(words, "partial_backward", (arguments, cotangents))
        yield OpCall(words, "merge", (ALL_SITES.merge((8192,), dtype),))
        yield OpCall(words, "merge_backward", ALL_SITES.merge_backward((8192,), dtype))

    calls = (*both("", "bfloat16"), *both("float32", "float32"), *both("float16", "float16"))
    ops = "depth_attention", "depth_attention_partial", "depth_attention_partial_backward"
    ops += ("depth_attention_merge",)
    yield ImplementationRow(ops, "depth_attention", calls, operand_kind="vectors")

    def matrices(words: str, *size: int, tokens: int = 512, dtype: str = "bfloat16"):
        arguments = _partial(dtype, tokens, size)
        yield OpCall(words, "partial", (arguments,))
        yield OpCall(words, "merge", (_merge(dtype, tokens, size),))

    calls = (
        *matrices("", 64, 64),
        *matrices("float32", 64, 64, dtype="float32"),
        *matrices("64 tokens", 64, 64, tokens=64),
        *matrices("matrices of 10 x 10", 10, 10),
    )
    yield ImplementationRow(ops, "depth_attention_matrices", calls, operand_kind="matrices")

    def read(words: str, tokens: int = 512, dtype: str = "bfloat16"):
        merge = _merge(dtype, tokens, (64, 64))
        keys = array("float32", 64, 64), array("float32", 48, 64)
        return OpCall(words, "merge_read", (MergeRead(merge, *keys),))

    yield ImplementationRow(
        ("depth_attention_merge_read",),
        "merge_read",
        (read(""), read("float16", dtype="float16"), read("64 tokens", 64)),
    )
    at = lambda words, dtype: OpCall(words, "merge_at", (_merge_at(dtype),))
    yield ImplementationRow(
        ("depth_attention_merge_at",),
        "depth_attention_at",
        (at("", "bfloat16"), at("float16", "float16")),
    )


def _depth_sums() -> Iterator[ImplementationRow]:
    def sums(words: str, dtype: str = "bfloat16", tokens: int = 8192, width: int = 1024):
        arguments = array("float32", 4, 25, tokens), array(dtype, 25, tokens, width)
        return OpCall(words, "sums", (*arguments, array("int32")))

    calls = (
        sums(""),
        sums("float16", "float16"),
        sums("fewer than 128 tokens", tokens=112),
        sums("a width of 1000", width=1000),
    )
    yield ImplementationRow(("depth_sums",), "depth_sums", calls)


def _partial(dtype: str, tokens: int, size: tuple[int, ...]) -> Partial:
    sources = array(dtype, 9, 4, tokens, *size)
    return Partial(array("float32", 8, *size), sources, array("int32"))


def _merge(dtype: str, tokens: int, size: tuple[int, ...]) -> Merge:
    mixed, current = array(dtype, 8, 4, tokens, *size), array(dtype, 4, tokens, *size)
    sums, site, active = array("float32", 4, tokens), array("int32"), array("bool")
    return Merge(array("float32", *size), mixed, sums, site, current, active)


def _merge_at(dtype: str) -> MergeAt:
    parameters, index, current = (
        array("float32", 24, 2, 2048),
        array("int32"),
        array(dtype, 8, 2048),
    )
    mixed, sums = array(dtype, 8, 8, 2048), array("float32", 8, 8)
    return MergeAt(parameters, index, mixed, sums, index, current, array("bool"))


def _attention() -> Iterator[ImplementationRow]:
    def whole(words: str, size: int, *, dtype="bfloat16", alibi=False, ids=True, cap=None):
        qkv = array(dtype, 4, 2048, 48, size)
        slopes = array("float32", 16) if alibi else None
        segments = array("int32", 4, 2048) if ids else None
        arguments = AttentionOperands(qkv, 0.1, slopes, segments, cap=cap)
        return OpCall(words, "attention_forward", (arguments,))

    def part(
        words: str, dtype: str = "bfloat16", queries: int = 512, window=None, cap=None
    ) -> OpCall:
        q, kv = array(dtype, 4, queries, 16, 64), array(dtype, 4, 2048, 16, 64)
        ids = array("int32", 4, queries), array("int32", 4, 2048)
        operands = PartOperands(q, (kv, kv), 0.1, 0, None, ids, window, cap)
        return OpCall(words, "part_forward", (operands,))

    calls = (
        whole("", 64),
        whole("float32", 64, dtype="float32"),
        whole("float16", 64, dtype="float16"),
        whole("ALiBi over 2048 tokens", 64, alibi=True),
        whole("a soft cap", 64, cap=Cap(50.0)),
        whole("heads of 60", 60),
        whole("heads of 128 in rows of several documents", 128),
        whole("heads of 128 in rows of one document", 128, ids=False),
        whole("heads of 192", 192),
        whole("heads of 256 in rows of several documents", 256),
    )
    ops = "causal_attention", "attention_forward", "attention_backward"
    yield ImplementationRow(ops, "causal_attention", calls)
    calls = (
        part(""),
        part("float32", dtype="float32"),
        part("one query", queries=1),
        part("a window", window=Window(100)),
        part("a soft cap", cap=Cap(50.0)),
    )
    yield ImplementationRow(("attention_after", "attention_to"), "causal_attention", calls)

    def delta(words: str, size: int = 128, dtype: str = "bfloat16"):
        vectors = [array(dtype, 4, 2048, 16, size)] * 3
        decay, beta = array("float32", 4, 2048, 16, size), array("float32", 4, 2048, 16)
        operands = DeltaOperands(*vectors, decay, beta, array("int32", 4, 2048))
        return OpCall(words, "forward", (operands, array("float32", 4, 16, size, size)))

    calls = delta(""), delta("float32", dtype="float32"), delta("heads of 64", 64)
    yield ImplementationRow(("delta_attention",), "delta_attention", calls)


def _experts() -> Iterator[ImplementationRow]:
    def grouped(words: str, dtype: str = "bfloat16"):
        arguments = array(dtype, 8192, 1024), array(dtype, 16, 1024, 2048), array("int32", 16)
        return OpCall(words, "product", arguments)

    yield ImplementationRow(
        ("grouped_matmul",),
        "grouped_matmul",
        (grouped(""), grouped("float32", "float32"), grouped("float16", "float16")),
    )

    def product(words: str, dtype: str = "bfloat16", rows: int = 32):
        arguments = array(dtype, rows, 1024), array(dtype, 24, 3, 1024, 1024), array("int32")
        return OpCall(words, "product", arguments)

    calls = product(""), product("float16", "float16"), product("more than 256 rows", rows=257)
    yield ImplementationRow(("product_at",), "stacked_product", calls)

    def sums(words: str, count: int = 8192, choices: int = 32768, width: int = 1024):
        indices = array("int32", count), array("int32", choices)
        return OpCall(words, "sums", (array("bfloat16", count, width), *indices))

    calls = (
        sums(""),
        sums("more rows than half of the choices", count=20000),
        sums("fewer than 1024 choices", count=256, choices=1023),
        sums("rows of fewer than 128 numbers", width=127),
    )
    yield ImplementationRow(("sums_of_rows", "rows_of_tokens"), "token_rows", calls)

    def logits(words: str, dtype: str = "bfloat16", tokens: int = 4096, width: int = 1024):
        arguments = array(dtype, tokens, width), array(dtype, width, 2**15), array("int32", tokens)
        return OpCall(words, "logits", arguments)

    calls = (
        logits(""),
        logits("float32", "float32"),
        logits("fewer than 2^20 logits", tokens=31),
        logits("rows of more than 8192 numbers", width=8193),
    )
    yield ImplementationRow(("logits_with_sums",), "logits", calls)


class ImplementationChoice(NamedTuple):
    """The implementation that a call uses on one device.

    Attributes:
      name: the name of the implementation.
      why: the reason why the kernel does not support the call; None if it does.
    """

    name: str
    why: str | None


def choice(row: ImplementationRow, call: OpCall, platform: str, kind: str) -> ImplementationChoice:
    """Return the implementation that a call uses by default on a device.

    Args:
      row: the row of the table that contains the call.
      call: the call.
      platform: the column of the table, a key of DEVICES.
      kind: jax's name for the kind of the device.
    """
    chosen = _choices(kind)[row.name, row.calls.index(call)]
    return chosen.get(platform.lower(), ImplementationChoice("xla", None))


@functools.cache
def _choices(kind: str) -> dict[tuple[str, int], dict[str, ImplementationChoice]]:
    """Return the implementations of all calls on a kind of device.

    The result maps the name of a row and the index of a call to a dict from platform to choice.
    """
    calls = {(row.name, i): (row, c) for row in rows() for i, c in enumerate(row.calls)}
    found = {}

    def ask(args: dict) -> None:
        for key, (row, call) in calls.items():
            chosen = groups()[row.group].chosen(call.op, *args[key])
            found[key] = {
                platform: ImplementationChoice(*outcome) for platform, outcome in chosen.items()
            }

    with lowering_for(kind):
        jax.eval_shape(ask, {key: call.args for key, (_, call) in calls.items()})
    return found


def tables() -> str:
    """Return two Markdown tables: one of usual calls, and one of calls that differ from them."""
    lines, others = ["op | TPU | CUDA | CPU"], ["op | call | device | uses | reason"]
    for number, row in enumerate(rows(), 1):
        names = ", ".join(f"`{op}`" for op in row.ops) + (
            f" of {row.operand_kind}" if row.operand_kind else ""
        )
        cells = (_usual(row, platform) for platform in DEVICES)
        lines.append([f"{names} ({number})", *cells, _PLAIN])
        others += [f"({number}) {row.name} | {line}" for line in _others(row)]
    return f"{markdown(lines)}\n\n## {_OTHERS}\n\n{markdown(others)}"


def _usual(row: ImplementationRow, platform: str) -> str:
    """Return the table cell with the implementation of a row's usual calls on a platform.

    Raises:
      ValueError: the usual calls use different implementations on the devices of the platform.
    """
    kinds, usual = DEVICES[platform].values(), [call for call in row.calls if not call.words]
    names = {choice(row, call, platform, kind).name for call in usual for kind in kinds}
    if len(names) > 1:
        raise ValueError(
            f"{row.ops[0]} uses {sorted(names)} on {platform}; legal: one implementation"
        )
    (name,) = names
    if name != "xla":
        return f"`{name}`"
    kernels = " or ".join(f"`{k}`" for k in _on_request(groups()[row.group], platform.lower()))
    return f"{_PLAIN}; {kernels} on request" if kernels else _PLAIN


def _on_request(group: Implementations, platform: str) -> list[str]:
    """Return the names of an op's kernel implementations for a platform."""
    kernels = {n: k for n, k in group.kernels.items() if k is not group.portable}
    return [k for k in (*kernels, *group.on_request) if group.names[k] == (platform,)]


def _others(row: ImplementationRow) -> Iterator[str]:
    """Yield table cells for unusual calls that do not use the usual implementation.

    The cells belong to all columns except the first.
    """
    for words in dict.fromkeys(call.words for call in row.calls if call.words):
        calls = [call for call in row.calls if call.words == words]
        for platform, kinds in DEVICES.items():
            devices: dict[ImplementationChoice, list[str]] = {}
            for device, kind in kinds.items():
                usual = choice(row, row.calls[0], platform, kind).name
                found = (choice(row, call, platform, kind) for call in calls)
                if other := next((c for c in found if c.name != usual), None):
                    devices.setdefault(other, []).append(device)
            for other, names in devices.items():
                where = platform if len(names) == len(kinds) else ", ".join(names)
                uses = _PLAIN if other.name == "xla" else f"`{other.name}`"
                yield f"{words} | {where} | {uses} | {other.why or _NOT_FASTER}"


def write(page: Path) -> None:
    """Replace the tables between two HTML comments in a Markdown page.

    Raises:
      ValueError: the page does not have these comments.
    """
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{page} lacks the comments {_BEGIN!r} and {_END!r} around its tables")
    page.write_text(f"{before}{_BEGIN}\n{tables()}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write(Path(sys.argv[1]))
