"""The number of threads of a pass: ThreadChoice on simulated machines."""

from collections.abc import Callable

from text_generation_shard.device.cpu.kernels.threads import ThreadChoice


class Machine:
    """Passes of some tokens, one after another."""

    def __init__(self, most: int = 2) -> None:
        self.choice = ThreadChoice(most)
        self.now = 100.0
        self.counts: list[int] = []

    def run(self, passes: int, wall: Callable[[int], float], cpu: float, tokens: int = 8) -> None:
        for _ in range(passes):
            count = self.choice.count
            self.counts.append(count)
            self.now += wall(count)
            self.choice.observe(tokens, wall(count), cpu, self.now)


def test_alone_all_threads_are_used_and_nothing_is_tried() -> None:
    machine = Machine()
    machine.run(10_000, lambda count: 0.02 / count, 0.0095)
    assert set(machine.counts) == {2}


def test_one_thread_where_the_others_are_kept_waiting_for() -> None:
    machine = Machine()
    machine.run(20, lambda count: 0.02 if count == 1 else 0.2, 0.02)
    assert machine.counts[:4] == [2] * 4 and machine.counts[4:] == [1] * 16


def test_all_threads_again_when_the_neighbour_has_gone() -> None:
    machine = Machine()
    machine.run(20, lambda count: 0.02 if count == 1 else 0.2, 0.02)
    machine.run(400, lambda count: 0.02 / count, 0.01)
    assert machine.counts[-1] == 2


def test_a_trial_that_loses_is_repeated_less_and_less_often() -> None:
    machine = Machine()
    machine.run(20_000, lambda count: 0.02 if count == 1 else 0.015, 0.01)
    tried = machine.counts.count(1)
    assert 0 < tried < 20_000 * 0.01 and machine.counts[-1] == 2


def test_passes_of_another_size_are_not_compared() -> None:
    machine = Machine()
    machine.run(4, lambda count: 0.2, 0.02)
    assert machine.choice.count == 1
    machine.run(1, lambda count: 0.001, 0.001, tokens=500)
    assert machine.choice.count == 2


def test_a_single_core_has_no_choice() -> None:
    machine = Machine(most=1)
    machine.run(100, lambda count: 0.2, 0.02)
    assert set(machine.counts) == {1}
