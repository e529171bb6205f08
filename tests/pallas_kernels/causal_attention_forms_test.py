"""Which form attention takes on a GPU: the table in the documents, and programs for GPUs."""

import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import causal_attention
from pallas_kernels.causal_attention import cudnn, plain, reference
from pallas_kernels.causal_attention.interface import AttentionOperands, ResultsAndCotangent
from pallas_kernels.target import Target
from tests import cuda

PAGE = Path(__file__).resolve().parents[2] / "docs/gpu_attention.md"
CAPABILITIES, SIZES = (80, 86, 89, 90, 100), (64, 96, 112, 120, 128, 192, 256)


def refused(
    capability, size, value_size, segments, alibi, *, length=2048, dtype="bfloat16", cap=None
):
    """Why a call of a capability and sizes, with masks, is not cuDNN's; None if it is."""
    of_masks = {"segments": segments, "alibi": alibi, "length": length}
    return cudnn.refused(capability, size, value_size, **of_masks, dtype=dtype, cap=cap)


def cells(text: str) -> dict[tuple[int, bool, bool, int], bool]:
    """Whether cuDNN serves, by capability, documents, ALiBi and the size of the heads."""
    header, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\| (?:device|sm_).*\|$", text, re.MULTILINE)
    )
    assert header[:3] == ["device", "documents", "ALiBi"]
    found = {}
    for device, documents, alibi, *forms in rows:
        given = int(device.removeprefix("sm_")), documents == "yes", alibi == "yes"
        for size, name in zip(map(int, header[3:]), forms, strict=True):
            found[*given, size] = {"cuDNN": True, "online": False}[name]
    return found


def test_the_table_is_what_the_function_says():
    told = cells(PAGE.read_text(encoding="utf-8"))
    keys = set(itertools.product(CAPABILITIES, (False, True), (False, True), SIZES))
    assert set(told) == keys
    asked = {key: refused(key[0], key[3], key[3], *key[1:3]) is None for key in keys}
    assert told == asked and set(asked.values()) == {True, False}


@pytest.mark.parametrize(
    "given, why",
    [
        ((90, 192, 128, True, True), None),
        ((80, 192, 128, False, False), "heads of size 192 .legal: up to 128 in total"),
        ((80, 64, 136, False, False), "values of size 136 .legal: up to 128"),
        (
            (80, 128, 128, True, False),
            "128 plus 13 entries for ALiBi and segments .legal: up to 128",
        ),
        ((75, 64, 64, False, False), "sm_75 .legal: sm_80, Ampere, or later"),
    ],
)
def test_why(given, why):
    found = refused(*given)
    assert found is None if why is None else re.search(why, found)


def test_what_it_says_depends_on_length_and_dtype():
    on_ampere = functools.partial(refused, 80, 112, 112, True, False)
    assert on_ampere(length=2048) is on_ampere(length=32767) is None
    assert on_ampere(length=32768) is not None
    assert refused(90, 64, 64, True, False, dtype="float32").startswith("data vectors of float32")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_soft_caps_are_online_everywhere(capability):
    why = refused(capability, 64, 64, False, False, cap=50.0)
    assert why == "a soft cap on logits, 50.0 (legal: None)"


@pytest.mark.parametrize(
    "kind, capability",
    [
        ("NVIDIA A100-SXM4-40GB", 80),
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA GH200 480GB", 90),
        ("NVIDIA B200", 100),
        ("NVIDIA GB300", 103),
        ("Tesla V100-SXM2-16GB", 70),
    ],
)
def test_capabilities_by_kind(kind, capability):
    assert Target(kind).capability == capability


@pytest.mark.compile
@pytest.mark.parametrize(
    "target, size, documents",
    [("sm_80", 128, True), ("sm_80", 112, True), ("sm_90", 128, True), ("sm_100", 128, True)],
)
def test_programs_have_the_form_of_the_table(target, size, documents):
    """cuDNN's two calls; or no call, and no array of as many logits as all of a row's."""
    heads, tokens = 16, 2048
    qkv = jax.ShapeDtypeStruct((1, tokens, 3 * heads, size), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def gradient(qkv, ids):
        op = lambda qkv: causal_attention(qkv, scale=0.1, segment_ids=ids)
        out, pullback = jax.vjp(op, qkv)
        return pullback(out)[0]

    capability = int(target.removeprefix("sm_"))
    by_cudnn = refused(capability, size, size, documents, False) is None
    lower = functools.partial(cuda.lowered, gradient, qkv, ids, target=target)
    if by_cudnn:
        text = lower()
    else:
        with pytest.warns(UserWarning, match="no cuda kernel for this call"):
            text = lower()
    calls = set(re.findall(r"custom_call @(__cudnn\S+?)\(", text))
    of_cudnn = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert calls == (of_cudnn if by_cudnn else set())
    blocks = re.findall(r"tensor<1x16x1x(\d+)x(\d+)xf32>", text)
    assert (("512", "512") in blocks) is not by_cudnn
    assert not re.search(rf"x{tokens}xf32>", text) or by_cudnn


@pytest.mark.compile
def test_memory_on_a_gpu_that_cudnn_does_not_serve():
    """Of a layer of 16 heads of 128 with documents, on an A100: MiB beside operands and results."""

    def temporary(tokens, module=plain):
        given = AttentionOperands(jax.ShapeDtypeStruct((1, tokens, 48, 128), jnp.bfloat16), 0.1)
        given = given._replace(segment_ids=jax.ShapeDtypeStruct((1, tokens), jnp.int32))
        d_out = jax.ShapeDtypeStruct((1, tokens, 16, 128), jnp.bfloat16)

        def run(qkv, ids, d_out):
            arrays = given._replace(qkv=qkv, segment_ids=ids)
            out, sums = module.attention_forward(arrays, kv_heads=16)
            return module.attention_backward(
                arrays, ResultsAndCotangent(out, sums, d_out), kv_heads=16
            )[0]

        program = cuda.compiled(run, given.qkv, given.segment_ids, d_out, target="sm_80")
        # As many steps as there are pairs of blocks: the host is not asked whether to go on.
        steps = {int(n) for n in re.findall(r'known_trip_count":\{"n":"(\d+)"', program.as_text())}
        blocks = tokens // 512
        assert module is reference or steps == {blocks * (blocks + 1) // 2}
        return program.memory_analysis().temp_size_in_bytes / 2**20

    assert temporary(2048) < 150 and temporary(4096) < 250
    assert temporary(2048, reference) > 400
