"""Small programs that a supervisor runs in tests; like the real ones they die with their parent."""

from __future__ import annotations

TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(os.environ["PDCLUSTER_PARENT_PID"]):
    sys.exit(9)
"""
WAITS = TIED + "signal.pause()\n"
IGNORES_SIGTERM = (
    TIED
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""
)
LEAVES_AN_ORPHAN = (
    TIED
    + """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write(str(os.getpid()))
    while True:
        signal.pause()
signal.pause()
"""
)
FAILS = "import sys; sys.stderr.write('the port is busy\\n'); sys.exit(2)\n"
NURSERY = (
    TIED
    + """
import json, select
def say(**fields):
    os.write(1, (json.dumps(fields) + "\\n").encode())
r, w = os.pipe()
os.set_blocking(w, False)
signal.set_wakeup_fd(w)
signal.signal(signal.SIGCHLD, lambda *_: None)
os.write(1, b"a library prints something\\n")
pending = b""
while True:
    ready = select.select([0, r], [], [])[0]
    if r in ready:
        os.read(r, 100)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            say(exit=pid, status=os.waitstatus_to_exitcode(status))
    if 0 in ready:
        chunk = os.read(0, 4096)
        if not chunk:
            sys.exit(0)
        *lines, pending = (pending + chunk).split(b"\\n")
        for line in lines:
            request = json.loads(line)
            if request["config"] == "refused":
                say(error="no such config")
                continue
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
                while True:
                    signal.pause()
            say(pid=pid)
"""
)
