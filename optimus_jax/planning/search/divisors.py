"""Divisors and prime factors in O(sqrt(n)) time, because a mistyped batch may be a billion
examples.
"""

import math
from functools import lru_cache


@lru_cache(maxsize=1 << 12)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors in rising order."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return (*low, *(number // each for each in reversed(low) if each * each != number))


def prime_factors(number: int) -> dict[int, int]:
    """Each prime that divides `number`, with its power."""
    found: dict[int, int] = {}
    prime = 2
    while prime * prime <= number:
        while number % prime == 0:
            found[prime], number = found.get(prime, 0) + 1, number // prime
        prime += 1
    return found | ({number: found.get(number, 0) + 1} if number > 1 else {})
