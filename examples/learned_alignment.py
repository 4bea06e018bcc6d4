"""Features that align: a linear map, trained through the alignment itself.

    python examples/learned_alignment.py [--out output] [--steps 200]

Two recordings of one event at different speeds have six mixed channels: two carry
the event, four are louder noise. Soft-DTW of the channels follows the noise. For
the training pairs it is known which moments belong together: omega_ij = (s_i -
t_j)^2, with s and t the moments of the event that the steps show. The expected cost
<E, omega> is how far the alignment E is from the truth, and its gradient, a second
derivative of Soft-DTW, says how the features must change; no N x M table is formed.
The map is then used on new pairs.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from softdtw_cuda import softdtw_alignment, softdtw_expected_cost
from softdtw_cuda.plot import BLUE, INK, VERMILLION

N, M, CHANNELS, EVENT, GAMMA = 60, 50, 6, 2, 0.1
PAIRS, UNSEEN, LOUDNESS = 64, 200, 1.5


def smooth(moments: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(B, length, count) random waves at moments (B, length) from 0 to 1."""
    waves = torch.arange(1, 6)
    sines, cosines = torch.randn(
        2, len(moments), 5, count, generator=generator
    ) / math.sqrt(5)
    angles = math.pi * moments.unsqueeze(2) * waves
    return angles.sin() @ sines + angles.cos() @ cosines


def recordings(
    count: int, mixing: Tensor, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Pairs of recordings (B, N or M, CHANNELS), and the moments that they show."""
    s = torch.linspace(0, 1, N).expand(count, N)
    pace = 0.5 + 1.5 * torch.rand(count, 1, generator=generator)
    t = torch.linspace(0, 1, M).expand(count, M) ** pace
    # One event at both sets of moments; the noise is drawn for each recording.
    event = smooth(torch.cat([s, t], 1), EVENT, generator)
    sides = []
    for part, moments in zip(event.split((N, M), 1), (s, t), strict=True):
        noise = LOUDNESS * smooth(moments, CHANNELS - EVENT, generator)
        sides.append(torch.cat([part, noise], 2) @ mixing)
    return (sides[0], sides[1]), (s, t)


def distance(moments: tuple[Tensor, Tensor]) -> Tensor:
    """(B, N, M) distances between the moments that two steps show."""
    return moments[0].unsqueeze(2) - moments[1].unsqueeze(1)


def off_by(sides: tuple[Tensor, Tensor], moments: tuple[Tensor, Tensor]) -> float:
    """Mean distance of two aligned steps, in percent of the event's duration."""
    with torch.no_grad():
        off = softdtw_expected_cost(
            *sides, omega=distance(moments).abs(), gamma=GAMMA
        )
        steps = softdtw_expected_cost(
            *sides, omega=torch.ones(N, M, device=off.device), gamma=GAMMA
        )
        return 100 * (off / steps).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS, generator=generator)).Q
    (x, y), known = recordings(PAIRS, mixing, generator)
    unseen, moments = recordings(UNSEEN, mixing, generator)
    x, y, *known, new_x, new_y, new_s, new_t = (
        side.to(device) for side in (x, y, *known, *unseen, *moments)
    )
    omega = distance((known[0], known[1])).square()
    unseen, moments = (new_x, new_y), (new_s, new_t)

    torch.manual_seed(0)
    features = nn.Linear(CHANNELS, EVENT, bias=False).to(device)
    optimizer = torch.optim.Adam(features.parameters(), lr=0.02)
    before = off_by(unseen, moments)
    curve = []
    for step in range(arguments.steps + 1):
        if step % 10 == 0:
            curve.append(
                (step, off_by((features(new_x), features(new_y)), moments))
            )
        if step == arguments.steps:
            break
        loss = softdtw_expected_cost(
            features(x), features(y), omega=omega, gamma=GAMMA
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("mean distance of aligned steps of new pairs, in percent of the duration")
    print(f"all channels        {before:5.2f} %")
    print(f"untrained features  {curve[0][1]:5.2f} %")
    print(f"trained features    {curve[-1][1]:5.2f} %")

    with torch.no_grad():
        pictured = 2
        tables = [
            softdtw_alignment(*sides, gamma=GAMMA).cpu()
            for sides in (
                (new_x[pictured], new_y[pictured]),
                (features(new_x[pictured]), features(new_y[pictured])),
            )
        ]
    figure, (first, second, last) = plt.subplots(
        1, 3, figsize=(11, 3.7), layout="constrained"
    )
    for panel, table, title in (
        (first, tables[0], "one of them, aligned by all channels"),
        (second, tables[1], "the same, by trained features"),
    ):
        panel.imshow(
            table.sqrt(),
            cmap="Blues",
            aspect="auto",
            origin="upper",
            vmin=0,
            vmax=1,
        )
        panel.plot(
            range(M),
            (N - 1) * new_t[pictured].cpu(),
            color=VERMILLION,
            lw=1.4,
            ls="--",
            label="truth",
        )
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step of y")
        panel.set_ylabel("step of x")
        panel.legend(frameon=False, loc="upper right")
    last.plot(
        *zip(*curve, strict=True), color=BLUE, lw=2, label="features being trained"
    )
    last.axhline(before, color=INK, lw=1, ls=":", label="all channels")
    last.set(
        xlabel="training step", ylabel="distance, % of the event", ylim=(0, None)
    )
    last.set_title(f"{UNSEEN} new pairs", fontsize=10)
    last.legend(frameon=False)
    last.spines[["top", "right"]].set_visible(False)
    path = arguments.out / "learned_alignment.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"{time.perf_counter() - start:.1f} s in all; picture: {path}")


if __name__ == "__main__":
    main()
