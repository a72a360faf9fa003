"""Kernels compiled to object files: the same numba sources, optimised for each instruction set.

numba types and lowers a function once; LLVM then optimises the whole of it, all that it calls inlined, once for each instruction set. Of
what numba makes only the machine code of kernels is kept; what calls it is conduit.native.compile.wrappers'. So the objects refer to CPython's
stable ABI and the C library, and to nothing of numba.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conduit.native.compile import wrappers
from conduit.native.compile.declare import Declared, name_of
from conduit.native.compile.library import digest_of

_RUNTIME = ("NRT_", "numba_", "_ZN")
"""How the names begin of what only numba brings."""
_LOWEST = "x86-64-v3"
"""What numba's own passes over single functions are held to; it is in every instruction set that libraries are made for."""


def hold() -> None:
    """Hold numba to an instruction set rather than to this processor; before it is imported.

    Raises:
        RuntimeError: It has been imported.
    """
    if "numba" in sys.modules:
        raise RuntimeError("Expected a process that has not imported numba, which is held to this processor otherwise")
    os.environ |= {
        "NUMBA_CPU_NAME": _LOWEST,
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_DISABLE_INTEL_SVML": "1",
        "NUMBA_DISABLE_JIT": "0",
    }


def _no_executable(*_: Any) -> Any:
    return [].append  # a C function, each time another


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Compiler:
    """Compiles kernels and callbacks to object files.

    Args:
        instruction_sets: Each function is compiled for each of them.
        folder: Where the objects go, to FOLDER/INSTRUCTIONS/NAME.o.
        prefix: First part of their names.
    """

    def __init__(self, instruction_sets: Iterable[str], folder: Path, prefix: str) -> None:
        hold()
        import llvmlite.binding as llvm
        from numba.core import codegen
        from numba.core.registry import cpu_target

        self._llvm = llvm
        self._folder, self._prefix, self._count = folder, prefix, 0
        self._target = cpu_target
        context = cpu_target.target_context
        # nothing is run here: no machine code is made in memory, nobody calls numba's wrappers, and what is called is optimised with
        # what calls it
        context.get_executable = _no_executable
        context.create_cpython_wrapper = context.create_cfunc_wrapper = _nothing
        self._optimise = codegen.CPUCodeLibrary._optimize_final_module
        codegen.CPUCodeLibrary._optimize_final_module = _nothing
        self._codegen = context.codegen()
        triple = llvm.Target.from_triple(self._codegen._llvm_module.triple)
        self._machines = {
            name: triple.create_target_machine(cpu=name, features="", opt=3, reloc="pic", codemodel="small")
            for name in instruction_sets
        }

    def kernel(self, declared: Declared) -> None:
        """Compile a kernel, as "native NAME", and its method."""
        name = name_of(declared)
        symbol, kinds, library = self._lowered(declared.function, str(declared.signature), declared.options)
        native = f"native {name}"
        library._final_module.get_function(symbol).name = native
        self._emit(library, name, native, wrappers.method(name, native, kinds, nogil=declared.nogil), is_kept=True)

    def callback(self, function: Callable[..., int], signature: str) -> None:
        """Compile a C callback."""
        symbol, kinds, library = self._lowered(function, signature, {})
        text = f"{function.__module__}.{function.__qualname__}"
        code = wrappers.callback(digest_of(function, signature), text, symbol, kinds)
        self._emit(library, text, symbol, code, is_kept=False)

    def text(self, instructions: str, code: str) -> None:
        """Compile LLVM code as it is, for one instruction set."""
        self._write(instructions, self._llvm.parse_assembly(code))

    def _lowered(self, function: Any, signature: str, options: dict[str, Any]) -> tuple[str, list[str], Any]:
        """Symbol of a function, the types of its arguments, and the library in which all lies that it calls."""
        from numba.core import compiler as numba_compiler
        from numba.core.compiler_lock import global_compiler_lock

        from conduit.native.compile.compiler import parse

        flags = numba_compiler.Flags()
        self._target.options.parse_as_flags(flags, {"nopython": True, **options})
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        arguments, result = parse(signature)
        contexts = self._target.typing_context, self._target.target_context
        with global_compiler_lock:
            made = numba_compiler.compile_extra(*contexts, function, arguments, result, flags=flags, locals={})
            made.library._ensure_finalized()
        return made.fndesc.llvm_func_name, re.findall(r"\w+", signature.partition("(")[2]), made.library

    def _emit(self, library: Any, text: str, symbol: str, code: str, *, is_kept: bool) -> None:
        """Write the objects of a function and of what calls it; everything else in them becomes their own."""
        linkages = self._llvm.Linkage
        lowered = library._final_module
        for one in (*lowered.functions, *lowered.global_variables):
            if not one.is_declaration:
                one.linkage = linkages.external if one.name == symbol else linkages.internal
        for instructions, machine in self._machines.items():
            library._final_module = module = lowered.clone()
            self._codegen._tm = machine
            self._optimise(library)
            module.link_in(self._llvm.parse_assembly(code))
            if not is_kept:
                module.get_function(symbol).linkage = linkages.internal
            options = self._llvm.create_pipeline_tuning_options(speed_level=0)
            passes = self._llvm.create_new_module_pass_manager()
            passes.add_global_dead_code_eliminate_pass()
            passes.run(module, self._llvm.create_pass_builder(machine, options))
            module.verify()
            lacking = [one.name for one in module.functions if one.is_declaration and one.name.startswith(_RUNTIME)]
            if lacking:
                raise RuntimeError(f"{text} needs numba's runtime ({', '.join(lacking)}): kernels make no objects")
            self._write(instructions, module)
        library._final_module = lowered

    def _write(self, instructions: str, module: Any) -> None:
        self._count += 1
        folder = self._folder / instructions
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self._prefix}-{self._count}.o").write_bytes(self._machines[instructions].emit_object(module))
