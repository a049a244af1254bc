"""The launcher: what it adds, what it refuses, and that nothing of a server outlives it (a small fake plays SGLang)."""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from launch import command, guard, tiny_model
from launch.command import UsageError, build, flag_value, free_port
from launch.server import Process, Server, ServerError, error_line

ROOT = Path(__file__).parents[2]
BARE = {"PATH": os.environ["PATH"]}

# Stands for `python -m sglang.launch_server`: serves /health, has children that try to survive, exits 7 on SIGTERM.
FAKE_SGLANG = """
import http.server, os, signal, subprocess, sys, threading, time
arguments = sys.argv[1:]
behaviour = os.environ.get("FAKE", "")
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"]
subprocess.Popen(sleeper)
subprocess.Popen(sleeper, start_new_session=True)
if behaviour == "die":
    print("noise before", flush=True)
    raise ValueError("unknown eviction policy 'nope'")
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

port = int(arguments[arguments.index("--port") + 1])
time.sleep(0.5)
print("fake server with", " ".join(arguments), flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def fake_sglang(tmp_path: Path) -> dict[str, str]:
    """Environment in which ``python -m sglang.launch_server`` is the fake."""
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(FAKE_SGLANG)
    return {"PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}", "SGLANG_USE_CPU_ENGINE": "1"}


def alive(pids: list[int]) -> list[int]:
    def living(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return [pid for pid in pids if living(pid)]


def wait_until_gone(pids: list[int], seconds: float = 15) -> list[int]:
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)


def wait_for_descendants(pid: int, count: int) -> list[int]:
    deadline = time.monotonic() + 20
    while len(found := guard.descendants(pid)) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) >= count, found
    return found


# ---- what the command is made of ----


def flags(argv: list[str]) -> list[str]:
    return argv[argv.index("sglang.launch_server") + 1 :]


def test_cpu_defaults_only_where_nothing_was_given(model: Path) -> None:
    port = str(free_port())
    made = build(["--model-path", str(model), "--port", port, "--dtype=bfloat16"], cpu=True, env=BARE)
    assert flag_value(flags(made.argv), "--dtype") == "bfloat16"
    assert sum(a.startswith("--dtype") for a in made.argv) == 1
    assert flag_value(flags(made.argv), "--device") == "cpu"
    assert flag_value(flags(made.argv), "--attention-backend") == "torch_native"
    assert flag_value(flags(made.argv), "--max-total-tokens") == str(command.CPU_MAX_TOTAL_TOKENS)
    assert flags(made.argv).count("--disable-overlap-schedule") == 1
    assert made.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in made.env
    assert made.url == f"http://127.0.0.1:{port}"

    own = {"OMP_NUM_THREADS": "7", "SGLANG_USE_CPU_ENGINE": "1"}
    assert not own.keys() & build(["--model-path", str(model), "--port", port], env=BARE | own).env.keys()


def test_the_overlap_schedule_on_a_cpu(model: Path) -> None:
    given = ["--model-path", str(model), "--port", str(free_port())]
    asked = build(given, cpu=True, env=BARE | {command.CPU_OVERLAP_ENV: "1"})
    assert "--disable-overlap-schedule" not in asked.argv
    twice = build([*given, "--disable-overlap-schedule"], cpu=True, env=BARE)
    assert twice.argv.count("--disable-overlap-schedule") == 1


def test_on_a_gpu_only_the_policy_is_added(model: Path) -> None:
    given = ["--model-path", str(model), "--port", str(free_port()), "--tp", "2"]
    made = build(given, policy="scout", policy_config='{"tend": 2}', cpu=False, env=BARE)
    added = ["--radix-eviction-policy", "scout", "--radix-eviction-policy-config", '{"tend": 2}']
    assert flags(made.argv) == [*given, *added]
    assert made.env == {}


def test_device_decides_when_nobody_says(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--model-path", str(model), "--port", str(free_port())]
    monkeypatch.setattr(command, "cuda_available", lambda _: True)
    assert build(given, env=BARE).env == {}
    assert build([*given, "--device", "cpu"], env=BARE).env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "--device" in build(given, env=BARE | {"SGLANG_USE_CPU_ENGINE": "1"}).argv
    monkeypatch.setattr(command, "cuda_available", lambda _: False)
    assert "--device" in build(given, env=BARE).argv


def test_ranks_get_cores_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    given = ["--model-path", str(model), "--port", str(free_port())]
    assert build([*given, "--tp", "2"], cpu=True, env=BARE).env["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert build([*given, "--dp-size=4"], cpu=True, env=BARE).env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2|3"


@pytest.mark.parametrize("flag", ["--enable-hierarchical-cache", "--enable-hicache"])
def test_host_tier_gets_the_io_backend_that_a_cpu_has(model: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    given = ["--model-path", str(model), "--port", str(free_port()), flag]
    monkeypatch.setattr(command, "available_memory_gib", lambda: 13.0)
    assert flag_value(build(given, cpu=True, env=BARE).argv, "--hicache-io-backend") == "direct"
    monkeypatch.setattr(command, "available_memory_gib", lambda: 11.5)
    with pytest.raises(UsageError, match=r"12 GiB of free memory .*11\.5 GiB are free"):
        build(given, cpu=True, env=BARE)
    assert "--hicache-io-backend" not in build(given, cpu=False, env=BARE).argv


def test_shell_line_can_be_pasted(model: Path) -> None:
    made = build(["--model-path", str(model), "--port", str(free_port())], policy_config='{"a": 1}', cpu=True, env=BARE)
    line = made.shell().replace(sys.executable, "echo", 1)
    echoed = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    assert '--radix-eviction-policy-config {"a": 1}' in echoed
    assert made.shell().startswith("SGLANG_USE_CPU_ENGINE=1 ")


# ---- bad input: one line, exit code 2 ----


def launch(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_bad_input_is_one_line_and_exit_code_2(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    good = ["--model-path", str(model), "--port", str(free_port())]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            "--model-path is required": [],
            "/no/such/model: no such folder": ["--model-path", "/no/such/model"],
            "no/such-model: no such folder, and not in the local cache": ["--model-path", "no/such-model"],
            "the folder has no config.json": ["--model-path", str(empty)],
            f"port {port} on 127.0.0.1 cannot be used: address already in use": [*good[:2], "--port", port],
            "--port must be a number from 1 to 65535, not 99999": [*good[:2], "--port=99999"],
            "--policy-config is not valid JSON: Expecting": [*good, "--policy-config", "{x"],
            "--policy-config must be a JSON object such as {}, not [1]": [*good, "--policy-config", "[1]"],
            "--port must be a number from 1 to 65535, not ²": [*good[:2], "--port", "²"],
            "argument --policy: expected one argument": [*good, "--policy"],
            "--model-path needs a value": ["--port", good[3], "--model-path"],
            "unknown key 'nope'": [*good, "--dry-run", "--policy", "scout", "--policy-config", '{"nope": 1}'],
            "got 7, allowed": [*good, "--dry-run", "--policy", "cachescout", "--policy-config", '{"tau": 7}'],
            "or its short form --policy, not both": [*good, "--policy", "lru", "--radix-eviction-policy", "lru"],
        }
        for expected, arguments in cases.items():
            done = launch(*arguments, SGLANG_USE_CPU_ENGINE="1")
            assert (done.returncode, done.stdout) == (2, ""), expected
            assert expected in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_an_unknown_policy_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = tmp_path / "sglang" / "srt" / "arg_groups" / "choices.py"
    choices.parent.mkdir(parents=True)
    choices.write_text('RADIX_EVICTION_POLICY_CHOICES = ["lru", "lfu"]\n')
    (tmp_path / "sglang" / "__init__.py").write_text("raise AssertionError('imported')\n")
    found = importlib.machinery.PathFinder.find_spec("sglang", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    given = ["--model-path", str(model), "--port", str(free_port())]
    with pytest.raises(UsageError, match="unknown policy 'mine'; known: cachescout, lfu, lru, scout"):
        build(given, policy="mine", cpu=True, env=BARE)
    assert build(given, policy="LRU", cpu=True, env=BARE)
    assert build(given, policy="scout", policy_config='{"nope": 1}', cpu=True, env=BARE | {"SGLANG_SCOUT_DISABLE": "1"})
    found.submodule_search_locations[:] = []
    assert build(given, policy="mine", cpu=True, env=BARE), "another SGLang"


def test_dry_run_starts_nothing(model: Path) -> None:
    done = launch("--model-path", str(model), "--port", str(free_port()), "--policy", "lru", "--dry-run")
    assert done.returncode == 0
    assert "-m sglang.launch_server" in done.stdout and "--radix-eviction-policy lru" in done.stdout


def test_error_line_names_the_cause() -> None:
    log = """[2026] Ignore import error when loading x: ValueError: no
Traceback (most recent call last):
  File "x.py", line 1, in f
    raise ValueError("bad")
ValueError: Unknown eviction policy: mine
[2026] scheduler died during initialization
RuntimeError: Rank 0 scheduler died during initialization (exit code: 1)
"""
    assert error_line(log.splitlines()) == "ValueError: Unknown eviction policy: mine"
    assert error_line(["usage: x", "sglang serve: error: unrecognized arguments: --y", ""]).endswith("--y")
    assert error_line(["", "just this", ""]) == "just this"
    assert error_line([]) == "no output"


# ---- life and death ----


@contextlib.contextmanager
def launched(model: Path, env: dict[str, str], **more: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """``python -m launch`` on the fake, ready, with the pids of all processes below it."""
    arguments = ["--model-path", str(model), "--port", str(free_port()), "--policy", "lru"]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments],
        cwd=ROOT,
        env={**os.environ, **env, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready after"):
                break
        assert lines[0].startswith("+ ") and "--radix-eviction-policy lru" in lines[0], lines
        assert lines[-1].startswith("ready after"), lines
        pids += wait_for_descendants(process.pid, 4)  # guard, server and its two children
        yield process, pids
    finally:
        process.kill()
        process.communicate(timeout=30)
        assert not wait_until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded_and_the_exit_code_returned(
    model: Path, fake_sglang: dict[str, str], number: signal.Signals
) -> None:
    with launched(model, fake_sglang) as (process, pids):
        process.send_signal(number)
        code = process.wait(timeout=30)
        # The fake exits 7 on SIGTERM; Python's default for SIGINT is to die of it.
        assert code == (7 if number == signal.SIGTERM else 128 + signal.SIGINT)
        assert not alive(pids)


def test_killed_launcher_leaves_nothing(model: Path, fake_sglang: dict[str, str]) -> None:
    with launched(model, fake_sglang, FAKE="stubborn") as (process, pids):
        process.kill()
        assert not wait_until_gone(pids)


def test_second_signal_ends_a_stubborn_server_at_once(model: Path, fake_sglang: dict[str, str]) -> None:
    with launched(model, fake_sglang, FAKE="stubborn") as (process, pids):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert alive(pids)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 128 + signal.SIGKILL
        assert not alive(pids)


def test_death_at_start_gives_reason_and_code(model: Path, fake_sglang: dict[str, str]) -> None:
    done = launch("--model-path", str(model), "--port", str(free_port()), **fake_sglang, FAKE="die")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == (
        "error: the server exited with code 1 before it was ready: ValueError: unknown eviction policy 'nope'"
    )


def test_server_context_manager(model: Path, fake_sglang: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    with Server(model, "lru", max_total_tokens=99, env=fake_sglang, log_path=log) as server:
        pids = wait_for_descendants(server._running().popen.pid, 3)
        assert server.pid in pids and set(server.pids) == set(pids)
        assert 0.4 < server.start_seconds < 60
        assert "--max-total-tokens 99" in server.log_tail() and "--radix-eviction-policy lru" in server.log_tail()
    assert not alive(pids)
    assert server.stop() is None
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid

    with (
        pytest.raises(ServerError, match="unknown eviction policy 'nope'") as failure,
        Server(model, env=fake_sglang | {"FAKE": "die"}),
    ):
        pass
    assert failure.value.exit_code == 1
    with pytest.raises(KeyboardInterrupt), Server(model, env=fake_sglang) as server:
        pids = server.pids
        raise KeyboardInterrupt
    assert not alive(pids)


def test_server_that_hangs_at_start_is_given_up(model: Path, fake_sglang: dict[str, str]) -> None:
    server = Server(model, env=fake_sglang | {"FAKE": "stubborn"}, start_timeout_s=0.1, stop_grace_s=0.2)
    with pytest.raises(ServerError, match="not ready after 0 s"), server:
        pass


def test_killed_guard_takes_the_command_along(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", "import time; time.sleep(300)"], os.environ)
    pids = wait_for_descendants(process.popen.pid, 1)
    process.popen.kill()
    assert process.wait() == 128 + signal.SIGKILL
    assert not wait_until_gone(pids)


def test_command_that_does_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    process = Process(["/no/such/program"], os.environ)
    assert process.wait() == 127
    assert "cannot start /no/such/program" in capfd.readouterr().err


# ---- the tiny model ----


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_tiny_model_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name, seed in (("one", "1"), ("two", "2")):
        done = subprocess.run(
            [sys.executable, "-m", "launch.tiny_model", str(tmp_path / name)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert set(digests(tmp_path / "one")) >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_tiny_model_is_made_once(tmp_path: Path) -> None:
    folder = tiny_model.cached(tmp_path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model.cached(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Grüße aus Zürich: def f(x): return x**2  # ✓\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (
        tokenizer.get_vocab_size() == tiny_model.VOCAB == json.loads((folder / "config.json").read_text())["vocab_size"]
    )
    assert tokenizer.token_to_id("<|im_end|>") >= tiny_model.ORDINARY_TOKENS


def test_picking_heads_find_one_token_at_every_distance() -> None:
    frequencies = np.array([tiny_model.ROPE_THETA ** (-2 * f / tiny_model.HEAD_DIM) for f in range(16)])
    distance = np.arange(tiny_model.MAX_POSITIONS)
    score = tiny_model.PICK_SCALE * np.cos(distance[:, None] * frequencies) @ np.array(tiny_model._PICK_WEIGHTS)
    farthest = tiny_model.pick_distances(tiny_model.LAYERS - 1)[-1]
    assert (score[:farthest] - score[1 : farthest + 1]).min() > 30  # e^-30: the others weigh nothing
    assert (score[0] - score[farthest:]).min() > 30


def test_parity_units_give_the_parity() -> None:
    mlp = tiny_model._mlp(np.random.Generator(np.random.PCG64(0)), 0)
    inputs = tiny_model.PICKS + 1
    for minus in range(inputs + 1):
        stream = np.zeros(tiny_model.WIDTH)
        stream[tiny_model._CONST] = 1  # as the norm leaves it
        picked = [-1] * minus + [1] * (inputs - minus)
        for bit in range(tiny_model.CODE_BITS):
            stream[tiny_model._CODE[0] + bit] = picked[0]
            stream[tiny_model._SUM[0] + bit] = sum(picked[1:])
        gate, up = mlp["gate_proj"] @ stream, mlp["up_proj"] @ stream
        out = mlp["down_proj"] @ (gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up)
        new = out[tiny_model._CODE[1] : tiny_model._CODE[1] + tiny_model.CODE_BITS]
        assert np.allclose(new, math.prod(picked), atol=1e-4)
