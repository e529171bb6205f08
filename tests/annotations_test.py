"""The packages' annotations are checked while tests run: types, shapes, arguments and outcomes."""

import ast
import dataclasses
import re
from pathlib import Path

import beartype
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError

import pallas_kernels
from rmt_tpu.config import presets
from tests import annotations

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "recipes", "rmt_tpu", "sharding")
# Names of axes are not written like this.
CLASS = re.compile(r"_?[A-Z][a-z]\w*( \| None)?")

checked = annotations.checked(typechecker=beartype.beartype)


@checked
def product(x: Float[np.ndarray, "a b"], y: Float[np.ndarray, "b c"]) -> Float[np.ndarray, "a c"]:
    return x @ y if x[0, 0] == 0 else x


@checked
def repeated(text: str, times: int | None = 2) -> str:
    return text * times if times else None


def test_shapes_of_arguments_and_of_the_outcome():
    x, y = np.zeros((2, 3)), np.zeros((3, 4))
    assert product(x, y).shape == (2, 4)
    with pytest.raises(TypeCheckError, match="Type-check error: .* parameter y=") as error:
        product(x, y[1:])
    assert "b=3" in "".join(error.value.__notes__)
    with pytest.raises(TypeCheckError, match=r"product\(\) return"):
        product(x + 1, y)
    # The names of axes are of one call.
    assert product(y.T, x.T).shape == (4, 2)


def test_types_of_arguments_and_of_the_outcome():
    assert repeated("a") == "aa"
    for wrong in ((2,), ("a", "b"), ("a", 0)):
        with pytest.raises(TypeCheckError, match=r"repeated\(\) (parameter|return)"):
            repeated(*wrong)


def test_functions_of_one_definition_check_what_each_says():
    """Their checks are written once for equal annotations, and call the function they are of."""

    def made(kind, more):
        @checked
        def plus(x: kind) -> kind:
            return x + more

        return plus

    assert (made(int, 1)(1), made(int, 2)(1), made(str, "b")("a")) == (2, 3, "ab")
    for wrong in (lambda: made(str, 1)(1), lambda: made(int, 0.5)(1), lambda: made(int, 3)("a")):
        with pytest.raises(TypeCheckError, match="plus"):
            wrong()


def test_methods_properties_and_fields():
    @checked
    @dataclasses.dataclass
    class Sized:
        size: int

        @checked
        def plus(self, more: int) -> int:
            return self.size + more

        half = property(checked(lambda self: self.size / 2))
        named = staticmethod(repeated)

        @classmethod
        @checked
        def of(cls, text: str):
            return cls(len(text))

    assert (Sized.of("abc").plus(1), Sized(3).half, Sized.named("b")) == (4, 1.5, "bb")
    wrong = (lambda: Sized("3"), lambda: Sized(3).plus("1"), lambda: Sized.of(3))
    for call in wrong:
        with pytest.raises(TypeCheckError):
            call()


def test_names_as_text_are_looked_up():
    @checked
    def make(of: "int", more: "list[Sized] | None" = None) -> "str":
        return str(of)

    assert make(3) == "3"
    with pytest.raises(TypeCheckError):
        make("3")


def test_classes_named_as_text_exist():
    """A method's class has no name yet when the method is made, so a text names it."""
    wrong = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            # Parsing is slow, and most files have no such text.
            if not re.search(f'"{CLASS.pattern}"', source):
                continue
            tree = ast.parse(source)
            known = set(filter(None, map(name_of, ast.walk(tree))))
            for annotation in filter(None, map(annotation_of, ast.walk(tree))):
                texts = (x.value for x in ast.walk(annotation) if isinstance(x, ast.Constant))
                for text in filter(CLASS.fullmatch, filter(is_text, texts)):
                    if text.removesuffix(" | None") not in known:
                        wrong.append(f"{path.relative_to(ROOT)}:{annotation.lineno} {text}")
    assert not wrong


def name_of(node: ast.AST) -> str | None:
    """Return the name that a class or an assignment gives to something."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.name if isinstance(node, ast.ClassDef) else None


def is_text(value) -> bool:
    return isinstance(value, str)


def annotation_of(node: ast.AST) -> ast.expr | None:
    return getattr(node, "annotation", None) or getattr(node, "returns", None)


def test_what_has_no_annotation_is_left_as_it_is():
    plain = lambda x: x
    assert checked(plain) is plain


def test_of_the_packages():
    """Else the import hook has been passed by, and every test would pass with less."""
    with pytest.raises(TypeCheckError):
        presets.preset(3)
    ones = jnp.ones
    with pytest.raises(TypeCheckError, match="V"):
        pallas_kernels.norm_retrieve(ones((2, 3, 4)), ones((3, 5)), ones((2, 3)))


def test_without_them(unannotated):
    assert repeated("a", 3.0 > 2) == "a"
    with pytest.raises(TypeError, match="multiply sequence"):
        repeated("a", "b")
