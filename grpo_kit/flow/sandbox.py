"""`PythonTool`: runs Python that a model wrote, in a process that can compute, print and no more.

The child runs this file as a script (`_main`). It lowers its limits and installs a seccomp filter:
the kernel then refuses every system call that computing and printing do not need, whatever the code
reaches inside its interpreter. It does not protect against flaws of the kernel and side channels.
"""

import ctypes
import errno
import importlib
import os
import platform
import signal
import struct
import sys
import traceback

MAX_CODE_CHARS = 10_000
MAX_OUTPUT_CHARS = 2000
MEMORY_MB = 256  # of address space; Python needs some 30


class PythonTool:
    """Runs code in a locked process of its own. Raises RuntimeError where none can be locked.

    timeout: seconds; that of its `Tool` should not be shorter.
    """

    __name__ = "python"

    def __init__(self, timeout: float = 5.0):
        self.timeout = timeout
        supported = sys.platform == "linux" and platform.machine() in _ARCHITECTURES
        try:  # a lock that nobody tried is none
            answer = self._run(_PROBE, timeout=max(timeout, 30.0)) if supported else "unsupported"
        except (OSError, ValueError) as error:
            answer = str(error)
        if answer != "locked":
            system = f"{sys.platform} {platform.machine()} ({answer})"
            remedy = "leave it out, or take Linux (x86_64, aarch64) with seccomp allowed"
            raise RuntimeError(f"the python tool cannot lock a process on {system}: {remedy}.")

    def __call__(self, code: str) -> str:
        """Run Python code, without files and network, and return what it prints."""
        return self._run(code, self.timeout)

    def _run(self, code: str, timeout: float) -> str:
        """Raises ValueError with the last line of the traceback, or why the code was stopped."""
        import subprocess  # here, as the child starts faster without
        import tempfile

        if len(code) > MAX_CODE_CHARS:
            raise ValueError("code too long")
        data = code.encode()  # a lone surrogate is a ValueError too
        max_bytes = 4 * MAX_OUTPUT_CHARS + 64
        limits = map(str, (int(timeout) + 1, max_bytes))
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
            # Not preexec_fn, which may deadlock in a process with threads: the child limits itself.
            # -I -S: no user site, no .pth files, no PYTHON* variables; -B: writes no bytecode.
            command = [sys.executable, "-I", "-S", "-B", "-W", "ignore", __file__, *limits]
            options = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": folder, "env": {}}
            try:
                process = subprocess.run(
                    command, input=data, timeout=timeout, start_new_session=True, **options
                )
            except subprocess.TimeoutExpired:
                raise ValueError(f"timed out after {timeout:g} s") from None
            output.seek(0)
            printed = output.read()
        text = printed.decode(errors="replace").rstrip("\n")
        if len(printed) < max_bytes and process.returncode < 0:
            raise ValueError(f"died of {signal.Signals(-process.returncode).name}")
        if len(printed) < max_bytes and process.returncode:
            raise ValueError(text.split("\n")[-1].strip() or f"exit code {process.returncode}")
        return text if len(text) <= MAX_OUTPUT_CHARS else text[: MAX_OUTPUT_CHARS - 1] + "…"


# --- the child, before the lock -------------------------------------------------------------------

# What the code may import: pure computing. After the lock no file can be opened, so nothing else.
MODULES = (
    "bisect collections datetime decimal fractions functools heapq itertools json math operator "
    "random re statistics string"
).split()

# By platform.machine(): AUDIT_ARCH, and the column in the table below.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# System calls that CPython needs to compute and to print to descriptors that are open, with their
# numbers on x86_64 and aarch64 (None: does not exist). Everything else fails with EPERM.
_ALLOWED = {
    # the descriptors, and what flushing and closing them asks; memory
    "read": (0, 63), "write": (1, 64), "writev": (20, 66), "close": (3, 57), "fstat": (5, 80),
    "lseek": (8, 62), "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215),
    "mremap": (25, 216), "mprotect": (10, 226),
    # the interpreter's lock, and its handlers of signals
    "futex": (202, 98), "sched_yield": (24, 124), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # clocks, sleep (before Python 3.11 by select), random numbers, who it is, and the end
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None),
    "select": (23, None), "pselect6": (270, 72), "getrandom": (318, 278),
    "getpid": (39, 172), "gettid": (186, 178), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip

_PROBE = "try: open('/')\nexcept PermissionError: print('locked')"


def _main() -> None:
    """Read the code from stdin, lock this process, run the code."""
    limits = map(int, sys.argv[1:])
    code = sys.stdin.buffer.read().decode()
    for name in MODULES:
        importlib.import_module(name)
    _limit(*limits)
    _lock()
    # ---- from here on nothing is trusted, and nothing that Python keeps would hold it
    sys.argv = [""]
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:
        # without the traceback, whose frames may hold all the memory
        lines = traceback.format_exception_only(type(error), error.with_traceback(None))
        sys.exit(lines[-1].strip()[:1000])  # or it would fill the output, and be taken for it


def _limit(cpu_seconds: int, output_bytes: int) -> None:
    """Lower soft and hard limits. The parent cannot be trusted to outlive this process."""
    import resource

    for kind, limit in (
        (resource.RLIMIT_AS, MEMORY_MB * 2**20),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_NPROC, 0),  # root may exceed it; the filter below stops root as well
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody is left who would stop it


def _lock() -> None:
    """Install the filter (seccomp(2), classic BPF). Raises OSError where it cannot be had."""
    arch, column = _ARCHITECTURES[platform.machine()]
    load, equal, ret = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
    program = [
        # of another ABI (32 bits), numbers mean other calls; x32's carry a bit that none below has
        (load, 0, 0, 4),
        (equal, 1, 0, arch),
        (ret, 0, 0, kill),
        (load, 0, 0, 0),
    ]
    for numbers in _ALLOWED.values():
        if numbers[column] is not None:
            program += [(equal, 0, 1, numbers[column]), (ret, 0, 0, allow)]
    program.append((ret, 0, 0, refuse))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    # struct sock_fprog
    pointer = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    _prctl(38, 1)  # PR_SET_NO_NEW_PRIVS, without which only root may filter
    _prctl(22, 2, ctypes.addressof(pointer))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _prctl(option: int, value: int, pointer: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, pointer, 0, 0))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    _main()
