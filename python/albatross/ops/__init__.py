"""The public ops. Importing this package registers their schemas, fakes and CPU implementations; it opens no library.

`load_native` opens the native library by `_loader`'s choice and so adds the CUDA implementations; the wrappers call it on
the first CUDA tensor, an engine calls it at start so that a machine that cannot run says so before any allocation.
"""

from albatross.ops._loader import NativeLibrary, load_native
from albatross.ops.wkv7 import wkv7_decode, wkv7_prefill

__all__ = ["NativeLibrary", "load_native", "wkv7_decode", "wkv7_prefill"]
