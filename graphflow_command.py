"""The `graphflow` command until graphflow is loaded, which takes half a second.

It is no module of the package, since whatever is imported from there loads the package first.
"""

import signal


def main() -> int:
    """Run the command line; returns the exit code. Ctrl-C in between ends the process as the
    signal does one that has nothing to put in order: without a traceback of imports."""
    meant = signal.getsignal(signal.SIGINT)
    if meant is signal.default_int_handler:  # else it is ignored: a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from graphflow.cli.main import main as run

    signal.signal(signal.SIGINT, meant)
    return run()
