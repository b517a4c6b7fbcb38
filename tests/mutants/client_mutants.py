"""Faults in how calls, replies and events travel: client, server, what they remember, and the frames."""

from __future__ import annotations

from mutant import Mutant

CLIENT = "shmstage/transport/client.py"
SERVER = "shmstage/transport/server.py"
REQUESTS = "shmstage/transport/request_log.py"
EVENTS = "shmstage/transport/event_log.py"
CODEC = "shmstage/wire/codec.py"
SCHEMA = "shmstage/wire/schema.py"
SESSION = "tests/transport/test_session.py"
LOG = "tests/transport/test_request_log.py"
FRAMES = "tests/wire/test_codec.py"

MUTANTS = (
    # --- requests and replies
    Mutant(
        "a finished call runs again when it is retried",
        REQUESTS,
        "                if entry.state is State.DONE:\n                    return Admission.ANSWER, entry.reply\n",
        "                if entry.state is State.DONE:\n"
        "                    entry.state = State.QUEUED\n                    return Admission.EXECUTE, b\"\"\n",
        (f"{SESSION}::test_retry_of_a_finished_call_is_answered_from_memory",
         f"{LOG}::test_retry_of_a_finished_request_is_answered_from_memory"),
    ),
    Mutant(
        "a running call runs again when it is retried",
        REQUESTS,
        "                return Admission.JOIN, b\"\"\n",
        "                return Admission.EXECUTE, b\"\"\n",
        (f"{LOG}::test_retry_of_a_queued_or_running_request_joins_it",),
    ),
    Mutant(
        "what is taken from the queue runs whatever became of it",
        REQUESTS,
        "            if entry is None or entry.state is not State.QUEUED:\n",
        "            if entry is None:\n",
        (f"{SESSION}::test_retry_of_a_running_call_joins_it",
         f"{SESSION}::test_call_given_up_is_cancelled_by_the_next_one"),
    ),
    Mutant(
        "a lower sequence is executed after a higher one",
        REQUESTS,
        "            if sequence <= self._highest:\n",
        "            if sequence < 0:\n",
        (f"{LOG}::test_lower_sequence_that_arrives_after_a_higher_one_never_runs",),
    ),
    Mutant(
        "a call that was given up is executed before the next one",
        REQUESTS,
        "            self._cancel_queued()\n            self._highest",
        "            self._highest",
        (f"{SESSION}::test_call_given_up_is_cancelled_by_the_next_one",),
    ),
    Mutant(
        "the reply of a call that still runs is forgotten",
        REQUESTS,
        "            if self._entries[oldest].state in (State.QUEUED, State.RUNNING):\n",
        "            if self._entries[oldest].state is State.QUEUED:\n",
        (f"{LOG}::test_memory_of_replies_is_bounded_and_never_forgets_a_running_call",),
    ),
    Mutant(
        "a client takes the reply to an earlier call for its own",
        CLIENT,
        "return isinstance(message, Reply) and (message.sequence == pending.sequence or _is_refusal(message))",
        "return isinstance(message, Reply)",
        (f"{SESSION}::test_reply_that_comes_after_its_call_was_given_up_answers_no_other_call",),
    ),
    Mutant(
        "a retry is a new command",
        CLIENT,
        "                send_at = now + (retry_s if self._channel.send(frame) else _FULL_S)\n",
        "                request = decode(frame)\n"
        "                if isinstance(request, Request):\n"
        "                    frame = encode(Request(request.epoch, request.incarnation, request.sequence + 1,\n"
        "                                           request.command, request.arguments))\n"
        "                send_at = now + (retry_s if self._channel.send(frame) else _FULL_S)\n",
        (f"{SESSION}::test_retry_of_a_finished_call_is_answered_from_memory",),
    ),
    Mutant(
        "the last words of a dead trainer are not heard",
        CLIENT,
        "        if dying:\n            held =",
        "        if True:\n            held =",
        (f"{SESSION}::test_words_still_under_way_when_the_peer_is_found_dead_are_heard",),
    ),
    Mutant(
        "an error of the trainer's own loses its class",
        CLIENT,
        "_ERRORS.get(reply.error_kind, ShmstageError)(reply.error_text)",
        "ShmstageError(reply.error_text)",
        (f"{SESSION}::test_error_crosses_with_its_class",),
    ),
    # --- sessions
    Mutant(
        "a call meant for the incarnation before is executed",
        SERVER,
        "        if request.incarnation != self.incarnation:\n",
        "        if request.incarnation < 0:\n",
        (f"{SESSION}::test_mismatch_is_peer_restarted_and_nothing_is_done[1-8-incarnation 8; this is 7]",
         f"{SESSION}::test_server_that_restarted_refuses_the_old_incarnations_calls"),
    ),
    Mutant(
        "a call of another epoch is executed",
        SERVER,
        "        if request.epoch != session.hello.epoch:\n",
        "        if request.epoch < 0:\n",
        (f"{SESSION}::test_mismatch_is_peer_restarted_and_nothing_is_done[0-7-epoch 0]",),
    ),
    Mutant(
        "a connection that was replaced is still served",
        SERVER,
        "        if peer != session.peer:\n",
        "        if not peer:\n",
        (f"{SESSION}::test_request_of_a_connection_that_was_replaced_is_peer_restarted",),
    ),
    Mutant(
        "an older epoch takes the trainer back",
        SERVER,
        "            if hello.epoch < known.hello.epoch:\n",
        "            if hello.epoch < 0:\n",
        (f"{SESSION}::test_hello_of_an_older_epoch_is_refused",),
    ),
    Mutant(
        "commands of the old epoch run in the new one",
        SERVER,
        "                self._session.over = True\n                self._session.requests.cancel_queued()\n",
        "                self._session.over = True\n",
        (f"{SESSION}::test_new_epoch_cancels_what_the_old_one_had_waiting",),
    ),
    Mutant(
        "a repeated hello opens the session again",
        SERVER,
        "            if known.peer == peer and known.hello_frame == frame:\n",
        "            if not known.peer:\n",
        (f"{SESSION}::test_hello_repeats_itself_until_the_server_answers",),
    ),
    # --- events
    Mutant(
        "an event that was sent again is given twice",
        CLIENT,
        "if event.incarnation != self._incarnation or event.number <= self._received:",
        "if event.incarnation != self._incarnation:",
        (f"{SESSION}::test_same_client_that_says_hello_again_gets_every_event_once",
         f"{SESSION}::test_no_event_is_lost_or_doubled_whatever_the_channel_loses"),
    ),
    Mutant(
        "an event of another incarnation is believed",
        CLIENT,
        "if event.incarnation != self._incarnation or event.number <= self._received:",
        "if event.number <= self._received:",
        (f"{SESSION}::test_late_event_of_another_incarnation_is_dropped",),
    ),
    Mutant(
        "a gap in the events is passed over",
        CLIENT,
        "        if event.number > self._received + 1:\n            self._ask_resend()\n            return\n",
        "",
        (f"{SESSION}::test_event_that_was_lost_is_sent_again_in_order",),
    ),
    Mutant(
        "a gap in the events is never asked for again",
        CLIENT,
        "        if position == self._received and now < asked_at + _RESEND_ASK_S:\n",
        "        if position == self._received:\n",
        (f"{SESSION}::test_gap_is_asked_for_again_when_the_question_is_lost_too",),
    ),
    Mutant(
        "a newest event that was lost is never missed",
        CLIENT,
        "            if self._incarnation and message.last_event > self._received:\n                self._ask_resend()",
        "            if self._incarnation and message.last_event > self._received:\n                pass",
        (f"{SESSION}::test_last_event_that_was_lost_is_noticed_by_the_next_ping",),
    ),
    Mutant(
        "events are acknowledged that have not arrived",
        CLIENT,
        "self._channel.send(encode(EventAck(self._received, resend=True)))",
        "self._channel.send(encode(EventAck(self._received + 1, resend=True)))",
        (f"{SESSION}::test_event_that_was_lost_is_sent_again_in_order",),
    ),
    Mutant(
        "events in hand are dropped by a second hello",
        CLIENT,
        "                self._received = max(self._received, answer.first_event - 1)\n",
        "                self._inbox.clear()\n                self._received = answer.first_event - 1\n",
        (f"{SESSION}::test_event_in_hand_when_the_client_says_hello_again_is_not_lost",),
    ),
    Mutant(
        "one event more is forgotten than was acknowledged",
        EVENTS,
        "self._kept[0][0] <= upto",
        "self._kept[0][0] <= upto + 1",
        (f"{SESSION}::test_event_that_was_lost_is_sent_again_in_order",),
    ),
    Mutant(
        "events are forgotten as soon as they are sent",
        EVENTS,
        "        self._kept.append((number, frame))\n",
        "        self._kept.append((number, frame))\n        self._kept.popleft()\n",
        (f"{SESSION}::test_event_that_was_lost_is_sent_again_in_order",
         f"{SESSION}::test_events_not_acknowledged_reach_the_next_connection_of_the_epoch"),
    ),
    Mutant(
        "events of the old epoch reach the new one",
        SERVER,
        "                self._events.discard()  # they told of work of an epoch that is over\n",
        "                pass\n",
        (f"{SESSION}::test_new_epoch_sees_no_event_of_the_old_one",),
    ),
    # --- frames
    Mutant(
        "numpy scalars and bools pass for integers",
        SCHEMA,
        "        if type(value) is not int or not 0 <= value < self.limit:\n",
        "        if not 0 <= value < self.limit:  # type: ignore[operator]\n",
        (f"{FRAMES}::test_handle_out_of_range_is_refused_at_both_ends[change3]",
         f"{FRAMES}::test_hostile_frame_is_refused_with_its_reason"),
    ),
    Mutant(
        "nesting has no limit",
        SCHEMA,
        "    if depth >= DEPTH_LIMIT:\n",
        "    if depth < 0:\n",
        (f"{FRAMES}::test_hostile_frame_is_refused_with_its_reason",),
    ),
    Mutant(
        "a large frame is parsed before it is refused",
        CODEC,
        "    if len(frame) > limit_nbytes:\n        raise ProtocolError(f\"a frame of",
        "    if len(frame) < 0:\n        raise ProtocolError(f\"a frame of",
        (f"{FRAMES}::test_oversize_frame_is_refused_before_it_is_parsed",),
    ),
    Mutant(
        "of a key that comes twice the last one counts",
        CODEC,
        "        if key in result:\n",
        "        if not key:\n",
        (f"{FRAMES}::test_hostile_frame_is_refused_with_its_reason",),
    ),
    Mutant(
        "fields that nobody knows are passed over",
        CODEC,
        "    if len(wire) != len(schema):\n",
        "    if len(wire) < len(schema):\n",
        (f"{FRAMES}::test_hostile_frame_is_refused_with_its_reason",),
    ),
)
