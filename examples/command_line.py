"""Shared by the example programs: argument checks, and one line instead of a traceback for an
error."""

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


def positive_int(text: str) -> int:
    """Return the positive integer that a text holds."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def check_folder(parser: argparse.ArgumentParser, option: str, folder: Path) -> None:
    """Exit with a line that says why, if no files can be written to a folder.

    A missing folder is removed again; the program creates it when there is something to write.
    """
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


def save_curve(history: gf.training.TrainingHistory, file: Path) -> None:
    """Write the curve of a training, and print where it is."""
    history.plot(file)
    print(f"curve: {file}")


def run_program(main: Callable[[], None]) -> None:
    """Run a program; an error becomes one line and a non-zero exit status."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # print "?" where the locale lacks "×"
            sys.stdout.reconfigure(errors="replace")
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        _exit_with(
            f"{error}; install the examples' libraries: pip install '.[demo,viz,data,onnx,metrics]'"
        )
    except (gf.errors.GraphflowError, OSError) as error:
        _exit_with(str(error).partition("\n")[0])


def _exit_with(why: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    raise SystemExit(1)
