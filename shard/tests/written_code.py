"""Writes the code of kernels to files. A separate process, because numba compiles for one processor
per process.

`python -m shard.tests.written_code TRIPLE FOLDER DTYPE [NAME ...]`: the kernels for models of this
dtype with these names, or all; NAME.ll has LLVM IR and NAME.s assembly. Code is compiled for
TRIPLE, and may not run here. Fails if code calls a missing function. Prints the number of
functions.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from llvmlite import binding

# Beginnings of functions; and on ARM, calls and tail calls.
_DEFINED = re.compile(r"^([\w.$]+):", re.MULTILINE)
_CALLED = re.compile(r"^\s+bl?\s+([A-Za-z_][\w.$]*)$", re.MULTILINE)


def main(triple: str, folder: str, dtype: str, names: Sequence[str]) -> None:
    """See above."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    # Where numba looks up its target.
    binding.get_process_triple = lambda: triple
    import torch
    from numba.np.ufunc.parallel import _launch_threads
    from text_generation_shard.device.cpu import kernels
    from text_generation_shard.device.cpu.kernels import compile

    assert kernels.target()[0] == triple
    # From here on, functions called by parallel loops are declared.
    _launch_threads()
    count = 0
    wanted = compile.Wanted(getattr(torch, dtype), None, has_ranks=True)
    for function, signatures in compile._kernels(wanted).items():
        name = function.__name__
        if names and name not in names:
            continue
        for signature in signatures:
            function.compile(signature)
        libraries = [function.overloads[signature].library for signature in signatures]
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
