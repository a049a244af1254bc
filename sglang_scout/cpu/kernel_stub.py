"""Stand-in for the compiled ``sgl_kernel``, which has no build for a CPU without AVX-512 (and none on PyPI for any
CPU).

With the CPU engine selected SGLang imports a few ``*_cpu`` names from it without a guard. In 0.5.23 only speculative
decoding calls them; everything else on the CPU path is guarded by ``cpu_has_amx_support()`` and has a torch fallback.
So every name of the stand-in is a function that raises, with its name, when it is called: a path that needs a kernel
fails clearly instead of computing rubbish.
"""

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

VERSION = "0.0.0+scout.cpu.stub"


class _StubModule(types.ModuleType):
    """A module in which every public name exists and refuses to be called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{full}: no such kernel on a plain CPU (sglang_scout.cpu replaces sgl_kernel)")

        missing.__name__ = missing.__qualname__ = name
        setattr(self, name, missing)
        return missing


def _usable_build_present() -> bool:
    """True where a real sgl_kernel that has the CPU functions can be imported (a CUDA wheel lacks them)."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    try:
        real = importlib.import_module("sgl_kernel")
    except Exception as error:  # a CUDA wheel beside a CPU torch fails in its own, varied, ways
        logger.warning("sgl_kernel is installed but does not import here (%s); using the stand-in", error)
    else:
        if hasattr(real, "assign_req_to_token_pool_cpu"):
            return True
        logger.warning("sgl_kernel is installed without its CPU functions; using the stand-in")
    for name in [n for n in sys.modules if n == "sgl_kernel" or n.startswith("sgl_kernel.")]:
        del sys.modules[name]
    return False


def install() -> None:
    """Put the stand-in into ``sys.modules`` unless a usable build is there; calling it again changes nothing."""
    if "sgl_kernel" in sys.modules or _usable_build_present():
        return
    module = _StubModule("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__dict__["__version__"] = VERSION
    module.__path__ = []  # a package without submodules: importing one is an ImportError, which SGLang expects
    sys.modules["sgl_kernel"] = module
