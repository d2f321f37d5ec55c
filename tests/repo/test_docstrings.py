"""Every module says what it owns; every public name of a border says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "engine" / "api").glob("*.py"))
BORDERS = (*API, "engine/step.py", "engine/stats.py", "kernels/ops.py")


def test_every_module_has_a_docstring(root: Path) -> None:
    bare = [
        str(path.relative_to(root))
        for room in ("octavo", "server", "engine", "kernels")
        for path in (root / room).rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert bare == []


Definition = ast.FunctionDef | ast.ClassDef


def _public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def _says_all(node: ast.FunctionDef) -> bool:
    """Whether name and types are the whole contract: a protocol's stub, or a one-line property."""
    is_stub = len(node.body) == 1 and isinstance(node.body[0], ast.Expr)
    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    return is_stub or (is_property and len(node.body) == 1)


@pytest.mark.parametrize("path", BORDERS)
def test_every_public_name_of_a_border_has_a_docstring(root: Path, path: str) -> None:
    bare = [
        name
        for name, node in _public_definitions(ast.parse((root / path).read_text()))
        if not ast.get_docstring(node)
        if isinstance(node, ast.ClassDef) or not _says_all(node)
    ]
    assert bare == []


def test_every_op_has_a_docstring(root: Path) -> None:
    """An op's contract is its docstring: shapes, types and what it computes."""
    tree = ast.parse((root / "kernels" / "ops.py").read_text())
    ops = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Ops")
    methods = [member for member in ops.body if isinstance(member, ast.FunctionDef)]
    assert len(methods) >= 10
    assert [method.name for method in methods if not ast.get_docstring(method)] == []


LONG = 15


def _long_undocumented(path: Path) -> Iterator[str]:
    """Public functions and methods of many lines without a docstring; a constructor's is its class's."""
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for body in (tree.body, *(node.body for node in classes if not node.name.startswith("_"))):
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_public = node.name == "__call__" or not node.name.startswith("_")
            is_long = (node.end_lineno or 0) - node.lineno + 1 >= LONG
            if is_public and is_long and not ast.get_docstring(node):
                yield f"{path.name}: {node.name}"


def test_long_public_functions_have_docstrings(root: Path) -> None:
    paths = [root / "engine/models/decoder.py", *sorted((root / "server").glob("*.py"))]
    assert len(paths) > 10
    assert [name for path in paths for name in _long_undocumented(path)] == []
