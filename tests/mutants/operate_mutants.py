"""Faults in what people are told of the dead and the living, and in what is removed on the strength of it."""

from __future__ import annotations

from mutant import Mutant

SWEEP = "shmstage/memory/sweep.py"
INSPECT = "shmstage/memory/inspect.py"
OBJECTS = "shmstage/memory/objects.py"
VERDICT = "shmstage/operate/run_verdict.py"
ENDPOINTS = "shmstage/transport/endpoint_lock.py"
TEST_SWEEP = "tests/memory/test_sweep.py"
TEST_INSPECT = "tests/memory/test_inspect.py"
TEST_GC = "tests/operate/test_gc.py"
TEST_STATUS = "tests/operate/test_status.py"

MUTANTS = (
    Mutant(
        "a sweep judges what has no name any more",
        SWEEP,
        "    if os.fstat(descriptor).st_nlink == 0:\n",
        "    if os.fstat(descriptor).st_nlink < 0:\n",
        (f"{TEST_SWEEP}::test_what_lost_its_name_before_it_was_locked_is_not_judged",),
    ),
    Mutant(
        "a sweep takes an owner that cannot be seen for dead",
        SWEEP,
        '        return False, f"its owner, process {pid}, cannot be seen',
        '        return True, f"its owner, process {pid}, cannot be seen',
        (f"{TEST_GC}::test_a_pool_whose_owner_cannot_be_seen_is_left_alone",),
    ),
    Mutant(
        "another user's file under our name is taken for ours",
        OBJECTS,
        "if status.st_uid != os.getuid():",
        "if status.st_uid < 0:",
        (f"{TEST_GC}::test_what_is_no_file_of_this_users_is_left_alone_and_named",),
    ),
    Mutant(
        "a sweep fails on a pool that goes while it is judged",
        SWEEP,
        "        except FileNotFoundError:\n            raise\n        except OSError as error:\n",
        "        except OSError as error:\n",
        (f"{TEST_SWEEP}::test_an_owner_that_ends_in_order_while_it_is_judged_has_left_nothing",),
    ),
    Mutant(
        "a dry run removes",
        SWEEP,
        "    if dry_run:\n        os.stat(",
        "    if not dry_run:\n        os.stat(",
        (f"{TEST_SWEEP}::test_a_dry_run_removes_nothing",),
    ),
    Mutant(
        "a dry run says of a pool that is gone that it would be removed",
        SWEEP,
        "        os.stat(os.path.join(SHM_DIR, name), follow_symlinks=False)\n",
        "        pass\n",
        (f"{TEST_SWEEP}::test_an_owner_that_ends_in_order_while_it_is_judged_has_left_nothing",),
    ),
    Mutant(
        "a pool between its making and its lock is called dead",
        INSPECT,
        'return "half made, and its owner is dead" if owner_dead else UNFINISHED',
        'return "half made, and its owner is dead"',
        (f"{TEST_INSPECT}::test_between_making_a_file_and_locking_it_nobody_is_called_dead",),
    ),
    Mutant(
        "an owner that ended in order while its pool was read is called dead",
        INSPECT,
        "    if os.fstat(descriptor).st_nlink == 0:  #",
        "    if os.fstat(descriptor).st_nlink < 0:  #",
        (f"{TEST_INSPECT}::test_a_pool_whose_owner_ends_in_order_while_it_is_read_is_not_one_of_the_dead",),
    ),
    Mutant(
        "what contradicts a pool's header is not said",
        INSPECT,
        "        return replace(found, problem=printable(str(error)))\n",
        '        return replace(found, problem="it contradicts its size")\n',
        (f"{TEST_INSPECT}::test_a_pool_that_was_not_reserved_is_told_so_and_not_that_its_header_lies",),
    ),
    Mutant(
        "a run whose half-made pool is still there is said to have left nothing",
        VERDICT,
        '    tail += "".join(f"; {pool.name} is {pool.problem}" for pool in unsure)\n',
        "",
        (f"{TEST_INSPECT}::test_between_making_a_file_and_locking_it_nobody_is_called_dead",),
    ),
    Mutant(
        "a process that cannot be seen counts as dead in the verdict",
        VERDICT,
        "living = [process for process in known if process.alive is not False and process.pid]",
        "living = [process for process in known if process.alive and process.pid]",
        (f"{TEST_STATUS}::test_the_first_word_says_how_the_run_is",),
    ),
    Mutant(
        "a dry run asks only whether an endpoint's lock is held",
        ENDPOINTS,
        "        error = _why_not_stale(path)\n",
        "        error = None\n",
        (f"{TEST_GC}::test_a_dry_run_and_a_real_one_say_the_same_of_what_is_no_stale_socket",),
    ),
    Mutant(
        "a lock that cannot be opened is nobody's",
        ENDPOINTS,
        '        return f"its lock cannot be opened: {error.strerror}"\n',
        '        return "" if error else ""\n',
        (f"{TEST_GC}::test_a_dry_run_and_a_real_one_say_the_same_of_what_is_no_stale_socket",),
    ),
    Mutant(
        "a kernel that denies huge pages is not asked",
        "shmstage/memory/mounts.py",
        'overruled = {"deny": "never", "force": "always"}',
        'overruled = {"force": "always"}',
        ("tests/memory/test_space.py::test_of_the_kernels_policies_deny_and_force_overrule_the_mount",),
    ),
    Mutant(
        "a run without steps in its record is said to make another number than it does",
        "shmstage/operate/run_status.py",
        "        steps = DEFAULT_STEPS\n",
        "        steps = DEFAULT_STEPS + 1\n",
        (f"{TEST_STATUS}::test_what_run_json_does_not_say_is_what_a_run_would_do_without",),
    ),
)
