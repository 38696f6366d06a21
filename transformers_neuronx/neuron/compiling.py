"""Compile a module to a NEFF, the file that a Neuron device runs. The compiler runs in a separate process.

A compiler that crashes or hangs therefore does not affect the user's process, and several can run at once. Each run has
its own directory, which is kept if the run fails.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.neuron.targets import DEFAULT, TARGETS, Target
from transformers_neuronx.pyhlo import HloModuleProto

INSTALL = 'pip install "transformers-neuronx[neuron]" --extra-index-url https://pip.repos.neuron.amazonaws.com'

DEFAULTS = ("--model-type=transformer", "--auto-cast=none")
OURS = ("--framework", "--output")
# Options of libneuronxla's cache, which is not used. neuronx-cc does not know them.
OF_ITS_CACHE = ("--cache_dir", "--no_cache", "--retry_failed_compilation")

PROGRAM = "neuronx-cc"
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2 the instance type: trn1.32xlarge
MODULE, NEFF, LOG = "module.pb", "module.neff", "log.txt"
SHOWN = 24  # lines of a log; a real one ends with a dozen about versions
GRACE = 5.0  # seconds between asking a compiler to end and killing it


def flags(target: Target | None = None) -> list[str]:
    """Return the compiler's options: `--target` if one is given, our defaults, and the user's, which override them.

    Raises ConfigError if NEURON_CC_FLAGS is not a list of options, or has one that only this package may set.
    """
    given = _given()
    if taken := [option for option in OURS if option in map(_name, given)]:
        raise ConfigError(f"{env.CC_FLAGS.name} must not have {taken[0]}: this package sets it")
    named = f"--target={target.name}" if target else ""
    defaults = [option for option in DEFAULTS if _name([option]) not in map(_name, given)]
    rest = [words for words in given if _name(words) not in ("--target", *OF_ITS_CACHE)]
    return [*filter(None, [named]), *defaults, *itertools.chain(*rest)]


def _given() -> list[list[str]]:
    """Return the user's options, each with the words of its value, as `["--x=y"]` or `["--x", "y"]`."""
    try:
        words = shlex.split(env.CC_FLAGS.get())
    except ValueError as error:
        raise ConfigError(
            f"{env.CC_FLAGS.name} must be options as in a shell, got {env.CC_FLAGS.get()!r}: {error}"
        ) from None
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append([])
        options[-1].append(word)
    return options


def _name(words: Sequence[str]) -> str:
    return words[0].partition("=")[0]


def compile_target() -> Target:
    """Return the instance type to compile for: the user's, or that of this machine, or the default.

    Raises ConfigError if the user names an unknown one.
    """
    for words in reversed(_given()):
        if _name(words) == "--target":
            return _target(" ".join([words[0].partition("=")[2], *words[1:]]).strip(), f"{env.CC_FLAGS.name}: --target")
    if override := env.PLATFORM_TARGET.get():
        return _target(override, env.PLATFORM_TARGET.name)
    with suppress(OSError):
        family = PRODUCT_NAME.read_text(errors="replace").partition(".")[0]
        # trn1n is a trn1 with a faster network, and trn2u has more of the same chips in a server.
        return next((target for name, target in TARGETS.items() if family.startswith(name)), TARGETS[DEFAULT])
    return TARGETS[DEFAULT]


def _target(name: str, origin: str) -> Target:
    if name not in TARGETS:
        raise ConfigError(f"{origin} must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def compiler_version() -> str:
    """Return the version of the compiler's package, or the one that it prints. Raises EngineError if there is none."""
    try:
        return metadata.version(PROGRAM)
    except metadata.PackageNotFoundError:
        return _printed_version(_program())


@functools.cache
def _printed_version(program: str) -> str:
    command = [program, "--version"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"cannot get the version of {program}: {error}") from error
    # It may be on either stream. Lines about Python, NumPy and the machine follow it.
    text = (done.stdout + done.stderr).decode(errors="replace")
    if found := re.search(r"version\s+(\S+)", text):
        return found[1]
    raise EngineError(f"{program} --version printed no version, got {text.strip()!r}")


def _program() -> str:
    if program := shutil.which(PROGRAM):
        return program
    raise EngineError(f"compiling for Neuron needs libneuronxla or the program {PROGRAM}, but found neither: {INSTALL}")


def has_libneuronxla() -> bool:
    """Whether libneuronxla is installed. The package of that name on PyPI is empty."""
    spec = importlib.util.find_spec("libneuronxla")
    return spec is not None and any(pkgutil.iter_modules(spec.submodule_search_locations or []))


def compile_module(module: HloModuleProto, stop: threading.Event | None = None) -> bytes:
    """Return the NEFF of `module`. Raises EngineError with the end of the compiler's log if there is none.

    Setting `stop` does in other threads what Ctrl-C does in the main thread: the compiler is ended, and
    KeyboardInterrupt is raised. A run that succeeds or is stopped leaves no files.
    """
    target, seconds = compile_target(), time_limit()
    name = re.sub(r"[^-.\w]", "_", module.name)[:80]
    work = None
    try:
        work = Path(tempfile.mkdtemp(prefix=f"neuronx-{name}-"))
        (work / MODULE).write_bytes(module.SerializeToString(deterministic=True))
        compiler, command = _command(target)
        wrong = _run(command, work, seconds, stop)
        neff = (work / NEFF).read_bytes() if (work / NEFF).is_file() else b""
        wrong = wrong or ("" if neff else "exited with status 0, but left no NEFF")
        if not wrong:
            shutil.rmtree(work, ignore_errors=True)
            return neff
    except BaseException as error:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError):
            raise EngineError(f"{module.name}: the compiler for Neuron could not be run: {error}") from error
        raise
    raise EngineError(
        f"{compiler} did not compile {module.name} for {target.name}: it {wrong}{_end_of_log(work / LOG)}\n"
        f"{MODULE} and {LOG} are kept in {_kept(work)}"
    )


def time_limit() -> float | None:
    """Return the seconds that a compilation may take, or None. Raises ConfigError if the environment's value is bad."""
    text = env.COMPILE_TIMEOUT.get()
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{env.COMPILE_TIMEOUT.name} must be a number of seconds, or 0 for no limit, got {text!r}")
    return seconds or None


def _command(target: Target) -> tuple[str, list[str]]:
    """Return the compiler's name for people, and its command, to be run in a directory that has the module."""
    if has_libneuronxla():
        through = [sys.executable, "-m", "transformers_neuronx.neuron.through_libneuronxla"]
        return "libneuronxla", [*through, MODULE, NEFF, target.name, *flags()]
    named, *rest = flags(target)
    return PROGRAM, [_program(), "compile", "--framework=XLA", named, MODULE, f"--output={NEFF}", *rest]


def _run(command: Sequence[str], work: Path, seconds: float | None, stop: threading.Event | None) -> str:
    """Run a command in `work` until it ends or is stopped. Returns what went wrong, or an empty string."""
    home = Path(__file__).parents[2]
    installed = home.name in ("site-packages", "dist-packages")  # Python finds those by itself
    with open(work / LOG, "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=env.for_child(*([] if installed else [str(home)])),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # and with it a process group, which can be killed at once
        )
    try:
        in_time = _wait(process, seconds, stop)
    finally:
        _end(process)
    if not in_time:
        return f"was stopped after {seconds:g} s, the limit that {env.COMPILE_TIMEOUT.name} sets"
    if process.returncode >= 0:
        return f"exited with status {process.returncode}" if process.returncode else ""
    number = -process.returncode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"was ended by {name}" + (", as when memory runs out" if number == signal.SIGKILL else "")


def _wait(process: subprocess.Popen[bytes], seconds: float | None, stop: threading.Event | None = None) -> bool:
    """Wait up to `seconds` for a process. Returns whether it has ended."""
    until = time.monotonic() + (math.inf if seconds is None else seconds)
    while not _has_ended(process):
        if stop is not None and stop.is_set():
            raise KeyboardInterrupt
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    # WNOWAIT does not reap it: until it is reaped, no other process gets the number of its group.
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # where the user's process ignores SIGCHLD
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything that it has started, and wait for them."""
    try:
        if not _has_ended(process):
            _signal(process, signal.SIGTERM)
            _wait(process, GRACE)
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()
        # We cannot wait for its children. While they end, they may still write to the directory that we delete next.
        until = time.monotonic() + 1
        while _signal(process, 0) and time.monotonic() < until:
            time.sleep(0.01)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a whole process group. Returns whether any process got it."""
    try:
        os.killpg(process.pid, number)
    except OSError:
        return False
    return True


def _end_of_log(path: Path) -> str:
    text = ""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(path.stat().st_size - (1 << 16), 0))  # a verbose log is long
        text = file.read().decode(errors="replace")
    lines = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text).splitlines()
    shown = [f"    {line[:300].rstrip()}" for line in lines if line.strip()][-SHOWN:]
    return "\n".join([". The end of its log:", *shown]) if shown else ", with an empty log."


def _kept(work: Path) -> Path:
    """Return where the directory of a failed run is kept: among the dumps, if there are any."""
    if not env.DUMP_TO.get():
        return work
    dumps = Path(env.DUMP_TO.get()).expanduser()
    with suppress(OSError):  # if it cannot be moved, it stays in place
        dumps.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(work, dumps / work.name.replace("neuronx-", "failed-", 1)))
    return work
