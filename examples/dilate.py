"""DILATE: forecasts of a step, trained with three losses; shape and timing of each.

    python examples/dilate.py [--out output] [--steps 800] [--seeds 4]

The synthetic task of Le Guen and Thome, "Shape and time distortion loss for
training deep time series forecasting models" (NeurIPS 2019): two peaks in the
twenty steps that are seen announce a step in the twenty that follow. Its height is
the difference of theirs, its time depends on the distance between them, give or
take three steps. 500 series to train on, 500 to test. Measured as in the paper by
squared error, DTW (shape) and TDI (timing: how far DTW's path is from the
diagonal), for several seeds.
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

from softdtw_cuda import DilateLoss, SoftDTW, softdtw, softdtw_expected_cost
from softdtw_cuda.plot import BLUE, GREEN, GREY, INK, SHADE, VERMILLION

SEEN = AHEAD = 20
SERIES, BATCH, GAMMA = 500, 100, 0.01
COLORS = {"squared error": VERMILLION, "Soft-DTW": BLUE, "DILATE": GREEN}
PERCENTILES = {0.1: "10th percentile", 0.5: "median", 0.9: "90th percentile"}
MEASURES = {
    "squared error": "squared error",
    "DTW": "DTW: error of shape",
    "TDI": "TDI: error of timing",
}


def losses() -> dict[str, nn.Module]:
    return {
        "squared error": nn.MSELoss(),
        "Soft-DTW": SoftDTW(gamma=GAMMA, reduction="mean"),
        "DILATE": DilateLoss(alpha=0.5, gamma=GAMMA),
    }


def peaks_and_steps(
    count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(count, SEEN) histories and (count, AHEAD, 1) futures, as the authors'."""

    def draw(first: int, last: int) -> Tensor:
        return torch.randint(first, last + 1, (count, 1), generator=generator)

    time = torch.arange(SEEN + AHEAD)
    first, second = draw(1, 10), draw(10, 18)
    heights = torch.rand(count, 2, generator=generator)
    step_at = second + (second - first).abs() + draw(-3, 3)
    series = 0.01 * torch.rand(count, SEEN + AHEAD, generator=generator)
    series += heights[:, :1] * (time == first) + heights[:, 1:] * (time == second)
    series += (heights[:, 1:] - heights[:, :1]) * (time >= step_at)
    return series[:, :SEEN], series[:, SEEN:].unsqueeze(2)


def train(
    loss_fn: nn.Module, history: Tensor, future: Tensor, steps: int, seed: int
) -> nn.Module:
    """A network with one hidden layer; a seed gives all losses the same batches."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(SEEN, 128),
        nn.ReLU(),
        nn.Linear(128, AHEAD),
        nn.Unflatten(1, (AHEAD, 1)),
    ).to(history.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(history), (BATCH,)).to(history.device)
        loss = loss_fn(model(history[batch]), future[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def measure(forecast: Tensor, future: Tensor) -> dict[str, float]:
    """Means over the test series. With this gamma the alignment is DTW's path."""
    forecast, future = forecast.double(), future.double()
    step = torch.arange(AHEAD, dtype=torch.float64, device=future.device)
    off_diagonal = (step.view(-1, 1) - step).square() / AHEAD**2
    dtw = softdtw(forecast, future, gamma=1e-7).clamp(min=0).sqrt()
    tdi = softdtw_expected_cost(forecast, future, omega=off_diagonal, gamma=1e-7)
    return {
        "squared error": nn.functional.mse_loss(forecast, future).item(),
        "DTW": dtw.mean().item(),
        "TDI": tdi.mean().item(),
    }


def chosen(forecast: Tensor, future: Tensor) -> Tensor:
    """Series with a clear step, at percentiles of the forecast's squared error."""
    step = (future[:, -1, 0] - future[:, 0, 0]).abs()
    clear = (step > 0.25).nonzero()[:, 0]
    error = (forecast - future)[clear].square().mean((1, 2))
    ranked = clear[error.argsort()]
    return ranked[[round(place * (len(ranked) - 1)) for place in PERCENTILES]]


def draw(
    path: Path,
    history: Tensor,
    future: Tensor,
    forecasts: dict[str, Tensor],
    measured: dict[str, dict[str, Tensor]],
) -> None:
    """Above, the forecasts of every loss; below, what was measured."""
    figure = plt.figure(figsize=(11, 8.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2.7, 1.25))
    panels = above.subplots(len(future), 3, sharex=True, sharey="row")
    for column, (name, forecast) in zip(panels.T, forecasts.items(), strict=True):
        for k, panel in enumerate(column):
            panel.axvspan(-SEEN, -0.5, color=SHADE, zorder=0)
            panel.plot(range(-SEEN, 0), history[k].cpu(), color=GREY, lw=1.1)
            panel.plot(
                range(AHEAD),
                future[k, :, 0].cpu(),
                color=INK,
                lw=1.2,
                label="what came",
            )
            panel.plot(
                range(AHEAD),
                forecast[k, :, 0].cpu(),
                color=COLORS[name],
                lw=2.2,
                label="forecast",
            )
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xlim(-SEEN, AHEAD - 1)
            if column is panels.T[0] or name == "squared error":
                panel.set_ylabel(
                    f"{list(PERCENTILES.values())[k]}\nof DILATE's error"
                )
        column[0].set_title(
            f"trained with {name}",
            color=COLORS[name],
            fontweight="bold",
            fontsize=11,
        )
        column[0].legend(frameon=False, loc="upper left", fontsize=9)
        column[-1].set_xlabel("time step")
    for (measure, title), panel in zip(
        MEASURES.items(), below.subplots(1, 3), strict=True
    ):
        for row, (name, results) in enumerate(measured.items()):
            values = results[measure]
            panel.plot(
                values,
                [row] * len(values),
                "o",
                color=COLORS[name],
                alpha=0.45,
                ms=6,
                mew=0,
            )
            mean = values.mean().item()
            panel.plot(
                [mean, mean], [row - 0.3, row + 0.3], color=COLORS[name], lw=2.5
            )
            panel.text(
                mean,
                row - 0.36,
                f"{mean:.3g}",
                ha="center",
                va="bottom",
                fontsize=9,
                color=INK,
            )
        panel.set_yticks(
            range(len(measured)),
            list(measured) if measure == "squared error" else [],
        )
        panel.set_ylim(len(measured) - 0.5, -0.8)
        panel.set_xlim(
            0,
            1.12
            * max(results[measure].max().item() for results in measured.values()),
        )
        panel.set_xlabel(f"{title} (less is better)")
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    parser.add_argument(
        "--steps", type=int, default=800, help="training steps of each network"
    )
    parser.add_argument(
        "--seeds", type=int, default=4, help="data sets and networks"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # a network this small gains nothing from more
    start = time.perf_counter()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in losses()}
    pictured: dict[str, Tensor] = {}
    for seed in range(arguments.seeds):
        generator = torch.Generator().manual_seed(seed)
        history, future, unseen_history, unseen_future = (
            side.to(device)
            for _ in range(2)
            for side in peaks_and_steps(SERIES, generator)
        )
        if seed == 0:
            test = unseen_history, unseen_future
        for name, loss_fn in losses().items():
            model = train(loss_fn, history, future, arguments.steps, seed)
            with torch.no_grad():
                forecast = model(unseen_history)
                runs[name].append(measure(forecast, unseen_future))
            if seed == 0:
                pictured[name] = forecast
    measured = {
        name: {
            key: torch.tensor([each[key] for each in results], dtype=torch.float64)
            for key in MEASURES
        }
        for name, results in runs.items()
    }
    print(f"means over {arguments.seeds} seeds, and their standard deviations")
    print(f"{'trained with':14} {'squared error':>17} {'DTW':>16} {'TDI':>16}")
    for name, results in measured.items():
        correction = min(1, arguments.seeds - 1)
        cells = [
            f"{values.mean():.4f} ±{values.std(correction=correction):.4f}"
            for values in results.values()
        ]
        print(f"{name:14} {cells[0]:>17} {cells[1]:>16} {cells[2]:>16}")
    path = arguments.out / "dilate.png"
    shown = chosen(pictured["DILATE"], test[1])
    forecasts = {name: forecast[shown] for name, forecast in pictured.items()}
    draw(path, test[0][shown], test[1][shown], forecasts, measured)
    print(f"{time.perf_counter() - start:.1f} s in all; picture: {path}")


if __name__ == "__main__":
    main()
