"""The tree tests run SGLang's own cache in this process, on the CPU: no server, no model."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
