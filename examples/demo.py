"""The library in a minute: train a forecaster, average series, check a gradient.

    make demo            (or: python examples/demo.py [--out output/demo.png])

Runs on the GPU where there is one, on the CPU otherwise.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from softdtw_cuda import (
    SoftDTW,
    _reference,
    softdtw,
    softdtw_alignment,
    softdtw_barycenter,
)
from softdtw_cuda.plot import BLUE, GREY, INK, MUTED, SHADE, VERMILLION

STEPS = 64


def echoes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A pulse announces an echo: its place sets when, up to a random jitter.

    Returns (count, STEPS) histories and (count, STEPS, 1) futures.
    """
    time_step = torch.arange(STEPS)
    pulse_at = torch.randint(8, STEPS - 8, (count, 1), generator=generator)
    height = 0.7 + 0.5 * torch.rand(count, 1, generator=generator)
    history = height * torch.exp(-0.5 * ((time_step - pulse_at) / 1.5) ** 2)
    jitter = torch.randint(-5, 6, (count, 1), generator=generator)
    elapsed = (time_step - (4 + pulse_at // 2 + jitter)).clamp(min=0)
    future = (
        height * torch.sin(2 * torch.pi * elapsed / 11) * torch.exp(-elapsed / 14)
    )
    noise = 0.02 * torch.randn(2, count, STEPS, generator=generator)
    return history + noise[0], (future + noise[1]).unsqueeze(2)


class Forecaster(nn.Module):
    """History (B, STEPS) to future (B, STEPS, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(STEPS, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, STEPS),
        )

    def forward(self, history: Tensor) -> Tensor:
        future: Tensor = self.layers(history)
        return future.unsqueeze(2)


def train(
    loss_fn: nn.Module, history: Tensor, future: Tensor, steps: int
) -> tuple[Forecaster, list[float]]:
    """The ordinary loop; only the loss differs."""
    torch.manual_seed(0)
    model = Forecaster().to(history.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        picked = torch.randint(len(history), (64,), device=history.device)
        loss = loss_fn(model(history[picked]), future[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


def warped_blocks(count: int, generator: torch.Generator) -> Tensor:
    """Two blocks, up and down, each of random place and width: (count, 100, 1)."""
    time_step = torch.arange(100)
    first, second = (
        torch.randint(low, high, (count, 1), generator=generator)
        for low, high in ((12, 38), (58, 84))
    )
    widths = torch.randint(5, 11, (2, count, 1), generator=generator)
    wave = ((time_step - first).abs() < widths[0]).float() - (
        (time_step - second).abs() < widths[1]
    ).float()
    return (wave + 0.04 * torch.randn(count, 100, generator=generator)).unsqueeze(2)


def gradient_error(device: torch.device) -> float:
    """Relative error of the float32 gradient against autograd in float64."""
    generator = torch.Generator().manual_seed(4)
    x, y = (
        torch.randn(2, length, 16, generator=generator) for length in (512, 480)
    )
    wide_x = x.double().requires_grad_()
    _reference.softdtw(wide_x, y.double(), gamma=0.1).sum().backward()
    x = x.to(device).requires_grad_()
    softdtw(x, y.to(device), gamma=0.1).sum().backward()
    assert x.grad is not None
    assert wide_x.grad is not None
    return ((x.grad.cpu() - wide_x.grad).norm() / wide_x.grad.norm()).item()


def draw(
    path: Path,
    forecasts: tuple[Tensor, Tensor, Tensor, Tensor],
    waves: Tensor,
    mean: Tensor,
    barycenter: Tensor,
    alignment: Tensor,
) -> None:
    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": GREY,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
        }
    )
    figure = plt.figure(figsize=(11, 7), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.15))

    history, future, with_mse, with_softdtw = (each.cpu() for each in forecasts)
    panels = upper.subplots(1, 3, sharey=True)
    upper.suptitle(
        "Soft-DTW forecasts have the right shape", x=0.042, ha="left", weight="bold"
    )
    before, after = range(-STEPS, 0), range(STEPS)
    for k, axes in enumerate(panels):
        axes.axvspan(-STEPS, 0, color=SHADE, zorder=0)
        axes.plot(before, history[k], color=GREY, lw=1.2)
        axes.plot(after, future[k, :, 0], color=INK, lw=1.2, label="what came")
        axes.plot(
            after,
            with_mse[k, :, 0],
            color=VERMILLION,
            lw=1.8,
            label="forecast, squared error",
        )
        axes.plot(
            after,
            with_softdtw[k, :, 0],
            color=BLUE,
            lw=2.2,
            label="forecast, Soft-DTW",
        )
        axes.set_xlabel("time step")
        axes.set_xlim(-STEPS, STEPS)
        axes.set_xticks([-40, 0, 40])
    panels[0].set_ylabel("value")
    panels[0].text(-STEPS + 3, panels[0].get_ylim()[0] * 0.9, "seen", color=MUTED)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="upper right",
        ncols=3,
        frameon=False,
        handlelength=1.5,
    )

    left, right = lower.subplots(1, 2, width_ratios=(1.6, 1))
    left.plot(waves[..., 0].T.cpu(), color=GREY, lw=0.7, alpha=0.6)
    left.plot([], [], color=GREY, lw=1, label=f"{len(waves)} warped block waves")
    left.plot(mean[:, 0].cpu(), color=VERMILLION, lw=1.8, label="Euclidean mean")
    left.plot(
        barycenter[:, 0].cpu(), color=BLUE, lw=2.4, label="Soft-DTW barycenter"
    )
    left.set_title("The barycenter of warped series looks like one of them")
    left.set_xlabel("time step")
    left.set_ylabel("value")
    left.legend(frameon=False, loc="lower left")
    image = right.imshow(
        alignment.cpu().clamp(0, 1) ** 0.5,
        cmap="Blues",
        origin="lower",
        aspect="auto",
    )
    right.set_title("Soft alignment of two of them")
    right.set_xlabel("step of the second")
    right.set_ylabel("step of the first")
    bar = lower.colorbar(
        image,
        ax=right,
        ticks=[0, 0.5**0.5, 1],
        label="probability, on a square-root scale",
    )
    bar.ax.set_yticklabels(["0", "0.5", "1"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("output/demo.png"),
        help="where the picture goes",
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="training steps of each forecaster"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # a network this small gains nothing from more
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "one CPU thread"
    )
    print(f"device: {device} ({name}), torch {torch.__version__}")

    history, future = (side.to(device) for side in echoes(2048, generator))
    loss_fn = SoftDTW(gamma=0.02, bandwidth=12, normalize=True, reduction="mean")
    some = future[:2].clone().requires_grad_()
    loss_fn(
        some, future[2:4]
    ).backward()  # the first calls load or compile the kernels
    print(f"kernels ready after {time.perf_counter() - start:.1f} s")

    begin = time.perf_counter()
    with_softdtw, losses = train(loss_fn, history, future.detach(), arguments.steps)
    seconds = time.perf_counter() - begin
    with_mse, _ = train(nn.MSELoss(), history, future.detach(), arguments.steps)
    unseen_history, unseen_future = (
        side.to(device) for side in echoes(256, generator)
    )
    with torch.no_grad():
        forecasts = {
            "Soft-DTW": with_softdtw(unseen_history),
            "squared error": with_mse(unseen_history),
        }
        print(
            f"forecaster: {arguments.steps} steps in {seconds:.1f} s, "
            f"loss {sum(losses[:10]) / 10:.2f} -> {sum(losses[-10:]) / 10:.2f}"
        )
        for trained_with, forecast in forecasts.items():
            divergence = (
                softdtw(forecast, unseen_future, gamma=0.02, normalize=True)
                .mean()
                .item()
            )
            print(
                f"  trained with {trained_with + ':':15} "
                f"divergence on unseen series {divergence:.2f}"
            )

    waves = warped_blocks(20, generator).to(device)
    begin = time.perf_counter()
    barycenter, info = softdtw_barycenter(
        waves, gamma=0.1, optimizer="lbfgs", max_iter=200, return_info=True
    )
    print(
        f"barycenter: {info.iterations} L-BFGS steps "
        f"in {time.perf_counter() - begin:.1f} s ({info.stop_reason}), "
        f"loss {info.losses[0]:.2f} (Euclidean mean) -> {info.best_loss:.2f}"
    )

    error = gradient_error(device)
    print(
        "gradient check: float32 against float64, N=512, M=480, D=16, gamma=0.1: "
        f"relative error {error:.1e}"
    )

    alignment = softdtw_alignment(waves[0], waves[1], gamma=0.1)
    shown = [3, 4, 7]
    draw(
        arguments.out,
        (
            unseen_history[shown],
            unseen_future[shown],
            forecasts["squared error"][shown],
            forecasts["Soft-DTW"][shown],
        ),
        waves,
        waves.mean(0),
        barycenter,
        alignment,
    )
    print(
        f"time: {time.perf_counter() - start:.1f} s in all; "
        f"picture: {arguments.out}"
    )


if __name__ == "__main__":
    main()
