"""Starting SGLang servers: the command line (``python -m launch``), the :class:`launch.server.Server` context manager that
tests and benchmarks use, and the tiny model that needs no download. Runs from a checkout; not part of the wheel."""
