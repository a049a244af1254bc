"""sglang-scout: agent-aware KV cache runtime for SGLang, as a plug-in on the stock wheel.

Importing this package imports neither SGLang nor torch; every adapter is a submodule.
"""

__version__ = "0.1.0"
