"""Which scenarios are run, and the runs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from policies import POLICIES
from rank_core import library
from rank_model import RankParams
from simulation import Setting, simulate
from workload import make_workload

from loadbox.reader._core import BACKEND


@dataclass(frozen=True)
class Scenario:
    """One table: a trace on so many ranks with so many frontends."""

    trace: str
    ranks: int
    frontends: int
    requests: int

    @property
    def title(self) -> str:
        """How tables call it."""
        return f"{self.trace}, {self.ranks} ranks, {self.frontends} frontend{'s' * (self.frontends > 1)}"


@dataclass(frozen=True)
class Plan:
    """What one call of the benchmark runs."""

    scenarios: tuple[Scenario, ...]
    policies: tuple[str, ...]
    seeds: int | None
    """None: ten with 8 ranks, and five with more."""
    arrivals: str = "overlaid"
    utilisation: float = 0.8
    dispatch_s: float = 1e-3
    publish_early: bool = False

    def seeds_of(self, scenario: Scenario) -> range:
        """The seeds to run a scenario with."""
        return range(1, 1 + (self.seeds or (10 if scenario.ranks <= 8 else 5)))

    def setting(self, scenario: Scenario) -> Setting:
        """What surrounds the policies in a scenario."""
        rank = RankParams(publish_early=self.publish_early)
        return Setting(scenario.ranks, scenario.frontends, rank, dispatch_s=self.dispatch_s)


FRONTENDS = (1, 4, 16)
# Enough that the requests after the warm-up span several lives of a request; long ones (Mooncake) need fewer.
REQUESTS = {
    ("chat", 8): 6000, ("chat", 64): 16000, ("code", 8): 10000, ("code", 64): 12000, ("mooncake", 8): 5000, ("mooncake", 64): 8000,
}  # fmt: skip
FULL_POLICIES = tuple(name for name in POLICIES if name != "smg")
QUICK_POLICIES = ("round-robin", "own", "blind", "coordinator", "piggyback", "cold-set", "board", "oracle")


def full_plan(**changes: Any) -> Plan:
    """Everything: about a quarter of an hour on one core."""
    scenarios = tuple(Scenario(trace, ranks, f, count) for (trace, ranks), count in REQUESTS.items() for f in FRONTENDS)
    return Plan(**{"scenarios": scenarios, "policies": FULL_POLICIES, "seeds": None, **changes})


def quick_plan(**changes: Any) -> Plan:
    """Eight ranks, the main policies and shorter runs: under a minute. Its intervals are wide."""
    sizes = {"chat": 2000, "code": 2000, "mooncake": 1000}
    scenarios = tuple(Scenario(trace, 8, f, count) for trace, count in sizes.items() for f in FRONTENDS)
    return Plan(**{"scenarios": scenarios, "policies": QUICK_POLICIES, "seeds": 4, **changes})


def run_scenario(plan: Plan, scenario: Scenario) -> dict[str, Any]:
    """All policies on all seeds; each seed's requests are the same for all policies."""
    setting = plan.setting(scenario)
    outcomes: dict[str, dict[str, list[float]]] = {name: {} for name in plan.policies}
    capacities = []
    for seed in plan.seeds_of(scenario):
        workload = make_workload(
            scenario.trace,
            requests=scenario.requests,
            ranks=scenario.ranks,
            frontends=scenario.frontends,
            utilisation=plan.utilisation,
            params=setting.rank,
            seed=seed,
            arrivals=plan.arrivals,
        )
        capacities.append(workload.capacity)
        for name in plan.policies:
            outcome = simulate(setting, workload, POLICIES[name].make(setting, f"{scenario}/{seed}/{name}"))
            for key, value in asdict(outcome).items():
                outcomes[name].setdefault(key, []).append(value)
    return {**asdict(scenario), "seeds": list(plan.seeds_of(scenario)), "rank_capacity": capacities, "policies": outcomes}


def run(plan: Plan, done: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run a plan; ``done`` is given each scenario's results as they come. Gives what is written to the file."""
    results: list[dict[str, Any]] = []
    for scenario in plan.scenarios:
        results.append(run_scenario(plan, scenario))
        done(results[-1])
    return {
        "versions": {
            **{name: version(name) for name in ("loadbox", "numpy")},
            "python": platform.python_version(),
            "reader_core": BACKEND,
            "rank_model": "c" if library() is not None else "py",
        },
        "parameters": {
            "arrivals": plan.arrivals,
            "utilisation": plan.utilisation,
            **{k: v for k, v in asdict(plan.setting(plan.scenarios[0])).items() if k not in ("ranks", "frontends")},
        },
        "scenarios": results,
    }


def columns(result: dict[str, Any], policy: str, metric: str) -> Sequence[float]:
    """One metric of a policy in a scenario's results, a value a seed."""
    values: Sequence[float] = result["policies"][policy][metric]
    return values
