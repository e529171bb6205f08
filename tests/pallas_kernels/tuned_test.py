"""Tables of block sizes: what is read of them, which entry serves, and for which device."""

import ast
import dataclasses
import functools
import hashlib
import json
import warnings
from pathlib import Path

import jax
import pytest

import pallas_kernels
from pallas_kernels import tuned
from pallas_kernels.key_vector import triton_gpu
from pallas_kernels.key_vector.block_sizes import KERNELS, BlockSizes, Sizes, default_block_sizes
from pallas_kernels.shapes import RMT_305M
from pallas_kernels.target import platform_of
from pallas_kernels.tuned import Entry, Table

SIZES = Sizes(*RMT_305M, "bfloat16", "bfloat16")
KEY = dataclasses.asdict(SIZES)
FORWARD = KERNELS["key_vector_forward"]
BLOCKS = BlockSizes(128, 64, 2, 2)
V5E = "tpu_v5_lite"


def entry(tokens: int = 512, with_: BlockSizes = BLOCKS, **changes) -> Entry:
    made = Entry(
        V5E,
        FORWARD.name,
        FORWARD.version,
        tuned.items(KEY),
        tokens,
        tuned.items(tuned.fields(with_)),
        "estimated",
    )
    return dataclasses.replace(made, **changes)


def mesh_of(kind: str) -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="any")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((1,), ("all",), axis_types=auto, abstract_device=device)


def chosen(tokens: int = 512, kind: str = "TPU v5 lite") -> BlockSizes:
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        default = default_block_sizes("forward", SIZES, tokens)
        return tuned.look_up(FORWARD, KEY, tokens, default)


def default(tokens: int = 512) -> BlockSizes:
    return default_block_sizes("forward", SIZES, tokens)


@pytest.fixture(autouse=True)
def anew():
    tuned.clear_caches()
    yield
    tuned.clear_caches()


def test_an_entry_serves_its_device_key_and_tokens_near_it():
    table = Table("mine", (entry(), entry(2048, dataclasses.replace(BLOCKS, read_unroll=8))))
    assert chosen() == default()
    with tuned.tuned(table):
        assert chosen() == BLOCKS
        assert chosen(kind="TPU v6 lite") == default()
        assert chosen(kind="NVIDIA H200") == default()
        assert chosen(kind="cpu") == default()
        assert chosen(256) == BLOCKS
        assert chosen(1024).read_unroll == 2  # as near to one as to the other: the first
        assert chosen(1500).read_unroll == 8
        assert chosen(64 * 512) == default(64 * 512)
        with tuned.tuned(Table("none"), Table("inner", (entry(with_=default()),))):
            assert chosen() == default()
    assert chosen() == default()


def test_blocks_that_do_not_fit_fewer_tokens_are_left_to_the_next():
    wide = dataclasses.replace(BLOCKS, tokens=256)
    with tuned.tuned(Table("mine", (entry(256, wide), entry(512)))):
        assert chosen(256) == wide
        assert chosen(128) == BLOCKS


def test_a_table_for_one_number_of_tokens_alone():
    with tuned.tuned(Table("run", (entry(),), exact=True)):
        assert (chosen(), chosen(1024)) == (BLOCKS, default(1024))


@pytest.mark.parametrize(
    "changes, why",
    [
        (
            {"kernel_version": 99},
            "version 99 of the kernel, whose version is now 6; run recipes.autotune",
        ),
        ({"blocks": (("tokens", 128),)}, "blocks have the fields tokens; legal: tokens, slab"),
        ({"blocks": tuned.items(tuned.fields(BLOCKS) | {"keep": 1})}, "keep=1"),
        ({"blocks": tuned.items(tuned.fields(BLOCKS) | {"tokens": 100})}, "tiles of 100 tokens"),
        (
            {"blocks": tuned.items(tuned.fields(BLOCKS) | {"slab": 48})},
            "slabs of 48 entries .legal: divisors of V=64",
        ),
        ({"blocks": tuned.items(tuned.fields(BLOCKS) | {"tokens": 0})}, "tokens=0"),
    ],
)
def test_an_entry_that_cannot_serve_is_passed_over_with_one_warning(changes, why):
    with tuned.tuned(Table("mine", (entry(**changes),))):
        with pytest.warns(UserWarning, match=f"^mine: the entry for key_vector_forward.*{why}"):
            assert chosen() == default()
        assert chosen() == default()  # and is not told of again


def test_a_table_is_what_it_was_written_as():
    table = Table(
        "mine", (entry(seconds=(1e-3, 2e-3), default_seconds=(3e-3,), date="2026-11-22"),)
    )
    text = table.merged([entry(1024)]).text()
    assert text.count("\n") == 4  # a line an entry
    read = tuned.parse(text, "mine")
    assert read == table.merged([entry(1024)]) and not read.faults
    again = read.merged([entry(with_=default())])
    assert [dict(e.blocks)["read_unroll"] for e in again.entries] == [default().read_unroll, 2]


@pytest.mark.parametrize(
    "content, fault",
    [
        ("{", "mine is ignored"),
        ("[" * 100_000, "mine is ignored"),
        ('{"format": 2, "entries": []}', 'not a JSON object with "format": 1'),
        ('{"format": 1}', 'no list "entries"'),
        ('{"format": 1, "entries": [1]}', "entry 1 is ignored: the entry is not a JSON object"),
        ('{"format": 1, "entries": [{}]}', "entry 1 is ignored: the entry has no field 'device'"),
    ],
)
def test_what_is_no_table_is_an_empty_one(content, fault):
    table = tuned.parse(content, "mine")
    assert table.entries == () and fault in table.faults[0]


@pytest.mark.parametrize(
    "field, value",
    [
        ("device", "../up"),
        ("kernel_version", 1.0),
        ("tokens", 0),
        ("key", [1]),
        ("blocks", {"tokens": None}),
        ("blocks", {}),
        ("source", "guessed"),
        ("seconds", [float("nan")]),
        ("date", 3),
        ("colour", "red"),
    ],
)
def test_a_bad_entry_costs_itself_alone(field, value):
    good, bad = entry().json(), entry(1024).json() | {field: value}
    table = tuned.parse(json.dumps({"format": 1, "entries": [bad, good]}), "mine")
    assert table.entries == (entry(),)
    assert table.faults[0].startswith("mine: entry 1 is ignored: ")


def test_the_users_file_comes_before_the_packages(tmp_path, monkeypatch):
    file = tmp_path / "table.json"
    monkeypatch.setenv("RMT_TPU_TUNED", str(file))
    with pytest.warns(UserWarning, match="table.json does not exist"):
        assert chosen() == default()
    package = dataclasses.replace(BLOCKS, read_unroll=4)
    shipped = {(V5E, FORWARD.name): Table("package", (entry(with_=package),))}
    table_of = functools.cache(lambda *where: shipped.get(where, Table("")))
    monkeypatch.setattr("pallas_kernels.tuned.lookup.package_table", table_of)
    assert chosen() == package
    before = tuned.fingerprint()
    file.write_text(Table("", (entry(),)).text())
    tuned.clear_caches()
    assert chosen() == BLOCKS and tuned.fingerprint() != before
    file.write_text("{")
    tuned.clear_caches()
    with pytest.warns(UserWarning, match="table.json is ignored"):
        assert chosen() == package
    monkeypatch.setenv("RMT_TPU_TUNED", "off")
    assert chosen() == package and tuned.fingerprint() == before
    monkeypatch.delenv("RMT_TPU_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert chosen() == package
    (tmp_path / "rmt_tpu").mkdir()
    (tmp_path / "rmt_tpu" / "tuned.json").write_text(Table("", (entry(),)).text())
    tuned.clear_caches()
    assert chosen() == BLOCKS


def test_files_elsewhere_are_read_by_who_can(monkeypatch):
    monkeypatch.setenv("RMT_TPU_TUNED", "gs://bucket/table.json")
    monkeypatch.setattr(tuned.lookup, "READERS", {})
    with pytest.warns(UserWarning, match="gs:// paths can be read only if rmt_tpu is imported"):
        assert chosen() == default()
    read = {"gs": lambda url: Table("", (entry(),)).text().encode()}
    monkeypatch.setattr(tuned.lookup, "READERS", read)
    tuned.clear_caches()
    assert chosen() == BLOCKS


ARGS = tuple(RMT_305M.site((1, 512)))


def lowered_blocks(kind: str, *tables: Table) -> list[tuned.Look]:
    """What is looked up when a call is lowered for a TPU, on this machine."""
    with jax.sharding.use_abstract_mesh(mesh_of(kind)), tuned.tuned(*tables):
        with tuned.collecting() as looks:
            CALL.trace(*ARGS).lower(lowering_platforms=("tpu",))
    return looks


CALL = jax.jit(pallas_kernels.store_norm_retrieve)


def test_a_program_for_a_tpu_takes_that_tpus_entry_whatever_machine_compiles_it():
    table = Table("mine", (entry(),))
    (look,) = lowered_blocks("TPU v5 lite", table)
    assert (look.chosen, look.source, look.table) == (BLOCKS, "estimated", "mine")
    assert look.entry() == entry(table="mine")
    (look,) = lowered_blocks("TPU v6 lite", table)
    assert (look.chosen, look.source) == (default(), "heuristic")
    # What was traced without a table is traced again with one, and the other way round.
    (look,) = lowered_blocks("TPU v5 lite")
    assert look.chosen == default()


def winner(kernel: str, implementation: str) -> Entry:
    """An entry for an H200 that names the fastest implementation of a kernel."""
    found = tuned.KERNELS["cuda", kernel]
    key = tuned.items({**RMT_305M._asdict(), "dtype": "bfloat16"})
    size = "nvidia_h200", found.name, found.version, key, 512
    return Entry(*size, (), "measured", implementation=implementation)


def on_a_gpu(*implementation: str) -> list[str]:
    """Kernels that a call takes unasked on an H200, with an entry that names an implementation."""
    made = [winner("key_vector_forward", name) for name in implementation]
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")), tuned.collecting() as looks:
        with tuned.tuned(Table("mine", tuple(made))):
            jax.eval_shape(pallas_kernels.store_norm_retrieve, *ARGS)
    return [look.kernel.name for look in looks]


def test_on_a_gpu_the_kernel_is_taken_where_a_table_says_that_it_wins(caplog):
    assert on_a_gpu("triton") == ["key_vector_forward"]
    assert on_a_gpu("xla") == [] and not caplog.records
    assert on_a_gpu() == on_a_gpu() == []
    (record,) = caplog.records  # once
    assert "using plain XLA instead of the kernels on NVIDIA H200" in record.getMessage()
    assert "recipes.autotune --device" in record.getMessage()


@pytest.mark.parametrize("backward", ["triton", "xla"])
def test_an_int16_residual_is_written_and_undone_by_one_implementation(backward):
    """Sums in another order would not undo a write exactly."""
    given = RMT_305M.backward((1, 512), "bfloat16", "int16")
    made = winner("key_vector_forward", "triton"), winner("key_vector_backward", backward)
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")), tuned.tuned(Table("mine", made)):
        won = [triton_gpu.wins("forward", given.site), triton_gpu.wins("backward", given)]
        others = RMT_305M.site((1, 512), "bfloat16", "bfloat16")
        assert triton_gpu.wins("forward", others)
    assert won == [backward == "triton"] * 2


def test_a_search_finds_the_kernels_of_an_int16_residual():
    """Writes have the default blocks, whatever a table lists; reads have those of the table."""
    given = RMT_305M.backward((1, 512), "bfloat16", "int16")
    found, made = {}, []
    for name, options in {
        "key_vector_forward": {},
        "key_vector_backward": {},
        "key_vector_read": {"R": 0},
    }.items():
        key = RMT_305M._replace(**options)._asdict() | {"dtype": "bfloat16"}
        kernel = tuned.KERNELS["cuda", name]
        default = triton_gpu.default_blocks(name, tokens=512, **key)
        found[name] = default._replace(stages=default.stages + (name == "key_vector_read"))
        blocks = tuned.items(default._replace(stages=default.stages + 1)._asdict())
        made.append(
            Entry("nvidia_h200", name, kernel.version, tuned.items(key), 512, blocks, "measured",
                  implementation="triton")
        )  # fmt: skip

    def run(given):
        stored, _, statistics = triton_gpu.forward(given.site)
        site = given.site._replace(residual=stored)
        triton_gpu.backward(given._replace(site=site, statistics=statistics))
        X, *_, gain, read_keys = site
        return pallas_kernels.norm_retrieve(X, gain, read_keys, dtype="bfloat16")

    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")), tuned.collecting() as looks:
        with tuned.tuned(Table("mine", tuple(made))):
            jax.eval_shape(run, given)
    assert {look.kernel.name: look.chosen for look in looks} == found


# A hash of the code that a kernel runs, without comments, and the version of its entries. Where the
# first changes, entries that were tuned for what was there before may not be the best, or mean
# something else: count the version in `Kernel.version` up, and put both here.
SOURCES = {
    ("tpu", "key_vector"): (
        6,
        "d2bfb995a31fa659",
        "mosaic_tpu_kernels.py",
        "mosaic_tpu_keys.py",
        "../products.py",
    ),
    ("tpu", "depth_attention"): (
        1,
        "789a397be9ff7e4f",
        "mosaic_tpu_kernels.py",
        "mosaic_tpu_tiles.py",
        "mosaic_tpu_merge_kernels.py",
        "../products.py",
    ),
    ("tpu", "attention"): (
        2,
        "375181c5a587dff7",
        "mosaic_tpu_whole.py",
        "mosaic_tpu_rows.py",
        "../products.py",
    ),
    ("tpu", "attention_blocks"): (
        3,
        "9057369ef537f5ce",
        "mosaic_tpu_blocks.py",
        "mosaic_tpu_masks.py",
        "mosaic_tpu_pairs.py",
        "mosaic_tpu_rows.py",
        "../products.py",
    ),
    ("cuda", "key_vector"): (1, "2e44f1354168877e", "triton_gpu_kernels.py", "../triton.py"),
    ("cuda", "depth_attention"): (1, "697642d6a772e75a", "triton_gpu_kernels.py"),
}


def code(file: Path) -> str:
    """Return the source without comments and docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                del body[0]
    return ast.unparse(tree)


@pytest.mark.parametrize("platform, op", SOURCES)
def test_a_kernel_that_has_changed_has_another_version(platform, op):
    version, known, *files = SOURCES[platform, op]
    causal = dict.fromkeys(("attention", "attention_blocks"), "causal_attention")
    folder = Path(pallas_kernels.__file__).parent / causal.get(op, op)
    text = "".join(code(folder / name) for name in files)
    longest = lambda p, n: max(
        (o for q, o in SOURCES if q == p and n.startswith(o)), key=len, default=None
    )
    kernels = [k for at, k in tuned.KERNELS.items() if at[0] == platform and longest(*at) == op]
    assert kernels and {k.version for k in kernels} == {version}
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == known


def test_what_is_shipped_is_legal():
    for device, name in tuned.shipped():
        kernel = tuned.KERNELS[platform_of(device), name]
        table = tuned.package_table(device, name)
        assert table.entries and not table.faults
        for shipped in table.entries:
            assert (shipped.device, shipped.kernel) == (device, name)
            assert tuple(sorted(kernel.key)) == tuple(name for name, _ in shipped.key)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert tuned.usable(shipped, kernel, shipped.tokens, table.name) is not None
