"""What the examples share as programs: numbers and folders from the command line, and one line in
place of a traceback where something is wrong."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import graphflow as gf


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def check_folder(parser: argparse.ArgumentParser, option: str, folder: Path) -> None:
    """End the program, with a line that says why, if no files can be written to a folder. The
    folder itself is made when there is something to write."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        parser.error(f"{option}: cannot write to the folder {str(folder)!r}: {why}")
    finally:
        for made in missing:
            with contextlib.suppress(OSError, ValueError):
                made.rmdir()


def run(main: Callable[[], None]) -> None:
    """Run a program. What is wrong becomes a line and an exit status that is not 0."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a locale without "×" gets a "?"
            sys.stdout.reconfigure(errors="replace")
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # who reads what is printed has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        _end(f"{error}; the examples' libraries come with pip install '.[demo,viz,onnx,metrics]'")
    except (gf.errors.GraphflowError, OSError) as error:
        _end(str(error).partition("\n")[0])


def _end(why: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    raise SystemExit(1)
