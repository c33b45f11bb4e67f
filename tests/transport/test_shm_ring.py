"""What of a ring of shared memory is lent, and how much of it is used before it begins anew."""

from hypothesis import given
from hypothesis import strategies as st

from hurray_wire.transport._shm_ring import Ranges, Reach

PAGE = 4096


@given(st.lists(st.tuples(st.sampled_from(["take", "piece", "give"]), st.integers(1, 40 * PAGE)), max_size=60))
def test_ranges_never_overlap_and_all_come_back(steps):
    total, limit = 64 * PAGE, 50 * PAGE
    ranges, lent = Ranges(total, limit), {}
    for kind, number in steps:
        if kind == "give":
            if lent:
                offset = sorted(lent)[number % len(lent)]
                ranges.give_back(offset)
                del lent[offset]
            continue
        if kind == "take":
            offset, nbytes = ranges.take(number), number
        else:
            offset, nbytes = ranges.take_piece(number) or (None, 0)
            assert (offset is None) == (sum(-(-size // PAGE) for size in lent.values()) * PAGE == limit)
        if offset is None:
            continue
        assert offset % PAGE == 0
        assert 0 < nbytes <= number
        assert offset + nbytes <= total
        for other, size in lent.items():
            assert offset + nbytes <= other or other + -(-size // PAGE) * PAGE <= offset
        lent[offset] = nbytes
        assert sum(-(-size // PAGE) for size in lent.values()) * PAGE <= limit
    for offset in lent:
        ranges.give_back(offset)
    assert ranges.take(limit + 1) is None
    assert ranges.take(limit) is not None


def test_what_came_back_is_lent_again_after_all_the_rest():
    ranges = Ranges(10 * PAGE, 4 * PAGE)
    offsets = []
    for _ in range(9):
        offsets.append(ranges.take(3 * PAGE))
        ranges.give_back(offsets[-1])
    assert offsets == [0, 3 * PAGE, 6 * PAGE] * 3
    first = ranges.take(2 * PAGE)
    ranges.give_back(first)
    assert (first, ranges.take_piece(4 * PAGE)) == (0, (2 * PAGE, 4 * PAGE))


SHORT, RING = 9 << 20, 36 << 20


def used_short(reach, costs, total_bytes, message_bytes=4 << 20):
    """How much of `total_bytes` was staged within the short reach. `costs`: of a byte staged within each; the first
    time around the short one costs what the long one does."""
    short_bytes = around_bytes = 0
    for _ in range(total_bytes // message_bytes):
        short = reach.nbytes == SHORT
        around_bytes = around_bytes + message_bytes if short else 0
        short_bytes += message_bytes if short else 0
        reach.note(message_bytes, message_bytes * costs[short and around_bytes > SHORT])
    return short_bytes / (total_bytes // message_bytes * message_bytes)


def test_the_reach_is_the_cheaper_one_and_follows_a_change():
    shared, apart = {True: 0.10, False: 0.13}, {True: 0.30, False: 0.12}
    reach = Reach(SHORT, RING)
    assert reach.nbytes == SHORT
    assert used_short(reach, shared, 4 << 30) > 0.95
    used_short(reach, apart, 1 << 30)
    assert used_short(reach, apart, 4 << 30) < 0.05
    used_short(reach, shared, 1 << 30)
    assert used_short(reach, shared, 4 << 30) > 0.95


def test_short_messages_and_equal_costs_change_no_reach():
    reach = Reach(SHORT, RING)
    assert used_short(reach, {True: 0.3, False: 0.1}, 64 << 20, message_bytes=100_000) == 1
    assert used_short(reach, {True: 0.1, False: 0.1}, 4 << 30) > 0.95


def test_nothing_is_lent_beyond_the_reach():
    ranges = Ranges(40 * PAGE, 8 * PAGE)
    beyond = [ranges.take(6 * PAGE)]
    ranges.give_back(beyond.pop())
    beyond.append(ranges.take(6 * PAGE))
    ranges.reach_bytes = 9 * PAGE
    assert [ranges.take(PAGE), ranges.take_piece(PAGE)] == [0, (PAGE, PAGE)]
    assert ranges.take(PAGE) is None, "no more than 8 pages are lent"
    ranges.give_back(beyond.pop())
    assert ranges.take(6 * PAGE) == 2 * PAGE
