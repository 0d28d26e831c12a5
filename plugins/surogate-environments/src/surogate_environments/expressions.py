"""Arithmetic expressions: numbers, ``+ - * /`` and parentheses, with exact results."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fractions import Fraction

LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**30
"""Numbers and results beyond this are refused."""


class ExpressionError(ValueError):
    """The text is no expression, or it has no result; the message is one line for the model."""


def evaluate(text: str) -> Fraction:
    """The value of an expression; raises `ExpressionError`."""
    return _value(_parse(text))


def numbers_of(text: str) -> list[int]:
    """The numbers that an expression uses, in their order; raises `ExpressionError`."""
    return list(_numbers(_parse(text)))


def _parse(text: str) -> ast.expr:
    plain = text.strip().replace("×", "*").replace("÷", "/").replace("\u2212", "-")
    if len(plain) > LONGEST:
        raise ExpressionError(f"the expression is longer than {LONGEST} characters")
    try:
        return ast.parse(plain, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("this is no expression of numbers, + - * / and parentheses") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = Fraction(node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        found = Fraction(str(node.value)) if abs(node.value) <= LARGEST else Fraction(LARGEST + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        found = _result(node.op, _value(node.left), _value(node.right))
    else:
        raise ExpressionError("this is no expression of numbers, + - * / and parentheses")
    if abs(found) > LARGEST or found.denominator > LARGEST:
        raise ExpressionError("a number is too large")
    return found


def _result(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if not right:
        raise ExpressionError("division by zero")
    return left / right


def _numbers(node: ast.expr) -> Iterator[int]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant):
            if type(part.value) is not int:
                raise ExpressionError("only whole numbers can be used")
            yield part.value


def shown(value: Fraction) -> str:
    """A whole number, or a decimal number of at most ten digits after the point."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10f}".rstrip("0").rstrip(".")
