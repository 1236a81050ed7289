"""The `graphflow` command while graphflow loads, which takes half a second.

This file is not in the package, since importing any module of the package loads all of it first.
"""

import signal


def main() -> int:
    """Run the command line, and return its exit code.

    Ctrl-C during the import ends the process by the signal, without a traceback.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a background job ignores Ctrl-C instead
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from graphflow.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    return run()
