"""Faults in registering host memory, and in uploading all leaves at once."""

from __future__ import annotations

from mutant import Mutant

REGISTRATION = "shmstage/trainer/registration.py"
RUNTIME = "shmstage/trainer/host_registry.py"
ATTACHMENT = "shmstage/trainer/attachment.py"
BUFFERS = "shmstage/trainer/device_buffers.py"
SCORING = "shmstage/trainer/scoring.py"
READER = "shmstage/memory/reader.py"
TESTS = "tests/trainer/test_registration.py"
ONE_CALL = "tests/trainer/test_one_device_put.py"

MUTANTS = (
    Mutant(
        "a pool stays registered in part",
        REGISTRATION,
        "        except HostRegistrationError as error:\n            self.close()\n",
        "        except HostRegistrationError as error:\n",
        (f"{TESTS}::test_a_failure_at_any_piece_leaves_none_registered[2]",),
    ),
    Mutant(
        "one piece that stays registered keeps the others so",
        REGISTRATION,
        '                log.warning("host memory at %#x stays registered: %s", address, error)\n',
        '                log.warning("host memory at %#x stays registered: %s", address, error)\n'
        "                break\n",
        (f"{TESTS}::test_a_piece_that_cannot_be_unregistered_keeps_no_other_one_registered",),
    ),
    Mutant(
        "read-only memory is asked for again after it was refused",
        REGISTRATION,
        "                read_only = False\n",
        "",
        (f"{TESTS}::test_a_runtime_that_knows_no_read_only_memory_is_given_it_as_writable",),
    ),
    Mutant(
        "every refusal is taken for one of read-only memory",
        REGISTRATION,
        "if self._addresses or not read_only or error.name not in NO_READ_ONLY:",
        "if not read_only:",
        (
            f"{TESTS}::test_a_piece_refused_after_others_is_not_tried_in_another_way",
            f"{TESTS}::test_a_failure_at_any_piece_leaves_none_registered[1]",
        ),
    ),
    Mutant(
        "host memory is registered for devices that are the host's own",
        RUNTIME,
        '    if "cpu" in platforms:\n',
        '    if platforms == {"cpu"}:\n',
        (f"{TESTS}::test_what_has_no_runtime_says_so_and_opens_none",),
    ),
    Mutant(
        "a pool is unmapped while it is registered",
        ATTACHMENT,
        "        self._registered.close()\n        self._reader.close()",
        "        self._reader.close()\n        self._registered.close()",
        (f"{TESTS}::test_the_old_pool_is_unregistered_before_it_is_unmapped",),
    ),
    Mutant(
        "host_register = off registers",
        ATTACHMENT,
        'if host_register == "off":',
        'if host_register == "never":',
        (f"{TESTS}::test_a_trainer_told_off_or_on_the_cpu_registers_nothing_and_trains",),
    ),
    Mutant(
        "aux slots are not registered",
        READER,
        "for slot in range(self._geometry.slot_count)]\n\n    def close",
        "for slot in range(self.slots)]\n\n    def close",
        (f"{TESTS}::test_the_trainer_registers_each_slot_of_its_pool_and_says_so_in_info",),
    ),
    Mutant(
        "leaves are uploaded one by one",
        BUFFERS,
        "    placed = jax.device_put([views[name] for name in names], [shardings[name] for name in names])\n",
        "    placed = [jax.device_put(views[name], shardings[name]) for name in names]\n",
        (
            f"{ONE_CALL}::test_a_microbatch_is_staged_in_one_call_and_trained_without_another",
            f"{ONE_CALL}::test_the_double_buffer_uploads_in_one_call",
        ),
    ),
    Mutant(
        "late fields are patched one by one",
        SCORING,
        "                arrays = jax.device_put(copies, {name: to.shardings[name] for name in copies})\n",
        "                arrays = {name: jax.device_put(copies[name], to.shardings[name]) for name in copies}\n",
        (f"{ONE_CALL}::test_late_fields_are_patched_in_one_call",),
    ),
)
