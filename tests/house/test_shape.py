"""A constructor takes at most 7 arguments, and a class with state has at most 15 attributes, in Python and in C++.

`python -m tests.house.shape` prints the worst.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest
from shapes import Shape, shapes
from sources import sources

from tests.house.shape import NO_PRODUCT, main, product

MOST_ARGUMENTS, MOST_ATTRIBUTES = 7, 15


def breaches(counts: Iterable[tuple[Shape, int]], most: int) -> list[str]:
    """The classes that exceed the limit."""
    return [f"{shape.key}: {count}, at most {most}" for shape, count in counts if count > most]


@pytest.fixture(scope="module")
def ours() -> list[Shape]:
    return shapes(product(sources()))


def test_a_constructor_takes_few_arguments(ours: list[Shape]) -> None:
    found = breaches(((one, one.arguments) for one in ours), MOST_ARGUMENTS)
    assert not found, "\n".join(["", *found])


def test_a_class_has_few_attributes(ours: list[Shape]) -> None:
    found = breaches(((one, one.attributes) for one in ours), MOST_ATTRIBUTES)
    assert not found, "\n".join(["", *found])


def shape_of(path: str, text: str) -> tuple[str, int, int]:
    one, = shapes({PurePosixPath(path): text})
    return one.name, one.arguments, one.attributes


@pytest.mark.parametrize(("text", "arguments", "attributes"), [
    ("class A:\n    def __init__(self, a, /, b, *c, d, **e):\n        self.a, (self._b, self.c) = a, b\n", 5, 3),
    ("class A:\n    a: int = 0\n    N: ClassVar[int] = 1\n    def f(self):\n        self.b += self.c\n", 0, 2),
    ("class A:\n    def f(self):\n        with x() as self.a:\n            for self.b in y: pass\n", 0, 2),
    ("class A:\n    @classmethod\n    def f(cls):\n        cls.a = 1\n    def g(self, b):\n        b.b = 1\n", 0, 0),
    ("@dataclass(slots=True)\nclass A:\n    a: int\n    b: int\n    def f(self):\n        self.b = 1\n", 2, 2),
    ("class A(msgspec.Struct):\n    a: int\n    def f(self):\n        self.a = 1\n", 1, 1),
])
def test_a_python_class_is_measured(text: str, arguments: int, attributes: int) -> None:
    assert shape_of("kvdock/x.py", text) == ("A", arguments, attributes)


@pytest.mark.parametrize("text", [
    "@dataclass(frozen=True)\nclass A:\n    a: int\n", "class A(NamedTuple):\n    a: int\n",
    "class A(msgspec.Struct, frozen=True):\n    a: int\n    def f(self):\n        return self.a\n",
    "class A(Generic[T], Protocol[T]):\n    a: int\n", "class A(enum.Enum):\n    a = 1\n",
])
def test_a_value_is_not_measured(text: str) -> None:
    assert shapes({PurePosixPath("kvdock/x.py"): text}) == []


def test_what_inherits_from_a_value_is_one() -> None:
    files = {"kvdock/b.py": "class B(A):\n    b: int\n", "kvdock/a.py": "class A(msgspec.Struct):\n    a: int\n"}
    assert shapes({PurePosixPath(path): text for path, text in files.items()}) == []


def test_a_native_class_is_measured() -> None:
    text = """
    // class Comment { int no_; };
    enum class Kind { one_ };
    template <typename T>
    class A final : public Base<int> {
     public:
      explicit A(const std::map<int, int>& a, std::function<void(int, int)> b, int c = f(1, 2))
          : a_(a), b_{b} { int local_ = 1; }
      A() = default;
      bool f(int x_) const { return x_; }
      int g() const;
      operator bool() const { return a_; }
      int plain;
     private:
      std::function<void(int)> a_;
      std::map<int, int> b_{};
      int c_ = 0, d_[2], e_;
    };
    """
    assert shape_of("csrc/x.h", text) == ("A", 3, 5)


def test_a_breach_is_found() -> None:
    wide = Shape(PurePosixPath("kvdock/x.py"), 1, "Wide", 9, 20)
    assert breaches([(wide, wide.arguments)], 7) == ["kvdock/x.py Wide: 9, at most 7"]
    assert breaches([(wide, wide.arguments)], 9) == []


def test_the_shape_is_printed_as_json(
    ours: list[Shape], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shape", "--json"])
    main()
    found = json.loads(capsys.readouterr().out)
    files = product(sources())
    assert found["max_attributes"]["count"] == max(one.attributes for one in ours)
    path, _, line = found["max_attributes"]["where"].partition(":")
    assert f" {found['max_attributes']['class']}" in files[PurePosixPath(path)].splitlines()[int(line) - 1]
    assert found["product_lines"] == sum(len(text.splitlines()) for text in files.values())
    assert not NO_PRODUCT.intersection(path.parts[0] for path in files)
    assert (found["unresolved_imports"], found["circles"]) == (0, 0)
