"""Faults in where memory comes from, what proves a death, and what happens when memory is taken away."""

from __future__ import annotations

from mutant import Mutant

LIMITS = "shmstage/memory/limits.py"
RESERVATION = "shmstage/memory/reservation.py"
MOUNTS = "shmstage/memory/mounts.py"
READER = "shmstage/memory/reader.py"
SPACE = "tests/memory/test_space.py"
TRUNCATED = "tests/trainer/test_truncated_pool.py"

MUTANTS = (
    Mutant(
        "in a hybrid tree the unified hierarchy does not count",
        LIMITS,
        'for root in (cgroup_root, cgroup_root / "unified"):',
        "for root in (cgroup_root,):",
        (f"{SPACE}::test_in_a_hybrid_tree_both_hierarchies_count",),
    ),
    Mutant(
        "a cgroup's path leads out of the mount",
        LIMITS,
        '".." not in Path(inner).parts and ',
        "",
        (f"{SPACE}::test_a_path_that_leads_out_of_the_mount_falls_back_to_its_root",),
    ),
    Mutant(
        "a mount that lies under another one says whether there are huge pages",
        MOUNTS,
        "if inside and len(point) >= len(best[0]):",
        "if inside and len(point) > len(best[0]):",
        (f"{SPACE}::test_the_mount_that_lies_on_top_says_whether_there_are_huge_pages",),
    ),
    Mutant(
        "pages that were spread over the nodes are not noted in the header",
        RESERVATION,
        "interleaved=nodes > 0",
        "interleaved=False",
        (f"{SPACE}::test_pages_spread_over_the_nodes_are_what_the_kernel_notes_and_the_header_says",),
    ),
    Mutant(
        "pages are said to be spread over the nodes and are not",
        RESERVATION,
        'nodes = _interleave(mapping) if numa == "interleave" else 0',
        'nodes = 1 if numa == "interleave" else 0',
        (f"{SPACE}::test_pages_spread_over_the_nodes_are_what_the_kernel_notes_and_the_header_says",),
    ),
    Mutant(
        "a late region is mapped at every lease",
        READER,
        "            self._late_windows[slot, layout.layout_id] = window\n",
        "            self._late_windows[slot, id(window)] = window\n",
        (f"{SPACE}::test_slots_and_hand_offs_cost_neither_descriptors_nor_mappings",),
    ),
    Mutant(
        "a lock without its name is a dead process",
        "shmstage/memory/identity.py",
        "self._gone = _readable(self._pidfd)\n",
        "self._gone = _readable(self._pidfd) or os.fstat(self._descriptor).st_nlink == 0\n",
        ("tests/memory/test_identity.py::test_a_process_whose_lock_lost_its_name_is_alive",),
    ),
    Mutant(
        "a pid is compared whichever namespace it is of",
        "shmstage/memory/inspect.py",
        "comparable = not pid or namespace == namespace_word() != 0",
        "comparable = True",
        ("tests/memory/test_sweep.py::test_a_pid_from_who_knows_where_proves_no_death_once_the_lock_is_gone",),
    ),
    Mutant(
        "a copy that was cut does not say of which pool",
        "shmstage/trainer/device_buffers.py",
        "                lease.check()  # says which pool, and what is left of it\n",
        "",
        (f"{TRUNCATED}::test_a_pool_that_is_cut_while_the_trainer_copies_fails_the_command_and_not_the_process",),
    ),
    Mutant(
        "a double buffer keeps the slot of an upload that failed",
        "shmstage/trainer/double_buffer.py",
        "            lease.end()  # nobody will ask for it again",
        "            pass  # nobody will ask for it again",
        (f"{TRUNCATED}::test_the_slot_of_an_upload_that_failed_is_given_back_to_its_producer",),
    ),
    Mutant(
        "an evaluation that was not uploaded keeps its aux slot",
        "shmstage/trainer/scoring.py",
        "                lease.end()  # an aux slot",
        "                pass  # an aux slot",
        (f"{TRUNCATED}::test_the_aux_slot_of_an_evaluation_that_could_not_be_uploaded_is_free_again",),
    ),
    Mutant(
        "a pool that was half mapped stays so",
        READER,
        "            undo.callback(self._payload.close)\n",
        "",
        (
            f"{TRUNCATED}::test_a_pool_that_cannot_be_mapped_whole_is_refused_to_its_orchestrator_and_the_old_one_stays",
        ),
    ),
    Mutant(
        "a dead consumer's slots are not told",
        "shmstage/transport/producer.py",
        'cell.lose(f"{reason}, holding {held}" if held else reason)',
        "cell.lose(reason)",
        (
            "tests/transport/test_producer_consumer.py::"
            "test_consumer_that_leaves_early_is_a_loss_until_another_takes_its_place",
        ),
    ),
    Mutant(
        "a weights reader whose lock lost its name is written under",
        "shmstage/memory/cells.py",
        "            self._watches[identity] = watch\n",
        "",
        ("tests/memory/test_cells.py::test_a_reader_whose_lock_lost_its_name_still_reads",),
    ),
)
