"""The records of a soak, and their judgement. Pure functions; times are seconds since the start."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# A client gets the error of a kill within this time after the server is ready again.
NOTICE_S = 2.0
# New shards are ready within this time after a kill, including the detection of a stopped one.
READY_S = 30.0
# Growth in MB per ten minutes, by linear regression.
MOST_GROWTH_MB: Mapping[str, float] = {"launcher": 2.0, "router": 10.0, "shard": 20.0}
# Growth from one shard to its replacement, at the same age.
MOST_GROWTH_OF_LIVES_MB = 20.0
# A new process fills its caches (soak-without-kills-2026-11-25.json: a shard for two minutes): of
# a shorter life only the level is judged, beside those of the other lives at the same age.
LEAST_LIFE_S = 360.0
LEAST_AGE_S = 60.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    kind: str
    began_s: float
    ended_s: float
    result: str
    """ok, vanished, refused (as expected) or failed."""
    said: str = ""
    """The problem."""
    is_typed: bool = False
    """Whether the server itself reported it, in the form of the dialect."""


@dataclass(slots=True)
class Kill:
    """A signal to a shard."""

    signal: str
    at_s: float
    ready_s: float | None = None
    """When the server was ready again."""

    def explains(self, at_s: float) -> bool:
        """Whether the kill may explain an error at this time."""
        end_s = self.at_s + READY_S if self.ready_s is None else self.ready_s
        return self.at_s <= at_s <= end_s + NOTICE_S


@dataclass(slots=True)
class Life:
    """One process: its memory in MB by time."""

    role: str
    pid: int
    points: list[tuple[float, float]] = field(default_factory=list)
    cache: list[tuple[float, float]] = field(default_factory=list)
    """Of a shard: the resident pages of its KV cache, which grow up to its size as blocks are first
    used. Not in `points`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked property of the server."""

    name: str
    is_good: bool
    said: str


def slope(points: Points) -> float:
    """The slope by linear regression."""
    return _slope([points])


def _slope(groups: Iterable[Points]) -> float:
    """The common slope of several groups of points with different offsets."""
    above = below = 0.0
    for points in groups:
        middle_x = sum(x for x, _ in points) / len(points)
        middle_y = sum(y for _, y in points) / len(points)
        above += sum((x - middle_x) * (y - middle_y) for x, y in points)
        below += sum((x - middle_x) ** 2 for x, _ in points)
    return above / below if below else 0.0


def rest(points: Points) -> Points:
    """The last two thirds of the time."""
    if not points:
        return points
    first, last = points[0][0], points[-1][0]
    return [point for point in points if point[0] >= first + (last - first) / 3]


def _span(points: Points) -> float:
    return points[-1][0] - points[0][0] if points else 0.0


def judge_memory(lives: Sequence[Life], num_kills: int) -> list[Finding]:
    """Of each long life the last two thirds count: launcher and router live as long as the server,
    a shard until it is killed. Where shards are killed their levels are judged, too."""
    findings = []
    for role, most in MOST_GROWTH_MB.items():
        of_role = [life.points for life in lives if life.role == role]
        if not of_role:
            findings.append(Finding(f"memory of the {role}", False, "it was never seen"))
            continue
        groups = [rest(points) for points in of_role if _span(points) >= LEAST_LIFE_S]
        if not groups:
            said = f"no life of {LEAST_LIFE_S:g} s to judge"
            findings.append(Finding(f"memory of the {role}", True, said))
            continue
        grown = 600 * _slope(groups)
        said = f"{grown:+.1f} MB in 10 minutes, at most {most:g}"
        findings.append(Finding(f"memory of the {role}", grown <= most, said))
    if num_kills:
        findings.append(_judge_lives([life for life in lives if life.role == "shard"]))
    return findings


def _judge_lives(shards: Sequence[Life]) -> Finding:
    """Whether each new shard takes more memory than its predecessor at the same age."""
    name = "memory of shard after shard"
    old = [life for life in shards if _span(life.points) >= LEAST_AGE_S]
    levels = []
    if old:
        age = min(_span(life.points) for life in old)
        for life in old:
            born = life.points[0][0]
            then = [mb for t, mb in life.points if age * 2 / 3 <= t - born <= age]
            levels.append((born, sum(then) / len(then)))
    levels = levels[len(levels) // 3 :]
    if len(levels) < 3:
        return Finding(name, True, "too few of them to judge")
    grown = 600 * slope(levels)
    said = f"{grown:+.1f} MB in 10 minutes, at most {MOST_GROWTH_OF_LIVES_MB:g}"
    return Finding(name, grown <= MOST_GROWTH_OF_LIVES_MB, said)


def judge_requests(outcomes: Sequence[Outcome], kills: Sequence[Kill]) -> list[Finding]:
    """Whether every failure was reported by the server and is explained by a kill."""
    failed = [outcome for outcome in outcomes if outcome.result == "failed"]
    explained = [
        outcome
        for outcome in failed
        if outcome.is_typed and any(kill.explains(outcome.ended_s) for kill in kills)
    ]
    kinds = {outcome.kind for outcome in outcomes}
    done = {outcome.kind for outcome in outcomes if outcome.result in ("ok", "refused")}
    wrong = len(failed) - len(explained)
    return [
        Finding(
            "no failure that a kill does not explain",
            wrong == 0,
            f"{wrong} of {len(outcomes)} requests; {len(explained)} failures are explained",
        ),
        Finding(
            "requests of each kind are answered",
            bool(outcomes) and kinds == done,
            f"{len(done)} kinds" + "".join(f"; no {kind}" for kind in sorted(kinds - done)),
        ),
    ]


def judge_kills(kills: Sequence[Kill]) -> Finding:
    """Whether the server is ready again after each kill."""
    waits = [kill.ready_s - kill.at_s for kill in kills if kill.ready_s is not None]
    is_good = len(waits) == len(kills) and all(wait <= READY_S for wait in waits)
    said = f"{len(waits)} of {len(kills)} times"
    if waits:
        said += f", after {max(waits):.1f} s at most"
    return Finding("ready again after each kill", is_good, said)
