"""Curves of a replay, drawn with matplotlib, which is an extra: `pip install 'warmgate[plot]'`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.replay.figures import Figures, StageFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Check that there is something to draw with.

    Raises:
        ImportError: there is not; the message says what to install.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'warmgate[plot]'") from error


def draw(path: Path, ttfts_ms: Mapping[str, Sequence[float]], all_figures: Sequence[Figures]) -> None:
    """Draw the distribution of TTFT, and for ladders TTFT and output rate over the offered rate.

    Args:
        path: PNG file to write.
        ttfts_ms: TTFT of every request by policy.
        all_figures: one per policy.
    """
    # The object interface, not pyplot: no global state and no display.
    from matplotlib.figure import Figure

    staged = bool(all_figures) and bool(all_figures[0].stages)
    figure = Figure(figsize=(18 if staged else 7, 5), layout="constrained")
    axes = figure.subplots(1, 3 if staged else 1, squeeze=False)[0]
    _distribution(axes[0], ttfts_ms)
    if staged:
        _over_stages(axes[1], all_figures, "mean TTFT, s", lambda stage: stage.ttft_ms.mean / 1000.0)
        axes[1].set_yscale("log")
        _over_stages(axes[2], all_figures, "output, tokens/s", lambda stage: stage.output_tokens_per_s)
    if all_figures:
        figure.suptitle(all_figures[0].workload)
    figure.savefig(path, format="png", dpi=120)


def _distribution(axes: "Axes", ttfts_ms: Mapping[str, Sequence[float]]) -> None:
    for policy, values in ttfts_ms.items():
        ordered = sorted(value / 1000.0 for value in values)
        shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("TTFT, s")
    axes.set_ylabel("share of requests")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _over_stages(
    axes: "Axes", all_figures: Sequence[Figures], label: str, value: Callable[[StageFigures], float]
) -> None:
    for figures in all_figures:
        stages = [stage for stage in figures.stages if not stage.warm_up]
        abscissa = [number if stage.rate_per_s is None else stage.rate_per_s for number, stage in enumerate(stages)]
        axes.plot(abscissa, [value(stage) for stage in stages], marker="o", label=figures.policy)
    axes.set_xlabel("offered requests/s")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
