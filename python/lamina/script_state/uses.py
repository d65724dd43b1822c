# SPDX-License-Identifier: Apache-2.0
"""Reads what a function of a script does with names and attributes in its source: reads, sets, or updates them.

An update makes a new value of the old one, in one statement: `self.count += 1`, `mean = 0.9 * mean + x`,
`log.append(x)`.
"""

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

# fmt: off
_READERS = frozenset((
    "len", "sum", "list", "sorted", "max", "min", "any", "all", "tuple", "set", "dict", "iter", "enumerate", "zip",
    "next", "id", "isinstance", "bool", "float", "int", "str", "repr", "print", "hasattr", "getattr",
))
_MUTATORS = frozenset((
    "append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear", "update", "setdefault",
    "add", "discard", "sort", "reverse", "set", "reset", "fill", "seed", "shuffle",
))
# fmt: on


class Use(NamedTuple):
    """One use of a name or an attribute.

    Attributes:
        name: of what is used.
        part: the attribute or the item of it that is used, `...` for an item that the source does not say, None for all
            of it.
        reads, writes: both for an update.
        certain: False where it is handed to something that may do whatever.
        first, last: where its statement begins and ends, as (line, column).
    """

    name: str
    part: object
    reads: bool
    writes: bool
    certain: bool
    first: tuple[int, int]
    last: tuple[int, int]


@functools.cache
def uses(code: CodeType) -> tuple[Use, ...] | None:
    """The uses in a function, and in those that it contains; None where there is no source."""
    functions = _functions(code.co_filename).get((code.co_name, code.co_firstlineno), [])
    if len(functions) > 1:  # lambdas in one line
        functions = [each for each in functions if _is_of(code, each)]
    return tuple(_Uses(functions[0]).updated()) if len(functions) == 1 else None


def updates_here(frame: FrameType, name: str) -> bool:
    """True where the statement that a frame is in makes a new value of `name` of the one that it has."""
    code = frame.f_code
    at = _position(code, frame.f_lasti) or (frame.f_lineno, None)
    for use in uses(code) or ():
        if use.name == name and use.part is None and use.reads and use.writes and use.certain:
            if at[1] is None:
                if use.first[0] <= at[0] <= use.last[0]:
                    return True
            elif use.first <= at <= use.last:
                return True
    return False


def _position(code: CodeType, offset: int) -> tuple[int, int] | None:
    if not hasattr(code, "co_positions"):  # before Python 3.11
        return None
    positions = _positions(code)
    line, _, column, _ = positions[offset // 2] if offset // 2 < len(positions) else (None,) * 4
    return None if line is None or column is None else (line, column)


@functools.cache
def _positions(code: CodeType) -> list[tuple]:
    return list(code.co_positions())


@functools.cache
def _functions(filename: str) -> dict[tuple[str, int], list[ast.AST]]:
    """The functions of a file, by name and first line, as code objects have them."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[tuple[str, int], list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.setdefault((node.name, first), []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
    return found


def _is_of(code: CodeType, function: ast.AST) -> bool:
    """True where a function's code begins within its source."""
    positions = _positions(code) if hasattr(code, "co_positions") else []
    at = next(((line, column) for line, _, column, _ in positions[1:] if line and column), None)
    first, last = (function.body.lineno, function.body.col_offset), (function.end_lineno, function.end_col_offset)
    return at is not None and first <= at <= last


class _Uses:
    def __init__(self, function: ast.AST):
        self._parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self._function = function

    def updated(self) -> Iterator[Use]:
        """The uses. Reading and setting in one statement is an update."""
        found = [use for node in ast.walk(self._function) if (use := self._use(node)) is not None]
        read = {(use.name, use.part, use.first) for use in found if use.reads}
        written = {(use.name, use.part, use.first) for use in found if use.writes}
        for use in found:
            both = {(use.name, use.part, use.first)} & read & written
            yield use._replace(reads=True, writes=True) if both else use

    def _use(self, node: ast.AST) -> Use | None:
        if not isinstance(node, (ast.Attribute, ast.Name)):
            return None
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        statement = self._statement(node)
        first = statement.lineno, statement.col_offset
        end = statement
        if isinstance(statement, (ast.If, ast.While)):
            end = statement.test
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            end = statement.iter
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            end = statement.items[-1].context_expr
        part, reads, writes, certain = self._kind(node)
        return Use(name, part, reads, writes, certain, first, (end.end_lineno, end.end_col_offset))

    def _statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, (ast.stmt, ast.Lambda)):
            node = self._parents[node]
        return node

    def _kind(self, node: ast.Attribute | ast.Name) -> tuple[object, bool, bool, bool]:
        """The part that is used, whether it is read, whether it is written, and whether that is certain."""
        above = self._parents.get(node)
        if not isinstance(node.ctx, ast.Load):
            return None, isinstance(above, ast.AugAssign), True, True
        if isinstance(above, (ast.Attribute, ast.Subscript)) and above.value is node:
            return self._kind_of_part(above)
        if isinstance(above, ast.keyword):
            return None, True, True, above.arg == "out"
        if isinstance(above, ast.Call) and node is not above.func:
            callee = above.func.id if isinstance(above.func, ast.Name) else ""
            if callee in ("setattr", "delattr"):
                return None, False, True, True
            return None, True, callee not in _READERS, callee in _READERS
        alias = isinstance(above, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return, ast.Starred, ast.withitem))
        return None, True, alias, not alias

    def _kind_of_part(self, part: ast.Attribute | ast.Subscript) -> tuple[object, bool, bool, bool]:
        above = self._parents.get(part)
        if isinstance(part, ast.Attribute):
            name: object = part.attr
            if isinstance(above, ast.Call) and above.func is part:
                mutates = name in _MUTATORS or (name.endswith("_") and not name.endswith("__"))
                return None, True, mutates, True
        else:
            name = part.slice.value if isinstance(part.slice, ast.Constant) else ...
        if isinstance(part.ctx, ast.Load):
            return name, True, False, True
        return name, isinstance(above, ast.AugAssign), True, True
