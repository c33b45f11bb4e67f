"""Decodes mutants of valid descriptors, and uses those that are accepted: nothing may be raised but our own errors, and
no memory be taken beyond 64 MiB.

`python -m fuzz.mutations [--count N] [--seed N]`, in tests/. A mutant that fails is printed; its number, with the same
seed and count, gives it again.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from format.corpus import LENIENT, Seeded, a_descriptor, vectors
from format.mutants import Mutator
from hurray_wire.descriptor import Descriptor, decode_descriptor
from hurray_wire.errors import HurrayError
from hurray_wire.image import plan_image
from hurray_wire.limits import Limits
from hurray_wire.policy import STRICT

GENERATED = 2000
BATCH = 1000
MEMORY_BYTES = 64 << 20
POLICIES = (STRICT, LENIENT)


def corpus(seed: int) -> list[bytes]:
    """Valid descriptors: the format's vectors, and as many of every kind as a generator gives."""
    source = Seeded(seed)
    known = [bytes.fromhex(vector["hex"])[: vector["consumed"]] for vector in vectors("valid")]
    return known + [a_descriptor(source).encode(LENIENT) for _ in range(GENERATED)]


def mutants(seed: int) -> Iterator[bytes]:
    """Blind ones, and ones whose lengths are right, by turns."""
    mutator = Mutator(corpus(seed), seed)
    while True:
        yield from chain(mutator.of_bytes(BATCH), mutator.of_fields(BATCH))


def use(data: bytes, number: int) -> str:
    """What becomes of a mutant: a rule, or "accepted". Raises what it should not."""
    policy = POLICIES[number % len(POLICIES)]
    try:
        descriptor, consumed = decode_descriptor(data, policy)
    except HurrayError as error:
        return error.rule or error.reason
    assert 0 < consumed <= len(data)
    look_at(descriptor)
    try:
        descriptor.encode(policy)
        plan_image([descriptor], 1 << 20, Limits())
    except HurrayError as error:
        return f"accepted, then {error.reason}"
    return "accepted"


def look_at(descriptor: Descriptor) -> None:
    """Everything that can be derived from its fields."""
    for name in dir(Descriptor):
        if isinstance(getattr(Descriptor, name), property):
            getattr(descriptor, name)


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found: Counter[str] = Counter()
    source = mutants(options.seed)
    for number, data in enumerate(islice(source, 2 * BATCH)):  # whatever is made once is made now
        use(data, number)
    limit = address_space_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    began_s = time.monotonic()
    for number, data in enumerate(islice(source, options.count)):
        try:
            found[use(data, number)] += 1
        except BaseException:
            print(f"mutant {number} of seed {options.seed}, policy {number % len(POLICIES)}: {data.hex()}", flush=True)
            raise
    seconds = time.monotonic() - began_s
    accepted = sum(count for name, count in found.items() if name.startswith("accepted"))
    print(
        f"{options.count} mutants, seed {options.seed}: {accepted} accepted, {len(found)} outcomes, "
        f"{options.count / seconds:.0f} a second"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
