"""Starting SGLang servers, from a checkout (this is not part of the wheel).

``python -m launch`` is the command line, :class:`launch.server.Server` what tests and benchmarks use, and
``launch.tiny_model`` makes a model without a download.
"""
