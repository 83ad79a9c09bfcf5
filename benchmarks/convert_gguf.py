"""Runs llama.cpp's own converter on the benchmark's checkpoint.

The converter identifies a tokenizer by a hash of its output for a sample text, and refuses unknown
ones such as the benchmark's. Its pre-tokenizer is GPT-2's, so the converter gets that name.
"""

import argparse
import importlib
import sys
from pathlib import Path


def main() -> None:
    """Converts the directory given on the command line to bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path, help="the source tree of llama.cpp")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.llama_cpp))
    converter = importlib.import_module("convert_hf_to_gguf")
    model = importlib.import_module("conversion.llama").LlamaModel
    model.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    model.set_vocab = lambda self: self._set_vocab_gpt2()
    sys.argv = [sys.argv[0], "--outtype", "bf16", "--outfile", str(options.output)]
    sys.argv += [str(options.checkpoint)]
    converter.main()


if __name__ == "__main__":
    main()
