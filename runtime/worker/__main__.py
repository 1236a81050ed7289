"""Entry point of launched workers: `python -m graphflow.runtime.worker`."""

import sys

from graphflow.runtime.worker.serving import main

if __name__ == "__main__":
    sys.exit(main())
