"""Platform plug-in: lets the stock SGLang wheel serve on a plain CPU (no AVX-512, no AMX, no GPU).

SGLang calls :func:`activate` (entry point group ``sglang.srt.platforms``) when it first asks for its platform, and
:func:`load` (group ``sglang.srt.plugins``) at the start of every process. Both return at once, importing nothing,
unless ``SGLANG_USE_CPU_ENGINE=1`` is set: the same switch, read the same way, that makes SGLang choose its own CPU
platform. A GPU server with this package installed must not notice it.

What each seam is for is told in its module: ``torchvision_ops``, ``kernel_stub``, ``hicache``, ``attention``.
"""

import os

SWITCH = "SGLANG_USE_CPU_ENGINE"


def wanted() -> bool:
    """True when this process was asked to run SGLang's CPU engine (``SGLANG_USE_CPU_ENGINE=1`` exactly)."""
    return os.environ.get(SWITCH, "0") == "1"


def activate() -> None:
    """Make ``import sglang...`` possible on a plain CPU; runs before SGLang imports torchvision and sgl_kernel.

    Always returns None: "no platform of mine", so SGLang goes on to choose its in-tree CPU platform. Do not select it
    with ``SGLANG_PLATFORM=scout_cpu``: SGLang treats None from a selected plug-in as missing hardware.
    """
    if not wanted():
        return
    from . import kernel_stub, torchvision_ops

    torchvision_ops.declare()
    kernel_stub.install()


def load() -> None:
    """Register the hooks of the CPU engine: host tier copies (``hicache``) and extend attention (``attention``)."""
    if not wanted():
        return
    from . import attention, hicache

    hicache.install()
    attention.install()
