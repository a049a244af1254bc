"""The command that starts a server: checks of what the user gave, and CPU defaults for what they did not."""

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
PORT = 30000
# KV pool of a CPU server, in tokens. Without a limit SGLang sizes the pool by the machine's memory (tens of millions of
# tokens for a tiny model: minutes of zeroing) and nothing would ever be evicted.
CPU_MAX_TOTAL_TOKENS = 16384
# SGLang keeps 10 GiB of RAM out of the host tier's reach and refuses to start below that; 2 GiB is the server itself.
HOST_TIER_MIN_FREE_GIB = 12

# Set to 1: a CPU server keeps SGLang's overlap schedule (see _cpu_flags).
CPU_OVERLAP_ENV = "SGLANG_SCOUT_CPU_OVERLAP"

_MODEL_FLAGS = ("--model-path", "--model")
_HOST_TIER_FLAGS = {"--enable-hierarchical-cache", "--enable-hicache"}


class UsageError(ValueError):
    """What the user asked for cannot work; the text is one line that says why."""


@dataclass(frozen=True)
class Command:
    """A server command: ``argv``, the environment variables added to the caller's, and where it will listen."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    host: str = HOST
    port: int = PORT

    @property
    def url(self) -> str:
        host = HOST if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def shell(self) -> str:
        """The exact command as one line to paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def flag_value(arguments: Sequence[str], *names: str) -> str | None:
    """The last value given for any of these flags (``--flag value`` or ``--flag=value``); None if it is not there."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if name in names:
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            value = inline if equals else following
    return value


def cuda_available(python: str = sys.executable) -> bool:
    """Whether torch sees an NVIDIA or AMD GPU here."""
    if not any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg", "kfd")):
        return False
    # In a process of its own: torch would hold hundreds of MB, and a CUDA context, for as long as the server runs.
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


def available_memory_gib() -> float:
    """Memory that a new process can use without swapping, in GiB: the machine's, or the container's if that is less."""
    available = float("inf")
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        if found := re.search(r"MemAvailable:\s+(\d+) kB", text):
            available = int(found[1]) / 2**20
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit.isdigit():
            available = min(available, (int(limit) - used) / 2**30)
    except (OSError, ValueError):
        pass
    return available


def _in_hub_cache(model: str) -> bool:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def check_model(model: str, env: Mapping[str, str]) -> None:
    """Raise UsageError unless ``model`` is a model folder, a model file, a remote URL or a model of the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).exists() for name in ("config.json", "params.json", "model_index.json")):
            raise UsageError(f"model path {model}: the folder has no config.json")
        return
    if path.is_file() or "://" in model or env.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise UsageError(f"model path {model}: no such folder")
    if _in_hub_cache(model):
        return
    problem = f"model path {model}: no such folder"
    if "1" in (env.get("HF_HUB_OFFLINE"), env.get("TRANSFORMERS_OFFLINE")):
        raise UsageError(f"{problem}, and not in the local cache of the hub (offline mode is on)")
    hub = env.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        urllib.request.urlopen(f"{hub}/api/models/{model}", timeout=10).close()
    except urllib.error.HTTPError as error:
        # A gated or private model answers 401 here; SGLang, with the user's token, may still be allowed to load it.
        if error.code == 404 or (error.code == 401 and not env.get("HF_TOKEN")):
            raise UsageError(f"{problem}, and {hub} has no such model (or wants a token: HF_TOKEN)") from error
    except OSError as error:
        raise UsageError(f"{problem}, and {hub} cannot be reached") from error


def check_port(host: str, port: int) -> None:
    """Raise UsageError if nothing can listen on this address now."""
    try:
        infos = socket.getaddrinfo(host or HOST, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"host {host}: {error.strerror}") from error
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        # As uvicorn does: a port whose last server has just stopped is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"port {port} on {host} cannot be used: {reason}") from error


def check_json(flag: str, text: str) -> None:
    """Raise UsageError unless ``text`` is one JSON object; what its keys mean is checked by the policy itself."""
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} is not valid JSON: {error.msg} at character {error.pos + 1}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{flag} must be a JSON object such as {{}}, not {text.strip()[:40]}")


def known_policies() -> list[str] | None:
    """Cache policies that SGLang takes, ours among them; None when that cannot be told without importing it."""
    from sglang_scout.config import NAMES

    spec = importlib.util.find_spec("sglang")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        try:
            text = (Path(folder) / "srt/arg_groups/choices.py").read_text(encoding="utf-8")
        except OSError:
            continue
        if found := re.search(r"^RADIX_EVICTION_POLICY_CHOICES\b[^=\n]*=\s*\[([^\]]*)\]", text, re.MULTILINE):
            return sorted({*re.findall(r"[\w-]+", found[1]), *NAMES})
    return None


def check_policy(policy: str, config: str | None, env: Mapping[str, str]) -> None:
    """Raise UsageError for a policy that nobody knows, and for keys that ours do not take."""
    from radix_policy.config import ConfigError
    from sglang_scout.config import check, disabled

    known = known_policies()
    if known is not None and policy.lower() not in known:
        raise UsageError(f"unknown policy {policy!r}; known: {', '.join(known)}")
    try:
        if not disabled(env):
            check(policy, json.loads(config) if config is not None else None)
    except ConfigError as error:
        raise UsageError(f"policy {policy}: {error}") from error


def is_whole(text: str) -> bool:
    """Whether the text is a number in plain digits."""
    return text.isascii() and text.isdigit() and len(text) < 10


def free_port(host: str = HOST) -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _cpu_env(arguments: Sequence[str], env: Mapping[str, str], model: str) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    wanted = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(len(cores)),
        # Waiting OpenMP threads would otherwise spin on the cores that the HTTP and detokenizer processes need.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # "Alive" is enough for /health; the default makes each probe a real request through the cache under test.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if Path(model).is_dir():
        wanted |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ranks = 1
    for names in (("--tp", "--tp-size", "--tensor-parallel-size"), ("--dp", "--dp-size", "--data-parallel-size")):
        value = flag_value(arguments, *names)
        ranks *= int(value) if value and is_whole(value) else 1
    if ranks > 1:
        # By default SGLang wants one NUMA node per rank; explicit core lists lift that.
        share = max(len(cores) // ranks, 1)
        groups = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    return {name: value for name, value in wanted.items() if name not in env}


def _cpu_flags(arguments: Sequence[str], env: Mapping[str, str]) -> list[str]:
    wanted = {
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--dtype": "float32",
        "--max-total-tokens": str(CPU_MAX_TOTAL_TOKENS),
    }
    if _HOST_TIER_FLAGS & set(arguments):
        wanted["--hicache-io-backend"] = "direct"
    flags = [part for flag, value in wanted.items() if flag_value(arguments, flag) is None for part in (flag, value)]
    # Overlap runs the next decode step while a GPU works on this one. On a CPU the step itself is what runs, before the
    # previous one's token is sent: each first token waits for a decode step (measured: a hit's TTFT 23 ms, without 14).
    if env.get(CPU_OVERLAP_ENV) != "1" and "--disable-overlap-schedule" not in arguments:
        flags.append("--disable-overlap-schedule")
    return flags


def build(
    arguments: Sequence[str],
    *,
    policy: str | None = None,
    policy_config: str | None = None,
    cpu: bool | None = None,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Command:
    """The command for SGLang flags ``arguments``; raises UsageError for what can be seen to be wrong beforehand.

    ``policy`` and ``policy_config`` become ``--radix-eviction-policy`` and its ``-config``. ``cpu`` None means: on
    the CPU where there is no GPU, or where SGLANG_USE_CPU_ENGINE=1 or ``--device cpu`` asks for it. On a GPU nothing
    is added but the policy. ``env`` is the environment that the server will inherit (default: this process's).
    """
    inherited = dict(os.environ if env is None else env)
    given = list(arguments)
    for flag, value in (("--radix-eviction-policy", policy), ("--radix-eviction-policy-config", policy_config)):
        if value is not None:
            if flag_value(given, flag) is not None:
                raise UsageError(f"give {flag} or its short form --{flag.removeprefix('--radix-eviction-')}, not both")
            given += [flag, value]
    config = flag_value(given, "--radix-eviction-policy-config")
    if config is not None:
        check_json("--policy-config", config)
    chosen = flag_value(given, "--radix-eviction-policy")
    if chosen is not None:
        check_policy(chosen, config, inherited)
    model = flag_value(given, *_MODEL_FLAGS)
    if model is None and flag_value(given, "--config") is None:
        raise UsageError("--model-path is required")
    if model is not None:
        if not model or model.startswith("--"):
            raise UsageError("--model-path needs a value")
        check_model(model, inherited)
    host = flag_value(given, "--host") or HOST
    port_text = flag_value(given, "--port") or str(PORT)
    if not is_whole(port_text) or not 0 < int(port_text) < 65536:
        raise UsageError(f"--port must be a number from 1 to 65535, not {port_text}")
    check_port(host, int(port_text))

    if cpu is None:
        asked = inherited.get("SGLANG_USE_CPU_ENGINE") == "1" or flag_value(given, "--device") == "cpu"
        cpu = asked or not cuda_available(python)
    added_env: dict[str, str] = {}
    defaults: list[str] = []
    if cpu:
        added_env = _cpu_env(given, inherited, model or "")
        defaults = _cpu_flags(given, inherited)
        if _HOST_TIER_FLAGS & set(given) and (free := available_memory_gib()) < HOST_TIER_MIN_FREE_GIB:
            raise UsageError(
                f"--enable-hierarchical-cache needs {HOST_TIER_MIN_FREE_GIB} GiB of free memory "
                f"(SGLang reserves 10), {free:.1f} GiB are free"
            )
    # Defaults come first: an abbreviated flag of the user's, which is not recognised here, still wins.
    argv = [python, "-m", "sglang.launch_server", *defaults, *given]
    return Command(argv, added_env, host, int(port_text))
