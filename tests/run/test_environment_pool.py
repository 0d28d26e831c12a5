"""Nothing that the code of an environment does ends a run, and the other episodes do not notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surogate_core.bundles import EnvironmentProblem, Fault, Stopped, Turn
from surogate_core.config.schema import Selection
from surogate_core.errors import UserError
from surogate_core.plugins import Registry, import_policy, load_plugins
from surogate_reinforcement import limits
from surogate_reinforcement.frames import LARGEST
from surogate_reinforcement.guardian import descendants, marked
from surogate_reinforcement.pool import EnvironmentPool

SOURCE = """
import os, struct, sys, threading, time
from dataclasses import dataclass
from surogate_core import bundles, hookimpl
from surogate_core.errors import UserError

@dataclass(frozen=True)
class Options:
    size: int = 8
    words: tuple[str, ...] = ()
    broken: str = ""

class Odd(Exception):
    def __str__(self):
        raise ValueError

class Episode:
    def __init__(self, problem):
        self.problem, self.said = problem, []

    def reply(self, text):
        self.said.append(text)
        do = text.partition(" ")[0]
        if do in ACTS:
            return ACTS[do](self)
        return bundles.Turn(messages=({"role": "user", "content": text.upper()},), done=False)

    def rewards(self):
        given = self.problem.data.get("rewards", "length")
        return {"length": len(" ".join(self.said))} if given == "length" else REWARDS[given]

def fork_bomb(self):
    while True:
        try:
            os.fork()
        except OSError:
            pass

def leave_children(self):
    for _ in range(3):
        if not os.fork():
            os.setsid()
            while True:
                time.sleep(1)
    while True:
        pass

def memory(self):
    blocks = []
    while True:
        blocks.append(bytearray(1 << 26))

def wait_for_network(self):
    import socket
    one, other = socket.socketpair()
    one.recv(1)

def recursion(self):
    return recursion(self)

def stop_threads(self):
    threads = []
    while True:
        threads.append(threading.Thread(target=time.sleep, args=(60,)))
        threads[-1].start()

def big_file(self):
    with open(os.environ["TMPDIR"] + "/large", "wb") as file:
        while True:
            file.write(bytes(1 << 24))

def raised(error):
    def act(self):
        raise error
    return act

def forked(self):
    os.fork()
    return bundles.Turn(done=True)

def noisy(self):
    print("noise" * 1000)
    sys.stderr.write("noise" * 1000000)
    os.write(1, b"noise")
    return bundles.Turn(done=True)

def wrote(body, length=None):
    def act(self):
        data = body.encode()
        os.write(int(sys.argv[2]), struct.pack("=Q", len(data) if length is None else length) + data)
        return bundles.Turn(done=True)
    return act

def last_words(self):
    sys.stderr.write("the reason\\n\\n")
    sys.stderr.flush()
    os._exit(4)

ACTS = {
    "fork": fork_bomb,
    "children": leave_children,
    "memory": memory,
    "network": wait_for_network,
    "recursion": recursion,
    "threads": stop_threads,
    "file": big_file,
    "exit": lambda self: sys.exit(3),
    "die": lambda self: os._exit(3),
    "kill": lambda self: os.kill(os.getpid(), 9),
    "raise": raised(ValueError("two\\nlines")),
    "silent": raised(AssertionError()),
    "odd": raised(Odd()),
    "interrupt": raised(KeyboardInterrupt()),
    "none": lambda self: None,
    "text": lambda self: bundles.Turn(messages=("hello",), done=False),
    "nothing": lambda self: bundles.Turn(done=False),
    "object": lambda self: bundles.Turn(messages=({"role": "user", "content": object()},), done=False),
    "large": lambda self: bundles.Turn(messages=({"role": "user", "content": "x" * (1 << 25)},), done=False),
    "forked": forked,
    "noisy": noisy,
    "words": last_words,
    "stale": wrote('{"ok": {"messages": [], "done": true}, "number": 1}'),
    "other": wrote('["ok"]'),
    "nested": wrote("[" * 100000 + "]" * 100000),
    "length": wrote("{}", 1 << 60),
    "bytes": wrote("no JSON"),
    "done": lambda self: bundles.Turn(done=True),
}
REWARDS = {
    "nan": {"a": float("nan")},
    "infinite": {"a": -float("inf")},
    "text": {"a": "1"},
    "list": [1.0],
    "name": {1: 1.0},
    "none": {"a": None, "b": True},
    "complex": {"a": 1j},
    "large": {"a": 1e308},
    "huge": {"a": 1.0, "b": 10**400},
    "long": {"x" * 201: 1.0},
    "many": {str(i): 1.0 for i in range(257)},
    "line": {"a\\nb": 1.0},
}

class Hostile:
    def __init__(self, options):
        if options.broken == "refused":
            raise UserError("environment.broken is refused. Fix: leave it out")
        if options.broken == "raised":
            raise RuntimeError("no luck")
        if options.broken == "died":
            os._exit(9)
        if options.broken == "hangs":
            time.sleep(600)
        self.size, self.held_out, self.options = options.size, 2, options

    def problem(self, number, seed):
        if number == 5:
            raise KeyError("five")
        if number == 6:
            return "problem"
        if number == 7:
            return bundles.EnvironmentProblem(messages=())
        data = {"number": number, "seed": seed, "words": self.options.words, "pid": os.getpid()}
        return bundles.EnvironmentProblem(messages=({"role": "user", "content": "go"},), data=data)

    def start(self, problem):
        if problem.data.get("never"):
            raise ValueError("never starts")
        return Episode(problem)

class Compared(Hostile):
    def group_rewards(self, episodes):
        if any("wrong" in episode.said for episode in episodes):
            return []
        lengths = [len(" ".join(episode.said)) for episode in episodes]
        return [{"best": float(length == max(lengths))} for length in lengths]

@hookimpl
def surogate_environment():
    return [
        bundles.EnvironmentSpec(name="hostile", build=Hostile, options=Options),
        bundles.EnvironmentSpec(name="compared", build=Compared, options=Options),
    ]
"""


def place(code: str) -> str:
    """How a fault names the line of the source with `code`."""
    return f" (plugin_hostile line {SOURCE[: SOURCE.index(code)].count(chr(10)) + 1})"


FIX = ". Fix: its options, or the code of plugin hostile"
TASK = EnvironmentProblem(messages=({"role": "user", "content": "go"},))
Opener = Callable[..., EnvironmentPool]


@pytest.fixture
def opened(install_plugin: Any) -> Iterator[Opener]:
    install_plugin("hostile", SOURCE)
    registry: Registry = load_plugins(import_policy())
    pools: list[EnvironmentPool] = []

    def one(name: str = "hostile", *, options: dict[str, Any] | None = None, **settings: Any) -> EnvironmentPool:
        cls = registry.get("environment", name).options
        selection = Selection(name=name, options=cls(**(options or {})))
        pools.append(EnvironmentPool(selection, registry, **{"timeout": 60.0, **settings}))
        return pools[-1]

    yield one
    for pool in pools:
        pool.close()


def leftovers(pool: EnvironmentPool) -> list[int]:
    guardians = [worker._guardian.pid for worker in pool._workers if worker._guardian is not None]
    return [pid for worker in pool._workers for pid in marked(worker._token) if pid not in guardians]


def end_worker(pool: EnvironmentPool, place: int) -> None:
    """Kill the process of a worker, and wait until that is known."""
    guardian = pool._workers[place]._guardian
    assert guardian is not None
    while not (below := descendants(guardian.pid)):
        time.sleep(0.01)
    os.kill(below[0], signal.SIGKILL)
    guardian.ended(10)


def test_tasks_and_facts(opened: Opener) -> None:
    pool = opened(options={"words": ("a", "b")}, workers=2)
    assert (pool.size, pool.held_out) == (8, 2)
    found = pool.problems([4, 0, 5, 6, 7], 11)
    problems = [problem for problem in found if isinstance(problem, EnvironmentProblem)]
    assert [(problem.data["number"], problem.data["seed"], problem.data["words"]) for problem in problems] == [
        (4, 11, ["a", "b"]),
        (0, 11, ["a", "b"]),
    ]
    assert problems[0].data["pid"] != problems[1].data["pid"]
    assert os.getpid() not in {problem.data["pid"] for problem in problems}
    assert found[2:] == [
        Fault(reason="exception", detail="KeyError: 'five'" + place('KeyError("five")')),
        Fault(reason="invalid", detail="problem returned str, not an EnvironmentProblem"),
        Fault(reason="invalid", detail="the problem has no message"),
    ]


def test_answers_come_in_the_order_of_the_questions(opened: Opener) -> None:
    pool = opened(workers=3)
    keys = [("prompt", place) for place in range(10)]
    pool.start([(key, TASK) for key in keys])
    turns = pool.reply([(key, f"word {key[1]}") for key in reversed(keys)])
    said = [turn.messages[0]["content"] for turn in turns if isinstance(turn, Turn)]
    assert said == [f"WORD {place}" for place in range(9, -1, -1)]
    pool.reply([(keys[3], "more")])
    assert pool.rewards(keys[2:5]) == [{"length": 6.0}, {"length": 11.0}, {"length": 6.0}]
    pool.forget([keys[0]])
    pool.start([(keys[0], TASK), (keys[3], TASK)])
    assert pool.rewards([keys[0], keys[3], keys[1]]) == [{"length": 0.0}, {"length": 0.0}, {"length": 6.0}]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_ends_a_turn_after_the_present_requests(opened: Opener, workers: int) -> None:
    stop: list[bool] = []
    pool = opened(workers=workers, stopped=lambda: bool(stop))
    pool.start([(key, TASK) for key in range(6)])
    assert all(isinstance(turn, Turn) for turn in pool.reply([(key, "a") for key in range(6)]))
    asked = pool._ask

    def ask(*arguments: Any, **others: Any) -> Any:
        stop.append(True)
        return asked(*arguments, **others)

    pool._ask = ask  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        pool.reply([(key, "b") for key in range(6)])
    replied = [len(episode.replies) for episode in pool._episodes.values()]
    assert replied.count(2) == len(stop) <= workers
    with pytest.raises(Stopped):
        pool.problems([0], 1)


FAULTS = [
    ("exit", "exception", "SystemExit: 3"),
    ("raise", "exception", "ValueError: two lines" + place("raise error")),
    ("silent", "exception", "AssertionError"),
    ("odd", "exception", "Odd"),
    ("interrupt", "exception", "KeyboardInterrupt"),
    ("recursion", "exception", "RecursionError: maximum"),
    ("none", "invalid", "reply returned NoneType, not a Turn"),
    ("text", "invalid", "a message is no mapping with `role` and `content`"),
    ("nothing", "invalid", "the episode goes on, but the turn has no message"),
    ("object", "invalid", "the turn has values that JSON has not: Object of type object"),
    ("large", "size", "messages of 33554432 characters"),
    ("die", "exit", "the worker process ended, exit code 3"),
    ("kill", "exit", "the worker process ended, SIGKILL"),
    ("words", "exit", "the worker process ended, exit code 4: the reason"),
]


def test_what_an_environment_does_wrong_is_a_fault_of_the_episode(opened: Opener) -> None:
    pool = opened()
    for act, reason, line in FAULTS:
        pool.start([("bad", TASK), ("good", TASK)])
        pool.reply([("good", "first")])
        turn, other = pool.reply([("bad", act), ("good", "second")])
        assert isinstance(turn, Fault)
        assert (turn.reason, turn.detail[: len(line)]) == (reason, line)
        assert not turn.detail.endswith(":")
        assert other == Turn(messages=({"role": "user", "content": "SECOND"},), done=False)
        again, _ = pool.reply([("bad", "done"), ("good", "third")])
        assert again == turn, "an episode that has failed stays so"
        assert pool.rewards(["bad", "good"]) == [turn, {"length": 18.0}]


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_fault_is_told_once_and_before_the_others(opened: Opener, workers: int) -> None:
    told: list[tuple[Fault, int]] = []
    pool = opened(timeout=1.0, workers=workers, first_fault=lambda fault: told.append((fault, len(answered))))
    answered: list[Any] = []
    request = pool._request

    def noted(worker: int, do: str, **arguments: Any) -> Any:
        answered.append(request(worker, do, **arguments))
        return answered[-1]

    pool._request = noted  # type: ignore[method-assign]
    pool.start([(key, TASK) for key in range(2 * workers)])
    assert all(isinstance(turn, Fault) for turn in pool.reply([(key, "network") for key in range(2 * workers)]))
    ((fault, before),) = told
    assert fault == Fault(reason="timeout", detail="reply took more than 1 s")
    assert before < len(answered)


def test_what_takes_too_long_is_killed_with_all_its_processes(opened: Opener) -> None:
    pool = opened(timeout=1.5)
    for act in ("network", "children"):
        pool.start([("bad", TASK), ("good", TASK)])
        pool.reply([("good", "first")])
        turn, other = pool.reply([("bad", act), ("good", "second")])
        assert turn == Fault(reason="timeout", detail="reply took more than 1.5 s")
        assert isinstance(other, Turn)
        assert pool.rewards(["good"]) == [{"length": 12.0}]
        assert len(leftovers(pool)) == 1, "the worker that took the place of the killed one"
        pool.forget(["bad"])


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the machine has no /proc")
def test_a_fork_bomb_stays_within_its_limit(opened: Opener) -> None:
    pool = opened(timeout=1.5, processes=8)
    pool.start([("bad", TASK)])
    counts: list[int] = []
    worker = pool._workers[0]
    answered = pool._threads.submit(pool.reply, [("bad", "fork")])
    while not answered.done():
        counts.append(len(marked(worker._token)))
        time.sleep(0.05)
    (turn,) = answered.result()
    assert isinstance(turn, Fault)
    assert turn.reason == "timeout"
    assert max(counts) <= 24, "8, and those that ended elsewhere on the machine while it forked"
    assert not leftovers(pool)
    pool.start([("next", TASK)])
    assert pool.reply([("next", "done")]) == [Turn(done=True)]


def test_the_limit_on_processes_leaves_room_for_what_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an environment is built, the same user's run starts the processes that compile kernels."""
    found: dict[str, int | None] = {}
    monkeypatch.setattr(limits, "_set", found.__setitem__)
    monkeypatch.setattr(limits, "_took_own_user", lambda: False)
    monkeypatch.setattr(limits, "_tasks_of", lambda user: 10)
    monkeypatch.setattr(limits, "_can_fork", lambda: True)
    limits.ProcessLimits(memory=1, processes=64, file_size=1)
    assert found["RLIMIT_NPROC"] == 64 + 10 + limits._OF_THE_RUN


@pytest.mark.slow
def test_what_an_environment_writes_to_the_pipe_is_no_answer(opened: Opener) -> None:
    pool = opened()
    for act in ("stale", "other", "nested", "length", "bytes"):
        pool.start([("bad", TASK), ("good", TASK)])
        turn, other = pool.reply([("bad", act), ("good", "second")])
        assert isinstance(turn, Fault)
        assert (turn.reason, "no answer" in turn.detail) == ("exit", True), (act, turn)
        assert other == Turn(messages=({"role": "user", "content": "SECOND"},), done=False), act
        pool.forget(["bad", "good"])


def test_an_environment_may_print_more_than_a_file_may_have(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each print failed from the limit on, in all later episodes."""
    monkeypatch.setattr("surogate_reinforcement.pool.FILE_SIZE", 1 << 20)
    pool = opened()
    pool.start([(1, TASK)])
    turns = [turn for _ in range(3) for turn in pool.reply([(1, "noisy")])]  # 5 MB each
    assert turns == [Turn(done=True)] * 3
    assert pool._workers[0].life() == 1


def test_a_build_that_hangs_ends_at_its_limit(opened: Opener) -> None:
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"the build took more than 0\.5 s\. Fix: a larger --build-timeout, or"):
        opened(options={"broken": "hangs"}, build_timeout=0.5)
    assert time.monotonic() - begin < 20


def test_memory_threads_and_files_have_limits(opened: Opener) -> None:
    pool = opened(memory=1 << 29, processes=8)
    for act, reasons in (("memory", {"memory"}), ("threads", {"exception"}), ("file", {"exception", "exit"})):
        pool.start([("bad", TASK), ("good", TASK)])
        turn, other = pool.reply([("bad", act), ("good", "done")])
        assert isinstance(turn, Fault)
        assert turn.reason in reasons, turn
        assert other == Turn(done=True)
        pool.forget(["bad", "good"])


def test_rewards_that_are_none(opened: Opener) -> None:
    pool = opened()
    for given, line in (
        ("nan", "reward 'a' is nan"),
        ("infinite", "reward 'a' is -inf"),
        ("text", "reward 'a' is str, not a number or None"),
        ("complex", "reward 'a' is complex, not a number or None"),
        ("list", "the rewards are list, not a mapping"),
        ("name", "reward 1 is float, not a number or None"),
        ("large", "reward 'a' is 1e+308, which overflows in sums; at most 1e+18"),
        ("huge", "reward 'b' is inf"),
        ("long", f"the name of a reward has 201 characters, not 1 to 200: {'x' * 40!r}"),
        ("many", "there are 257 rewards, more than 256"),
        ("line", "the name of a reward has characters that are not printable: 'a\\nb'"),
    ):
        pool.start([(1, EnvironmentProblem(messages=TASK.messages, data={"rewards": given}))])
        assert pool.reply([(1, "done")]) == [Turn(done=True)]
        assert pool.rewards([1]) == [Fault(reason="invalid", detail=line)]


def test_what_is_odd_but_allowed(opened: Opener) -> None:
    pool = opened()
    pool.start([(1, EnvironmentProblem(messages=TASK.messages, data={"rewards": "none"}))])
    pool.start([(2, EnvironmentProblem(messages=TASK.messages, data={"never": True})), (3, TASK), (4, TASK)])
    never = Fault(reason="exception", detail="ValueError: never starts" + place('ValueError("never'))
    assert pool.reply([(1, "noisy"), (2, "x"), (3, "forked"), (4, "\ud800")]) == [
        Turn(done=True),
        never,
        Turn(done=True),
        Fault(reason="invalid", detail="a message has half of a surrogate pair, which is not text"),
    ]
    pool.start([(5, TASK)])
    (large,) = pool.reply([(5, "x" * LARGEST)])
    assert isinstance(large, Fault)
    assert large.reason == "size"
    assert pool.rewards([1, 2, 3]) == [{"a": None, "b": 1.0}, never, {"length": 6.0}]


def test_attempts_at_one_task_are_compared(opened: Opener) -> None:
    pool = opened("compared", workers=2)
    keys = [(group, place) for group in "ab" for place in range(3)]
    pool.start([(key, TASK) for key in keys], groups=[group for group, _ in keys])
    replies = ["hello", "hi", "die", "wrong", "x", "y"]
    pool.reply([(key, text) for key, text in zip(keys, replies, strict=True)])
    found = pool.rewards(keys)
    assert found[:2] == [{"length": 5.0, "best": 1.0}, {"length": 2.0, "best": 0.0}]
    assert isinstance(found[2], Fault)
    wrong = Fault(reason="invalid", detail="group_rewards returned no list of 3 rewards")
    assert found[3:] == [wrong] * 3


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("refused", "environment=hostile: environment.broken is refused. Fix: leave it out"),
        (
            "raised",
            "environment=hostile: it cannot be built: exception: RuntimeError: no luck" + place("RuntimeError(") + FIX,
        ),
        ("died", "environment=hostile: it cannot be built: exit: the worker process ended, exit code 9" + FIX),
    ],
)
def test_an_environment_that_cannot_be_built_ends_with_one_line(broken: str, message: str, opened: Opener) -> None:
    with pytest.raises(UserError) as raised:
        opened(options={"broken": broken})
    assert str(raised.value) == message


def test_who_needs_the_environment_waits_for_it(opened: Opener) -> None:
    pool = opened(waits=False)
    assert not pool._built.done()
    assert pool.size == 8
    broken = opened(options={"broken": "raised"}, waits=False)
    for _ in range(2):
        with pytest.raises(UserError, match="it cannot be built"):
            broken.problems([0], 0)


def test_a_pool_may_be_closed_while_its_environment_is_built(opened: Opener) -> None:
    pool = opened(options={"broken": "hangs"}, waits=False)
    begin = time.monotonic()
    pool.close()
    assert pool._built.done()
    assert not leftovers(pool)
    assert time.monotonic() - begin < 20


def test_all_workers_start_with_the_pool_and_are_waited_for_when_asked(opened: Opener) -> None:
    pool = opened(workers=3)
    guardians = [worker._guardian for worker in pool._workers]
    assert None not in guardians
    assert [worker._is_building for worker in pool._workers] == [False, True, True]
    found = [problem.data["pid"] for problem in pool.problems([0, 1, 2], 0) if isinstance(problem, EnvironmentProblem)]
    assert [[pid] for pid in found] == [descendants(one.pid) for one in guardians if one is not None]
    assert not any(worker._is_building for worker in pool._workers)


def test_a_worker_that_ended_while_it_started_is_a_fault_and_starts_again(opened: Opener) -> None:
    pool = opened(workers=2)
    end_worker(pool, 1)
    first, second = pool.problems([0, 1], 0)
    assert isinstance(first, EnvironmentProblem)
    assert isinstance(second, EnvironmentProblem) or second.reason == "exit"
    assert all(isinstance(problem, EnvironmentProblem) for problem in pool.problems([0, 1], 0))


def test_nothing_is_left_when_the_pool_is_closed(opened: Opener) -> None:
    pool = opened(workers=2)
    pool.start([(place, TASK) for place in range(4)])
    pool.reply([(place, "word") for place in range(4)])
    assert len(leftovers(pool)) == 2
    pool.close()
    assert not leftovers(pool)
    pool.close()


def test_a_worker_that_ended_between_two_requests_is_started_again(opened: Opener) -> None:
    pool = opened()
    pool.start([(1, TASK)])
    pool.reply([(1, "one")])
    end_worker(pool, 0)
    assert pool.reply([(1, "two")]) == [Turn(messages=({"role": "user", "content": "TWO"},), done=False)]
    assert pool.rewards([1]) == [{"length": 7.0}]
