"""quantize_gguf.py IN.gguf OUT.gguf FORMAT, in llama.cpp's environment."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp


def main() -> None:
    source, out, kind = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.allow_requantize = True
    params.nthread = 2
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    if status:
        sys.exit(f"llama_model_quantize: {status}")


if __name__ == "__main__":
    main()
