"""Admission of requests, without sockets or threads."""

from __future__ import annotations

from itertools import product

from shmstage.transport.request_log import Admission, RequestLog


def test_new_request_executes_once() -> None:
    """B4"""
    log = RequestLog()
    assert log.admit(1)[0] is Admission.EXECUTE
    assert log.begin(1)
    assert not log.begin(1)


def test_retry_of_a_queued_or_running_request_joins_it() -> None:
    log = RequestLog()
    log.admit(1)
    assert log.admit(1) == (Admission.JOIN, b"")
    log.begin(1)
    assert log.admit(1) == (Admission.JOIN, b"")


def test_retry_of_a_finished_request_is_answered_from_memory() -> None:
    """B4"""
    log = RequestLog()
    log.admit(1)
    log.begin(1)
    log.finish(1, b"reply")
    assert log.admit(1) == (Admission.ANSWER, b"reply")
    assert log.admit(1) == (Admission.ANSWER, b"reply")


def test_higher_sequence_cancels_lower_ones_not_begun() -> None:
    log = RequestLog()
    for sequence in (1, 2, 3):
        log.admit(sequence)
    assert not log.begin(1) and not log.begin(2) and log.begin(3)
    assert log.admit(1)[0] is Admission.CANCELLED


def test_higher_sequence_leaves_a_running_one_alone() -> None:
    log = RequestLog()
    log.admit(1)
    log.begin(1)
    log.admit(2)
    log.finish(1, b"late")
    assert log.admit(1) == (Admission.ANSWER, b"late")
    assert log.begin(2)


def test_lower_sequence_that_arrives_after_a_higher_one_never_runs() -> None:
    log = RequestLog()
    log.admit(5)
    assert log.admit(4)[0] is Admission.CANCELLED
    assert not log.begin(4)


def test_end_of_the_session_cancels_what_has_not_begun() -> None:
    log = RequestLog()
    log.admit(1)
    log.cancel_queued()
    assert not log.begin(1)


def test_memory_of_replies_is_bounded_and_never_forgets_a_running_call() -> None:
    log = RequestLog(replies_kept=4)
    log.admit(1)
    log.begin(1)
    for sequence in range(2, 50):
        log.admit(sequence)
        log.begin(sequence)
        log.finish(sequence, b"%d" % sequence)
    log.finish(1, b"one")
    assert log.admit(1) == (Admission.ANSWER, b"one")
    log.admit(50)
    log.begin(50)
    log.finish(50, b"50")
    log.admit(51)
    assert len(log._entries) == 4
    assert log.admit(2)[0] is Admission.CANCELLED


def test_nothing_begins_twice_whatever_is_retried() -> None:
    """B4: every order of five acts on two requests: enough to begin, finish and begin one again."""
    acts = [(act, sequence) for act in ("admit", "begin", "finish") for sequence in (1, 2)]
    for order in product(acts, repeat=5):
        log = RequestLog()
        begun: list[int] = []
        for act, sequence in order:
            if act == "admit":
                log.admit(sequence)
            elif act == "begin" and log.begin(sequence):
                begun.append(sequence)
            elif act == "finish" and sequence in begun:
                log.finish(sequence, b"done")
        assert begun in ([], [1], [2], [1, 2]), order
