"""A rank other than 0, as a process: python -m headrace.cluster.rank_process STEPS CONTROL (inherited sockets).

It ends when rank 0 does, whatever it is doing at that moment, and it is rank 0 that decides about signals. Both from
the start: what takes long to import comes after.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time

_GRACE_S = 5.0  # from rank 0's end to ours


def main(steps_fd: int, control_fd: int) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    steps, control = (socket.socket(fileno=fd) for fd in (steps_fd, control_fd))
    threading.Thread(target=_end_with, args=(control,), daemon=True).start()
    from headrace.cluster.rank import run_rank

    run_rank(steps, control)


def _end_with(control: socket.socket) -> None:
    """Whatever hangs here: soon after rank 0's end this process ends, too."""
    watch = select.poll()
    watch.register(control.fileno(), select.POLLRDHUP)
    watch.poll()
    time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
