"""A training loop with lengths, autocast and torch.compile, as of text-to-speech.

    python examples/speech_training.py [--out output] [--steps 150] [--eager]

A model turns tokens into frames of a spectrogram, four frames a token. The
recordings say the same tokens at a tempo of their own: each token takes two to
eight frames, so prediction and target differ in length and no frame of one belongs
to a known frame of the other. Soft-DTW compares them all the same; nobody has to
supply durations.

What is worth copying: pad, pass lengths, compile the whole step, let autocast do
what it likes.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from softdtw_cuda import SoftDTW, softdtw_alignment
from softdtw_cuda.plot import BLUE

TOKENS, CHANNELS, FRAMES_PER_TOKEN = 30, 40, 4
LONGEST_TEXT, LONGEST_RECORDING = 12, 96
BATCH = 16


class Voice:
    """Invented speech: every token has a spectrum of its own, and any duration."""

    def __init__(self, generator: torch.Generator) -> None:
        channel = torch.arange(CHANNELS)
        centres = CHANNELS * torch.rand(TOKENS, 2, 1, generator=generator)
        self.spectra = torch.exp(-((channel - centres) ** 2) / 18).sum(1)
        self.generator = generator

    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens (B, T), their lengths, recordings (B, M, CHANNELS), theirs."""
        tokens = torch.randint(
            TOKENS, (BATCH, LONGEST_TEXT), generator=self.generator
        )
        text_lengths = torch.randint(
            6, LONGEST_TEXT + 1, (BATCH,), generator=self.generator
        )
        recordings = torch.zeros(BATCH, LONGEST_RECORDING, CHANNELS)
        recording_lengths = torch.zeros(BATCH, dtype=torch.long)
        for k in range(BATCH):
            text = tokens[k, : text_lengths[k]]
            durations = torch.randint(2, 9, text.shape, generator=self.generator)
            frames = self.spectra[text].repeat_interleave(durations, dim=0)[
                :LONGEST_RECORDING
            ]
            recording_lengths[k] = len(frames)
            recordings[k, : len(frames)] = frames + 0.05 * torch.randn(
                frames.shape, generator=self.generator
            )
        return tokens, text_lengths, recordings, recording_lengths


class Synthesiser(nn.Module):
    """Tokens (B, T) to frames (B, FRAMES_PER_TOKEN * T, CHANNELS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 64)
        self.context = nn.Sequential(
            nn.Conv1d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.frames = nn.Linear(64, FRAMES_PER_TOKEN * CHANNELS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.context(hidden.transpose(1, 2)).transpose(1, 2)
        frames: Tensor = self.frames(hidden)
        return frames.unflatten(2, (FRAMES_PER_TOKEN, CHANNELS)).flatten(1, 2)


def make_step(
    model: nn.Module, loss_fn: nn.Module, device: str
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Forward pass and loss of a batch, as one function to compile."""

    def step(
        tokens: Tensor,
        text_lengths: Tensor,
        recordings: Tensor,
        recording_lengths: Tensor,
    ) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            frames = model(tokens)  # bfloat16
            values = loss_fn(
                frames,
                recordings,
                FRAMES_PER_TOKEN * text_lengths,
                recording_lengths,
            )  # float32
        # Long recordings have large values: divide, so that frames count alike.
        return (values / recording_lengths).mean()

    return step


def draw(
    path: Path,
    losses: list[float],
    frames: Tensor,
    recording: Tensor,
    alignment: Tensor,
) -> None:
    figure = plt.figure(figsize=(12, 6), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 1.05))
    said = figure.add_subplot(grid[0, :2])
    target = figure.add_subplot(grid[1, :2], sharex=said)
    matrix = figure.add_subplot(grid[0, 2])
    curve = figure.add_subplot(grid[1, 2])
    for panel, image, title in (
        (said, frames, f"Predicted: {len(frames)} frames, four a token"),
        (
            target,
            recording,
            f"Recorded: {len(recording)} frames at a tempo of its own",
        ),
    ):
        panel.imshow(
            image.T, origin="lower", aspect="auto", cmap="magma", vmin=0, vmax=1.8
        )
        panel.set_title(title, loc="left", fontweight="bold", fontsize=11)
        panel.set_ylabel("channel")
        panel.set_xlim(-0.5, max(len(frames), len(recording)) - 0.5)
        panel.spines[["top", "right"]].set_visible(False)
    target.set_xlabel("frame")
    matrix.imshow(
        alignment.clamp(0, 1) ** 0.5, cmap="Blues", aspect="auto", vmin=0, vmax=1
    )
    matrix.set_title(
        "Their soft alignment", loc="left", fontweight="bold", fontsize=11
    )
    matrix.set_xlabel("recorded frame")
    matrix.set_ylabel("predicted frame")
    curve.plot(losses, color=BLUE, lw=1.4)
    curve.set_title(
        "Loss per recorded frame", loc="left", fontweight="bold", fontsize=11
    )
    curve.set_xlabel("training step")
    curve.set_ylabel("divergence")
    curve.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument(
        "--eager", action="store_true", help="do without torch.compile"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    voice = Voice(torch.Generator().manual_seed(5))
    model = Synthesiser().to(device)
    # The divergence: zero when both say the same at the same tempo.
    loss_fn = SoftDTW(gamma=0.1, normalize=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, arguments.steps
    )

    step = make_step(model, loss_fn, device)
    how = "eager"
    if not arguments.eager:
        # Without a C++ compiler the graph is captured, and run one op at a time.
        how = "inductor" if device == "cuda" or shutil.which("g++") else "aot_eager"
        step = torch.compile(step, fullgraph=True, backend=how)
    print(f"device: {device}, autocast to bfloat16, torch.compile: {how}")

    losses: list[float] = []
    start = time.perf_counter()
    for k in range(arguments.steps):
        loss = step(*(side.to(device) for side in voice.batch()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if k == 0:
            print(
                f"step {k:4d}: loss {loss.item():8.3f}   "
                f"({time.perf_counter() - start:.1f} s, compiling included)"
            )
            start = time.perf_counter()
        elif (k + 1) % 50 == 0 or k + 1 == arguments.steps:
            rate = k / (time.perf_counter() - start)
            print(
                f"step {k:4d}: loss {loss.item():8.3f}   "
                f"({rate:.0f} steps a second)"
            )

    tokens, text_lengths, recordings, recording_lengths = (
        side.to(device) for side in voice.batch()
    )
    predicted_lengths = FRAMES_PER_TOKEN * text_lengths
    # The one whose tempo differs most.
    shown = int((recording_lengths - predicted_lengths).abs().argmax())
    with torch.no_grad():
        frames = model(tokens)[shown, : predicted_lengths[shown]]
    recording = recordings[shown, : recording_lengths[shown]]
    alignment = softdtw_alignment(frames, recording, gamma=0.1)
    path = arguments.out / "speech_training.png"
    draw(path, losses, frames.cpu(), recording.cpu(), alignment.cpu())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; picture: {path}")


if __name__ == "__main__":
    main()
