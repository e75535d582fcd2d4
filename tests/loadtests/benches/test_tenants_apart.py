"""The test by which the bench of tenants tells two samples of times apart."""

import random

from loadtests.benches.tenants_apart import kolmogorov_smirnov


def test_equal_samples_are_not_told_apart_and_disjoint_ones_are() -> None:
    assert kolmogorov_smirnov([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == (0.0, 1.0)
    distance, chance = kolmogorov_smirnov([float(n) for n in range(50)], [float(n) for n in range(50, 100)])
    assert distance == 1.0 and chance < 1e-9


def test_the_distance_is_that_of_counting_at_every_place() -> None:
    rng = random.Random(1)
    for _ in range(50):
        one = [float(rng.randrange(9)) for _ in range(rng.randint(1, 20))]
        other = [float(rng.randrange(9)) for _ in range(rng.randint(1, 20))]
        expected = max(
            abs(sum(x <= place for x in one) / len(one) - sum(x <= place for x in other) / len(other))
            for place in range(9)
        )
        assert abs(kolmogorov_smirnov(one, other)[0] - expected) < 1e-12


def test_chance_is_as_often_as_it_says() -> None:
    """Of samples of one distribution, a tenth differ by as much as one in ten does, or a little less."""
    rng = random.Random(2)

    def sample() -> list[float]:
        return [rng.gauss(0, 1) for _ in range(100)]

    num_rare = sum(kolmogorov_smirnov(sample(), sample())[1] < 0.1 for _ in range(300))
    assert 10 <= num_rare <= 45
