"""`python -m loadtests.compare.capacity`: what rate of each workload a fleet sustains under least_outstanding.

Sustained means that 90 % of the requests keep the SLO (TTFT 2 s, TPOT 100 ms). `scenarios.py` takes its rates from
here, as shares of what the cache-blind policy sustains: a fleet that idles tells nothing about routing, nor does one
that every policy drowns.
"""

from collections.abc import Callable

import click

from loadtests.compare.scenarios import PARAMS
from loadtests.replay.figures import figures
from loadtests.replay.options import FleetOptions, fleet, policy
from loadtests.replay.replay import Replay
from loadtests.replay.settings import ReplaySettings
from loadtests.workloads.catalog import WORKLOADS, load_named

SHARE_IN_SLO = 0.9


def sustained_speed(share_in_slo: Callable[[float], float], least: float, most: float, ratio: float = 1.04) -> float:
    """The highest speed at which enough requests keep the SLO, by bisection on a logarithmic scale.

    Args:
        share_in_slo: share of the requests that keep the SLO at a speed; taken to fall as the speed rises.
        least: a speed to begin with; halved until it is sustained.
        most: nothing higher is tried.
        ratio: the answer is exact to this factor.
    """
    while share_in_slo(least) < SHARE_IN_SLO:
        most, least = least, least / 2
    while most / least > ratio:
        middle = (least * most) ** 0.5
        if share_in_slo(middle) < SHARE_IN_SLO:
            most = middle
        else:
            least = middle
    return least


@click.command()
@click.argument("workloads", nargs=-1)
@click.option("--seed", type=int, default=1, show_default=True)
def main(workloads: tuple[str, ...], seed: int) -> None:
    """Print the sustained speed of each workload (1 is the catalog's rate) on eight H100 with Llama-3.1-8B."""
    engines = fleet(FleetOptions())
    for name in workloads or [name for name in WORKLOADS if not name.startswith("b2b-saas")]:
        load = load_named(name, PARAMS.get(name, ()), seed)

        def share(speed: float, load=load) -> float:  # type: ignore[no-untyped-def]
            settings = ReplaySettings(engines, seed, speed)
            return figures(Replay(load, policy("least_outstanding", seed), settings).run()).goodput.share

        click.echo(f"{name}: {sustained_speed(share, 0.5, 8.0):.2f}")


if __name__ == "__main__":
    main()
