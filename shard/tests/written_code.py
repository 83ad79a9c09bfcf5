"""Writes down the code of kernels: a process of its own, since numba compiles for one processor in
each.

`python -m shard.tests.written_code TRIPLE FOLDER DTYPE [NAME ...]`: of the kernels for models of a
type, those with these names, or all; NAME.ll in LLVM's language and NAME.s in the processor's. All
is compiled as on machines of the kind TRIPLE, and may not run here. Fails if code calls what there
is not. Prints how many functions were written.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from llvmlite import binding

# Where a function begins; and of ARM, what is called, with or without coming back.
_DEFINED = re.compile(r"^([\w.$]+):", re.MULTILINE)
_CALLED = re.compile(r"^\s+bl?\s+([A-Za-z_][\w.$]*)$", re.MULTILINE)


def main(triple: str, folder: str, dtype: str, names: Sequence[str]) -> None:
    """See above."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    # Whom numba asks what it compiles for.
    binding.get_process_triple = lambda: triple
    import torch
    from numba.np.ufunc.parallel import _launch_threads
    from text_generation_shard.device.cpu.kernels import compile, processor

    assert processor.target()[0] == triple
    # What loops in threads call is known from then on.
    _launch_threads()
    count = 0
    for kernel in compile._kernels(compile.Wanted(getattr(torch, dtype), None, True, True)):
        name = kernel.function.__name__
        if names and name not in names:
            continue
        kernel.compile()
        libraries = [kernel.function.overloads[taken].library for taken in kernel.signatures]
        language = "\n".join(library.get_llvm_str() for library in libraries)
        code = "\n".join(library.get_asm_str() for library in libraries)
        for ending, text in (("ll", language), ("s", code)):
            (Path(folder) / f"{name}.{ending}").write_text(text, encoding="utf-8")
        count += len(libraries)
        called = set(_CALLED.findall(code)) - set(_DEFINED.findall(code))
        missing = {call for call in called if not binding.address_of_symbol(call)}
        assert not missing, f"{name} calls {missing}"
    print(count)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
