"""A Python that has its modules already: programs that tests start begin in a fifth of a second, not after many.

`python()` is the path of a command that takes what `python` takes with `-m MODULE`, `-c CODE`, `-` or a file. It
asks a server, which has imported torch, transformers and this package with its families once and computed
nothing, for a fork that becomes the program. The program has the arguments, directory, environment and standard
streams of the command, which ends as the program does. A command that is killed takes its program with it. Not
for tests of an import, of variables that are read at one, or of other signals: those start `sys.executable`.
`hosts_python()` has all libraries but not this package, for programs that import a copy of it by their PYTHONPATH.
"""

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "torch", "torch.distributed.run", "accelerate", "transformers.trainer", "matplotlib.pyplot",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip
PACKAGE = (
    "dlm_lens", "dlm_lens.testing", "dlm_lens.recording", "dlm_lens.training", "dlm_lens.viz",
    "dlm_lens.cli.app", "dlm_lens.cli.record", "dlm_lens.adapters.loading", "dlm_lens.sampling.denoising",
    "dlm_lens.recording.record_runs", "dlm_lens.training.trainer", "xarray",
)  # fmt: skip
MODELS = ("gemma2", "glm4_moe", "gpt2", "ministral3", "modernbert", "phi", "qwen3", "qwen3_moe", "diffusion_gemma")
FURTHER = (
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
    "xarray", "transformer_lens.model_bridge", "pytest",
)  # fmt: skip
"""What this package imports at some calls, but not nnsight, which gives every object a method `save`.

A host may be missing, whose tests are skipped then.
"""

COMMAND = """#!{python} -SE
import array, json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([len(asked).to_bytes(8, "big")], streams)
    server.sendall(asked)
    code = int(server.makefile().readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def python() -> str:
    """The path of the command; where there is no Linux, that of this Python.

    Raises:
        RuntimeError: the server did not start.
    """
    return _command("package")


def hosts_python() -> str:
    """The same without this package: a program imports the one of its directory or PYTHONPATH."""
    return _command("hosts")


@functools.cache
def _command(kind: str) -> str:
    if sys.platform != "linux":
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="dlm-lens-preloaded-")
    address, command = Path(folder.name) / "server", Path(folder.name) / "python"
    command.write_text(COMMAND.format(python=sys.executable, address=str(address)), encoding="utf-8")
    command.chmod(0o700)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command_line = [sys.executable, "-m", "tests.preloaded", str(address), kind]
    server = subprocess.Popen(
        command_line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(folder.cleanup)
    atexit.register(server.kill)
    if server.stdout is None or server.stdout.readline() != "ready\n":
        raise RuntimeError(f"the server of preloaded programs ended with {server.wait()}")
    return str(command)


def serve(address: str, kind: str) -> None:
    """Answer every connection by a fork, which waits for its own fork that becomes the program.

    Raises:
        RuntimeError: a library has imported this package.
    """
    for module in (*LIBRARIES, *(PACKAGE if kind == "package" else ())):
        importlib.import_module(module)
    if kind == "package":
        importlib.import_module("dlm_lens.adapters.registry").families()
        importlib.import_module("dlm_lens.sampling.algorithm_registry").algorithms()
    if kind == "hosts":
        for module in FURTHER:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
        if "dlm_lens" in sys.modules:
            raise RuntimeError("a program would not import its own copy of dlm_lens")
    gc.collect()
    gc.freeze()  # a collection in a fork walks through the objects of the program, not of these modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the first forks
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        # Standard input ends when the process of the tests does, however it ends.
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Run what a connection asks for and say how it ended: its exit code, or minus the signal that ended it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams = _size_and_streams(connection)
    text = b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    arguments, directory, environment = json.loads(text)
    program = os.fork()
    if program == 0:
        connection.close()
        for stream, given in enumerate(streams):
            os.dup2(given, stream)
            os.close(given)
        # Those of the server know what they were opened on.
        encoding = environment.get("PYTHONIOENCODING", "utf-8")
        sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115  # until the end
        sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
            2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False
        )
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        numpy.random.seed()  # as in a process of its own; `random` does so at a fork
        os._exit(_ended(arguments))
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:  # the command was killed
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _size_and_streams(connection: socket.socket) -> tuple[int, list[int]]:
    streams = array.array("i")
    size, messages, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, data in messages:
        streams.frombytes(data)
    return int.from_bytes(size, "big"), streams.tolist()


def _ended(arguments: list[str]) -> int:
    """Run a program as `python` does; its exit code."""
    kind, *rest = arguments
    code: Any = 0
    # As Python does at its start; the repository, which the server itself was given, comes behind.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.getcwd(), *filter(None, given)]
    try:
        if kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind in ("-c", "-"):
            text, name = (rest.pop(0), "<string>") if kind == "-c" else (sys.stdin.read(), "<stdin>")
            sys.argv = [kind, *rest]
            module = type(sys)("__main__")
            sys.modules["__main__"] = module
            exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102  # a test's own program
        else:
            sys.argv = arguments
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code or 0


if __name__ == "__main__":
    serve(*sys.argv[1:])
