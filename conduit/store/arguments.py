"""Python objects as arguments of kernels: their address and nothing more.

Handing an address over as a Python int costs a kernel about 13 ns to convert; an object costs nothing. A kernel must not
create, change or release the object; the caller keeps it alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from conduit.jit import inner
from conduit.store.atomics import peek_i64

ARRAY_DATA = 16
"""Offset of the data pointer in an array (numpy's public `PyArrayObject_fields`)."""


class ObjectType(types.Type):
    """numba type of such an argument."""

    def __init__(self) -> None:
        super().__init__(name="conduit.object")


@register_model(ObjectType)
class _ObjectModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64))


@unbox(ObjectType)
def _take_address(kind: Any, value: Any, context: Any) -> Any:
    return NativeValue(context.builder.ptrtoint(value, ir.IntType(64)))


@intrinsic
def address_of(typingctx: Any, value: Any) -> Any:
    """Address of the object itself, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    return types.int64(ObjectType()), codegen


@inner
def data_of(array):  # type: ignore[no-untyped-def]
    """Address of an array's first element; the object must be a numpy array."""
    return peek_i64(address_of(array) + ARRAY_DATA)
