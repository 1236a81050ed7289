"""Train a small transformer on the documentation of Python, and let it write, by characters.

    python examples/character_gpt.py
    python examples/character_gpt.py --steps 2000 --prompt "The for statement" --out /tmp/gpt

The text is that of `help()`, which is part of the standard library. A row of the data is a window
of 64 characters and the same window one character later. The program prints a sample before and
after the training, and the perplexity on text that it has not seen. It writes character_gpt.svg.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from command_line import check_folder, positive_int, run_program

import graphflow as gf
from graphflow import nn

WINDOW = 64  # characters that the model sees
SAMPLE = 240  # characters that it writes


def read_text() -> str:
    """Return about 250,000 characters of the standard library's help texts."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return "".join(c for c in text if c.isascii())[:250_000]


class Windows:
    """Windows of a text as a source: x (WINDOW,) and y, the same one character later."""

    def __init__(self, codes: np.ndarray) -> None:
        self._codes = codes

    def __len__(self) -> int:
        return len(self._codes) - WINDOW

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        found = self._codes[indices[:, None] + np.arange(WINDOW + 1)]
        return {"x": found[:, :-1], "y": found[:, 1:]}


class Gpt(nn.Layer):
    """Embeddings of characters and places, two transformer blocks, logits of the next character."""

    def __init__(self, characters: int, width: int, heads: int) -> None:
        self.characters = nn.Embedding(characters, width, name="characters")
        self.places = nn.Embedding(WINDOW, width, name="places")
        self.blocks = [nn.TransformerBlock(width, heads, name=f"block{i}") for i in range(2)]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, name="head")

    def __call__(self, x: gf.Tensor) -> gf.Tensor:
        hidden = self.characters(x) + self.places(gf.arange(WINDOW))
        for block in self.blocks:
            hidden = block(hidden, causal=True)
        return self.head(self.norm(hidden))


def write(session: gf.Session, logits: gf.Tensor, x: gf.Tensor, prompt: str, alphabet: str) -> str:
    """Return a text that continues a prompt, each character drawn from the model's chances."""
    random, codes = np.random.default_rng(0), [alphabet.index(c) for c in prompt]
    for _ in range(SAMPLE):
        seen = codes[-WINDOW:]
        window = np.zeros((1, WINDOW), "int64")
        window[0, : len(seen)] = seen  # what follows is not looked at: attention is causal
        scores = session.run(logits, {x: window})[0, len(seen) - 1].astype("float64") / 0.7
        chances = np.exp(scores - scores.max())
        codes.append(int(random.choice(len(alphabet), p=chances / chances.sum())))
    return "".join(alphabet[code] for code in codes)


def main() -> None:
    options = parse_arguments()
    text = read_text()
    alphabet = "".join(sorted({*text, *options.prompt}))
    codes = np.array([alphabet.index(c) for c in text])
    cut = len(codes) * 9 // 10
    data, unseen = gf.data.Dataset(Windows(codes[:cut])), gf.data.Dataset(Windows(codes[cut:]))
    with gf.random.seed(0):
        x = gf.placeholder("int64", (None, WINDOW), name="x")
        y = gf.placeholder("int64", (None, WINDOW), name="y")
        logits = Gpt(len(alphabet), options.width, heads=4)(x)
    losses = nn.cross_entropy(logits, y)
    loss = gf.mean(losses)
    rate = gf.optim.schedules.one_cycle(4e-3, options.steps)
    train = gf.optim.AdamW(rate).minimize(loss)
    metrics = {"perplexity": gf.metrics.perplexity(losses)}
    some = unseen.shuffle(0).batch(64).split(0.02)[0]
    with gf.Session() as session:
        print("before:", repr(write(session, logits, x, options.prompt, alphabet)[:80]))
        begun = time.perf_counter()
        history = gf.fit(
            train, data.shuffle(0).batch(32).prefetch(), loss=loss, steps=options.steps,
            metrics=metrics, validate=some, session=session,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        print(f"after {options.steps} steps in {seconds:.1f} s:")
        print(write(session, logits, x, options.prompt, alphabet))
    options.out.mkdir(parents=True, exist_ok=True)
    history.plot(options.out / "character_gpt.svg")
    first, last = (float(np.mean(part)) for part in (history.losses[:5], history.losses[-20:]))
    perplexity = history.values("perplexity")[-1]
    print(f"loss {first:.2f} -> {last:.2f}; perplexity on unseen text {perplexity:.1f}")
    print(f"curve: {options.out / 'character_gpt.svg'}")


def parse_arguments() -> Any:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive_int, default=1000, metavar="N")
    parser.add_argument("--width", type=positive_int, default=96, metavar="N")
    parser.add_argument("--prompt", default="The for statement", metavar="TEXT")
    parser.add_argument("--out", type=Path, default=Path("character_gpt"), metavar="FOLDER")
    options = parser.parse_args()
    if options.width % 8:
        parser.error(f"--width {options.width}: it must be a multiple of 8")
    if not options.prompt:
        parser.error("--prompt: give at least one character")
    check_folder(parser, "--out", options.out)
    return options


if __name__ == "__main__":
    run_program(main)
