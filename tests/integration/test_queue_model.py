"""Is the life of events in a queue what a simple model in memory says, whatever workers do and in whichever order?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import headwater
from effort import effort
from headwater import Dead, Lease, NewEvent, Retry, Snooze
from headwater.queue.model import Outcome

_numbers = itertools.count()
MAX_ATTEMPTS = 2
NOW = timedelta(0)
LATER = timedelta(hours=1)

OUTCOMES: dict[str, Outcome] = {
    "done": None,
    "retry now": Retry(NOW),
    "retry later": Retry(LATER),
    "dead": Dead("no"),
    "snooze now": Snooze(NOW),
    "snooze later": Snooze(LATER),
}


@dataclass
class Life:
    """One event as the model knows it."""

    position: int
    topic: str
    key: str | None
    state: str = "new"  # new, waiting, leased, done, dead
    attempts: int = 0
    due: bool = False
    isolated: bool = False
    # Whether it was claimed before: second tries come from another place than first ones.
    again: bool = False


@dataclass
class Claim:
    """One lease as the model knows it; `events` are those that are not settled."""

    lease: Lease
    worker: str
    again: bool
    events: list[Life] = field(default_factory=list)
    lapsed: bool = False


class Queue(RuleBasedStateMachine):
    """A queue of the real log beside its model."""

    log: ClassVar[headwater.Headwater]
    connection: ClassVar[psycopg.Connection[Any]]
    ordered_keys: ClassVar[bool]

    @initialize()
    def begin(self) -> None:
        number = next(_numbers)
        self.queue = f"model-{number}"
        self.topics = [self.log.create_topic(f"model-{number}-{name}").name for name in "ab"]
        self.log.create_queue(
            self.queue,
            self.topics[0],
            from_end=True,
            ordered_keys=self.ordered_keys,
            max_attempts=MAX_ATTEMPTS,
            backoff_seconds=3600,
        )
        self.start = self.log.queue(self.queue).start_position
        self.lives: dict[int, Life] = {}
        self.bindings = [[self.topics[0], 0, None]]
        self.second_binding: int | None = None
        self.claims: dict[int, Claim] = {}
        self.lost: list[Lease] = []
        self.paused = False

    # --- what the model knows ----------------------------------------------------------------------------------

    def bound(self, life: Life) -> bool:
        return any(
            topic == life.topic and low < life.position and (high is None or life.position <= high)
            for topic, low, high in self.bindings
        )

    def new(self) -> list[Life]:
        return [
            life
            for life in self.lives.values()
            if life.state == "new" and life.position > self.start and self.bound(life)
        ]

    def busy_keys(self) -> set[str | None]:
        """Keys that are leased or of which an event waits."""
        return {life.key for life in self.lives.values() if life.state in ("leased", "waiting")} - {None}

    def is_next(self, life: Life) -> bool:
        """Whether nothing of its key is leased or waits before it."""
        return (
            not self.ordered_keys
            or life.key is None
            or not any(
                other.key == life.key
                and (other.state == "leased" or (other.state == "waiting" and other.position < life.position))
                for other in self.lives.values()
            )
        )

    def claimable(self, batch_size: int) -> tuple[list[Life], int]:
        """What a claim may take its events from, and how many it takes."""
        if self.paused:
            return [], 0
        due = [life for life in self.lives.values() if life.state == "waiting" and life.due and self.is_next(life)]
        if isolated := [life for life in due if life.isolated]:
            return isolated, 1
        if due:
            return due, min(batch_size, len(due))
        new = self.new()
        if self.ordered_keys:
            busy = self.busy_keys()
            free = [life for life in new if life.key not in busy]
            cut = free[batch_size - 1].position if len(free) > batch_size else None
            for life in new:
                if life.key in busy and (cut is None or life.position <= cut):
                    life.state, life.due, life.again = "waiting", True, True
            new = free
        return new[:batch_size], min(batch_size, len(new))

    def wait(self, life: Life, *, attempts: int, due: bool, isolated: bool) -> None:
        life.state, life.attempts, life.due, life.isolated, life.again = "waiting", attempts, due, isolated, True

    # --- what happens ------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), keys=st.lists(st.sampled_from(["x", "y", None]), min_size=1, max_size=5))
    def publish(self, which: int, keys: list[str | None]) -> None:
        positions = self.log.publish_batch(self.topics[which], [NewEvent(None, key=key) for key in keys])
        for position, key in zip(positions, keys, strict=True):
            assert position is not None
            self.lives[position] = Life(position, self.topics[which], key)

    @rule(worker=st.sampled_from(["v", "w"]), batch_size=st.integers(1, 5))
    def claim(self, worker: str, batch_size: int) -> None:
        choice, count = self.claimable(batch_size)
        allowed = {life.position: life for life in choice}
        lease = self.log.claim(self.queue, worker=worker, batch_size=batch_size)
        if lease is None:
            assert count == 0
            return
        taken = [event.position for event in lease.events]
        assert set(taken) <= set(allowed)
        again = allowed[taken[0]].again
        assert len(taken) == len(set(taken))
        # Of new events it may take those first that were known to be settled.
        assert len(taken) == count or (not again and 0 < len(taken) < count)
        assert lease.isolated == allowed[taken[0]].isolated
        claim = Claim(lease, worker, again)
        for event in lease.events:
            life = allowed[event.position]
            if self.ordered_keys and life.key is not None:
                for other in self.lives.values():
                    if other.key == life.key and other.position < life.position and other.position not in taken:
                        assert other.state in ("done", "dead") or not self.bound(other) or other.position <= self.start
            life.state, life.attempts = "leased", life.attempts + 1
            assert event.attempt == life.attempts
            claim.events.append(life)
        self.claims[lease.token] = claim

    def pick(self, which: int) -> Claim:
        return list(self.claims.values())[which % len(self.claims)]

    @precondition(lambda self: self.claims)
    @rule(
        which=st.integers(0, 9),
        names=st.lists(st.sampled_from(["", *OUTCOMES]), min_size=5, max_size=5),
        rest_done=st.booleans(),
    )
    def settle(self, which: int, names: list[str], rest_done: bool) -> None:
        claim = self.pick(which)
        outcomes: dict[int, Outcome] = {}
        failed: set[str | None] = set()
        for life, name in zip(claim.events, names, strict=False):
            # A worker does not go on with a key behind an event of it that failed.
            if name and not (self.ordered_keys and life.key in failed):
                outcomes[life.position] = OUTCOMES[name]
                if life.key is not None and isinstance(OUTCOMES[name], Retry | Snooze):
                    failed.add(life.key)
        self.log.settle(claim.lease, outcomes, rest_done=rest_done)
        left, behind = [], set[str]()
        for life in claim.events:
            outcome = outcomes.get(life.position)
            if life.position not in outcomes:
                if self.ordered_keys and not claim.again and life.key in behind:
                    outcome = Snooze(NOW)
                elif not rest_done:
                    left.append(life)
                    continue
            match outcome:
                case None:
                    life.state, life.attempts = "done", 1
                case Dead():
                    life.state = "dead"
                case Retry() if life.attempts >= MAX_ATTEMPTS:
                    life.state = "dead"
                case Retry():
                    self.wait(life, attempts=life.attempts, due=outcome.after == NOW, isolated=False)
                case Snooze():
                    isolated = claim.again and life.isolated
                    self.wait(life, attempts=life.attempts - 1, due=outcome.after == NOW, isolated=isolated)
            if life.key is not None and isinstance(outcome, Retry | Snooze):
                behind.add(life.key)
        claim.events = left
        if not left:
            self.give_up(claim)

    def give_up(self, claim: Claim) -> None:
        del self.claims[claim.lease.token]
        self.lost.append(claim.lease)

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        claim = self.pick(which)
        self.log.release(claim.lease)
        for life in claim.events:
            self.wait(life, attempts=life.attempts - 1, due=True, isolated=claim.again and life.isolated)
        self.give_up(claim)

    @precondition(lambda self: self.lost)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["ack", "ack one", "nack", "release", "extend"]))
    def come_late(self, which: int, how: str) -> None:
        lease = self.lost[which % len(self.lost)]
        with pytest.raises(headwater.LeaseLost):
            match how:
                case "ack":
                    self.log.ack(lease)
                case "ack one":
                    self.log.ack(lease, lease.events[0])
                case "nack":
                    self.log.nack(lease, *lease.events, error="late")
                case "release":
                    self.log.release(lease)
                case "extend":
                    self.log.extend(lease)

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 9))
    def crash(self, which: int) -> None:
        """The worker is gone and its time is up; somebody may or may not notice."""
        claim = self.pick(which)
        claim.lapsed = True
        for statement in (
            "update headwater_internal.ledger set expires_at = clock_timestamp() - interval '1 second' where token "
            "= %s",
            "update headwater_internal.redelivery set visible_at = clock_timestamp() - interval '1 second' where "
            "token = %s",
        ):
            self.connection.execute(statement, (claim.lease.token,))

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 9))
    def extend(self, which: int) -> None:
        claim = self.pick(which)
        self.log.extend(claim.lease, lease_seconds=1000)
        claim.lapsed = False

    @rule()
    def reap(self) -> None:
        given_back = 0
        for claim in [claim for claim in self.claims.values() if claim.lapsed]:
            own = len(claim.events) == 1
            for life in claim.events:
                if own and life.attempts >= MAX_ATTEMPTS:
                    life.state, life.isolated = "dead", not claim.again or life.isolated
                else:
                    self.wait(life, attempts=life.attempts - (not own), due=True, isolated=True)
                    given_back += 1
            self.give_up(claim)
        assert self.log.reap(self.queue) == given_back

    @rule()
    def let_time_pass(self) -> None:
        self.connection.execute(
            "update headwater_internal.redelivery r set visible_at = clock_timestamp() "
            "from headwater_internal.queue g where g.id = r.queue_id and g.name = %s and r.token is null "
            "and r.visible_at <> 'infinity'",
            (self.queue,),
        )
        for life in self.lives.values():
            if life.state == "waiting":
                life.due = True

    @rule(chosen=st.sets(st.integers(0, 9)), act=st.sampled_from(["redrive", "discard", "redrive all"]))
    def see_to_the_dead(self, chosen: set[int], act: str) -> None:
        dead = [life for life in self.lives.values() if life.state == "dead"]
        if act != "redrive all":
            dead = [life for n, life in enumerate(dead) if n in chosen]
        positions = None if act == "redrive all" else [life.position for life in dead]
        if act == "discard":
            assert self.log.discard(self.queue, positions=positions) == len(dead)
        else:
            assert self.log.redrive(self.queue, positions=positions) == len(dead)
        for life in dead:
            if act == "discard":
                life.state, life.attempts = "done", 1
            else:
                self.wait(life, attempts=0, due=True, isolated=life.isolated)

    @rule(what=st.sampled_from(["pause or resume", "bind or unbind", "rewind"]), which=st.integers(0, 99))
    def interfere(self, what: str, which: int) -> None:
        match what:
            case "pause or resume":
                self.pause_or_resume()
            case "bind or unbind":
                self.bind_or_unbind()
            case "rewind" if self.lives:
                self.rewind(which)

    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        (self.log.pause_queue if self.paused else self.log.resume_queue)(self.queue)

    def bind_or_unbind(self) -> None:
        if self.second_binding is None:
            binding = self.log.bind(self.queue, topic=self.topics[1])
            self.second_binding = binding.id
            self.bindings.append([binding.topic, binding.from_position, None])
        else:
            self.bindings[-1][2] = self.log.unbind(self.queue, self.second_binding)
            self.second_binding = None

    def rewind(self, which: int) -> None:
        self.start = list(self.lives)[which % len(self.lives)]
        self.log.rewind_queue(self.queue, position=self.start)
        for binding in self.bindings:
            if binding[2] is None:
                binding[1] = min(binding[1], self.start)
        for life in self.lives.values():
            if life.position > self.start:
                life.state, life.attempts, life.isolated, life.again = "new", 0, False, False
            elif life.state == "leased":
                self.wait(life, attempts=life.attempts - 1, due=True, isolated=life.again and life.isolated)
            elif life.state == "new":
                # Passed over.
                life.state = "done"
        self.lost.extend(claim.lease for claim in self.claims.values())
        self.claims.clear()

    # --- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def every_event_is_in_the_state_of_the_model(self) -> None:
        if not hasattr(self, "lives"):
            return
        lapsed = {life.position for claim in self.claims.values() if claim.lapsed for life in claim.events}
        workers = {life.position: claim.worker for claim in self.claims.values() for life in claim.events}
        expected = {}
        counts = {"ready": 0, "processing": 0, "done": 0, "dead": 0}
        for life in self.lives.values():
            in_pass = life.position > self.start and self.bound(life)
            if not in_pass and life.state not in ("waiting", "leased", "dead"):
                continue
            status = {"new": "ready", "waiting": "ready", "leased": "processing"}.get(life.state, life.state)
            if life.position in lapsed:
                status = "ready"
            counts[status] += 1
            worker = workers.get(life.position) if status == "processing" else None
            expected[life.position] = (status, life.attempts, worker)
        found = {
            d.position: (d.status, d.attempts, d.worker if d.status == "processing" else None)
            for d in self.log.deliveries(self.queue, batch_size=1000)
        }
        assert found == expected
        (overview,) = (one for one in self.log.queues() if one.name == self.queue)
        assert counts == {
            "ready": overview.ready + overview.retrying,
            "processing": overview.processing,
            "done": overview.done,
            "dead": overview.dead,
        }

    def teardown(self) -> None:
        """Nothing is lost and nothing is stuck: with one good worker, all ends done or dead."""
        if not hasattr(self, "lives"):
            return
        try:
            self.drain()
        finally:
            self.log.delete_queue(self.queue)

    def drain(self) -> None:
        if self.paused:
            self.pause_or_resume()
        for number in range(len(self.claims)):
            self.crash(number)
        self.reap()
        self.let_time_pass()
        while True:
            before = len(self.claims)
            self.claim("w", 3)
            if len(self.claims) == before:
                break
            self.settle(0, [""] * 5, True)
        assert {d.status for d in self.log.deliveries(self.queue, batch_size=1000)} <= {"done", "dead"}
        self.every_event_is_in_the_state_of_the_model()


@pytest.mark.parametrize("ordered_keys", [False, True])
def test_the_life_of_events_is_that_of_the_model(
    log: headwater.Headwater, connection: psycopg.Connection, ordered_keys: bool
) -> None:
    class Machine(Queue):
        pass

    Machine.log, Machine.connection, Machine.ordered_keys = log, connection, ordered_keys
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=effort(60),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
