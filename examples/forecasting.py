"""Forecasting: the same network trained with squared error and with Soft-DTW.

    python examples/forecasting.py [--out output] [--steps 1500]

Two pulses announce a jump: its height is the difference of theirs, it comes as long
after the second pulse as that came after the first, give or take five steps that
nobody can predict. A network trained with squared error predicts the average of all
possible jumps, a ramp. The Soft-DTW divergence forgives a small shift in time, so
that the network can predict a sharp jump.
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

from softdtw_cuda import SoftDTW, softdtw
from softdtw_cuda.plot import BLUE, GREY, INK, MUTED, SHADE, VERMILLION

SEEN, AHEAD, JITTER = 40, 40, 5
QUANTILES = {0.1: "10th\npercentile", 0.5: "median", 0.9: "90th\npercentile"}
"""Of the error: which forecasts are shown."""


def pulses_and_jumps(
    count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(count, SEEN) histories and (count, AHEAD, 1) futures."""
    step = torch.arange(SEEN + AHEAD)
    first = torch.randint(3, 16, (count, 1), generator=generator)
    second = first + torch.randint(20, 24, (count, 1), generator=generator)
    heights = 0.3 + 0.9 * torch.rand(count, 2, generator=generator)
    jitter = torch.randint(-JITTER, JITTER + 1, (count, 1), generator=generator)
    jump_at = second + (second - first) + jitter
    series = 0.02 * torch.randn(count, SEEN + AHEAD, generator=generator)
    series += heights[:, :1] * (step == first) + heights[:, 1:] * (step == second)
    series += (heights[:, 1:] - heights[:, :1]) * (step >= jump_at)
    return series[:, :SEEN], series[:, SEEN:].unsqueeze(2)


def forecaster() -> nn.Sequential:
    """History (B, SEEN) to future (B, AHEAD, 1); always the same start."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(SEEN, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()),
        *(nn.Linear(128, AHEAD), nn.Unflatten(1, (AHEAD, 1))),
    )


def train(
    loss_fn: nn.Module, history: Tensor, future: Tensor, steps: int
) -> nn.Module:
    """An ordinary training loop; nothing in it knows which loss it uses."""
    model = forecaster().to(history.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(history), (64,), device=history.device)
        loss = loss_fn(model(history[batch]), future[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def steepest(series: Tensor) -> Tensor:
    """(B,) the largest change from one step to the next."""
    return series.diff(dim=1).abs().amax(dim=(1, 2))


def draw(
    path: Path,
    history: Tensor,
    future: Tensor,
    forecasts: dict[str, Tensor],
    sharpness: dict[str, float],
    errors: dict[str, float],
) -> None:
    # So few inches that letters can be read on a phone, at half this size.
    figure, panels = plt.subplots(
        2, 3, figsize=(6.4, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    before, after = range(-SEEN, 0), range(AHEAD)
    colors = {"squared error": VERMILLION, "Soft-DTW": BLUE}
    for row, (name, forecast) in zip(panels, forecasts.items(), strict=True):
        for k, panel in enumerate(row):
            panel.axvspan(-SEEN, -0.5, color=SHADE, zorder=0)
            panel.plot(before, history[k].cpu(), color=GREY, lw=1.1)
            panel.plot(
                after, future[k, :, 0].cpu(), color=INK, lw=1.2, label="what came"
            )
            panel.plot(
                after,
                forecast[k, :, 0].cpu(),
                color=colors[name],
                lw=2.2,
                label="forecast",
            )
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xlim(-SEEN, AHEAD - 1)
        row[0].set_title(
            " \n ", fontsize=10
        )  # keeps the room for a title that reaches over the whole row
        score = (
            f"steepest step {sharpness[name]:.2f} of the true one, "
            f"squared error {errors[name]:.4f}"
        )
        for text, height, weight in (
            (f"Trained with {name}", 19, "bold"),
            (score, 5, "normal"),
        ):
            title = row[0].annotate(
                text,
                (0, 1),
                xycoords="axes fraction",
                xytext=(0, height),
                textcoords="offset points",
                fontweight=weight,
                fontsize=10,
            )
            title.set_in_layout(False)
        row[0].set_ylabel("value")
        for panel, place, end in zip(row, QUANTILES, future[:, -1, 0], strict=True):
            height, side = (0.05, "bottom") if end > 0 else (0.95, "top")
            where = {"transform": panel.transAxes, "ha": "right", "va": side}
            text = QUANTILES[place]
            panel.text(0.98, height, text, color=MUTED, fontsize=9, **where)
        row[0].legend(
            frameon=False,
            loc="lower left",
            fontsize=8,
            handlelength=1.2,
            borderaxespad=0,
        )
    where = {"transform": panels[0, 0].get_xaxis_transform(), "va": "top"}
    panels[0, 0].text(1 - SEEN, 0.98, "seen", color=MUTED, fontsize=9, **where)
    panels[0, 0].text(1, 0.98, "to forecast", color=MUTED, fontsize=9, **where)
    for panel in panels[1]:
        panel.set_xlabel("time step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help="training steps of each network"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # a network this small gains nothing from more
    generator = torch.Generator().manual_seed(1)
    history, future = (
        side.to(device) for side in pulses_and_jumps(4096, generator)
    )
    unseen_history, unseen_future = (
        side.to(device) for side in pulses_and_jumps(512, generator)
    )

    losses = {
        "squared error": nn.MSELoss(),
        # The band says how much shift to forgive: as much as nobody can predict. A
        # gamma this small makes no forecast rougher than the data.
        "Soft-DTW": SoftDTW(
            gamma=0.001, bandwidth=JITTER, normalize=True, reduction="mean"
        ),
    }
    forecasts, sharpness, errors = {}, {}, {}
    start = time.perf_counter()
    print(
        f"{'trained with':14} {'squared error':>14} {'divergence':>11} "
        f"{'steepest step':>14}"
    )
    for name, loss_fn in losses.items():
        model = train(loss_fn, history, future, arguments.steps)
        with torch.no_grad():
            forecast = model(unseen_history)
            errors[name] = nn.functional.mse_loss(forecast, unseen_future).item()
            divergence = (
                softdtw(forecast, unseen_future, gamma=0.01, normalize=True)
                .mean()
                .item()
            )
            sharpness[name] = (
                (steepest(forecast) / steepest(unseen_future)).median().item()
            )
        print(
            f"{name:14} {errors[name]:14.4f} {divergence:11.3f} "
            f"{sharpness[name]:13.2f}x"
        )
        forecasts[name] = forecast
    path = arguments.out / "forecasting.png"
    # Clear jumps, from well to badly forecast by the network trained with Soft-DTW.
    clear = (unseen_future[:, -1, 0].abs() > 0.4).nonzero()[:, 0]
    error = (forecasts["Soft-DTW"] - unseen_future)[clear].square().mean((1, 2))
    ranked = clear[error.argsort()]
    chosen = torch.stack(
        [ranked[round(place * (len(ranked) - 1))] for place in QUANTILES]
    )
    draw(
        path,
        unseen_history[chosen],
        unseen_future[chosen],
        {name: forecast[chosen] for name, forecast in forecasts.items()},
        sharpness,
        errors,
    )
    ratio = errors["Soft-DTW"] / errors["squared error"]
    print(
        f"squared error prefers the ramp; Soft-DTW the jump, at {ratio:.1f} times "
        "the squared error:"
    )
    print("the shape is right, its moment may be off")
    print(f"{time.perf_counter() - start:.1f} s in all; picture: {path}")


if __name__ == "__main__":
    main()
